"""The posterior object, files and pictures."""

from __future__ import annotations

import io
import json
import pickle
import secrets
import shutil
import zipfile

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import SERVED_FAMILIES

import dpvim
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.posterior.posterior import Posterior

mpl.use("Agg")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 2))
Y = X @ np.array([1.0, -0.5]) + RNG.normal(size=400)


def model(X, y=None):
    """One site of each kind: a vector, a positive number, an interval, a simplex."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    bound = numpyro.sample("bound", dist.Uniform(-1.0, 2.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w + bound + share[0], scale), obs=y)


@pytest.fixture(scope="module", params=SERVED_FAMILIES)
def fit(request):
    return dpvim.fit(
        model,
        X,
        Y,
        epsilon=2.0,
        delta=1e-4,
        family=request.param,
        clip_norm=3.0,
        num_steps=600,
        trace_every=2,
        learning_rate=1e-2,
        seed=0,
    )


@pytest.fixture(scope="module")
def posterior(fit):
    return fit.averaged


def test_statistics_agree_with_draws(posterior):
    draws = posterior.sample(100_000, seed=5)
    for name in ("w", "scale", "bound", "share"):
        spread = draws[name].std(axis=0)
        np.testing.assert_allclose(
            posterior.mean[name], draws[name].mean(axis=0), atol=0.03 * spread.max()
        )
        np.testing.assert_allclose(posterior.std[name], spread, rtol=0.03)
        wanted = np.moveaxis(np.quantile(draws[name], [0.05, 0.95], axis=0), 0, -1)
        np.testing.assert_allclose(posterior.interval(0.9)[name], wanted, atol=0.06 * spread.max())


def test_intervals_respect_supports(posterior):
    intervals = posterior.interval(0.999)
    assert (intervals["scale"] > 0).all()
    assert (intervals["bound"] > -1).all()
    assert (intervals["bound"] < 2).all()
    assert (intervals["share"] > 0).all()
    with pytest.raises(ValueError, match="strictly between"):
        posterior.interval(1.0)


def test_log_prob_is_the_density_of_the_sites(posterior):
    """Integrates to one over a positive site; agrees with NumPyro for the joint."""
    draws = posterior.sample(3, seed=1)
    found = posterior.log_prob(draws)
    assert found.shape == (3,)
    for i in range(3):
        single = {name: value[i] for name, value in draws.items()}
        np.testing.assert_allclose(posterior.log_prob(single), found[i], rtol=1e-4)
        latent = posterior.space.unconstrain({k: jnp.asarray(v) for k, v in single.items()})
        if isinstance(posterior.latent_dist, GaussianPosterior):
            base = dist.MultivariateNormal(posterior.loc, posterior.covariance).log_prob(latent)
        else:
            base = posterior.latent_dist.log_density(np.asarray(latent))
        np.testing.assert_allclose(found[i], base - posterior.space.log_det(latent), rtol=1e-3)
    with pytest.raises(ValueError, match="every site"):
        posterior.log_prob({"w": np.zeros(2)})


def test_log_prob_of_a_positive_site_integrates_to_one():
    space = LatentSpace([Site("s", (), (), dist.constraints.positive)])
    windows = dpvim.posterior.convergence.Windows(np.array([10]), np.array([True]))
    lognormal = Posterior(
        GaussianPosterior(np.array([0.3]), np.array([0.4]), np.array([0.1]), windows), space, 1, {}
    )
    grid = np.linspace(0.01, 12, 20_000)
    total = np.trapezoid(np.exp(lognormal.log_prob({"s": grid})), grid)
    assert total == pytest.approx(1.0, abs=1e-3)
    assert lognormal.mean["s"] == pytest.approx(np.exp(0.3 + 0.08), rel=0.01)


def test_summary_has_a_row_for_each_entry(fit, posterior):
    table = posterior.summary(0.8)
    assert table.index.tolist() == [
        "w[0]", "w[1]", "scale", "bound", "share[0]", "share[1]", "share[2]",
    ]  # fmt: skip
    assert table.columns.tolist() == [
        *("mean", "sd", "10%", "90%", "dp_share", "window", "converged", "method")
    ]
    assert set(table["method"]) == {"trace"}
    assert table.attrs == {"method": "trace", "reason": posterior.reason}
    assert ((table["dp_share"] >= 0) & (table["dp_share"] <= 1)).all()
    assert (table["window"] <= 600).all()
    share = np.square(posterior.dp_scale / posterior.scale)
    np.testing.assert_allclose(table["dp_share"].iloc[:4], share[:4], rtol=1e-5)
    unaware = fit.posterior_from("last", noise_aware=None).summary()
    assert (unaware["dp_share"] == 0).all()


def test_parameters_that_have_not_converged_are_named(fit):
    fresh = dpvim.Fit(fit.plan, fit.privacy, fit.trace, fit.space, fit.family)
    with pytest.warns(dpvim.ConvergenceWarning, match=r"parameters have not converged: .*\["):
        posterior = fresh.posterior
    assert set(posterior.not_converged) <= set(fit.space.raw_labels())
    table = posterior.summary()
    named = [label for label in table.index[:4] if not table.loc[label, "converged"]]
    assert named == [label for label in posterior.not_converged if label in table.index]


def test_other_posteriors_from_the_same_trace(fit):
    last = fit.posterior_from("last")
    gaussian = fit.family.is_gaussian
    if gaussian:
        np.testing.assert_allclose(last.loc, fit.trace.loc[-1])
    assert (last.dp_scale > fit.averaged.dp_scale).mean() > 0.7
    plain = fit.posterior_from("last", noise_aware=None)
    np.testing.assert_array_equal(plain.dp_scale, 0)
    assert (plain.scale <= last.scale * (1 + 1e-6)).all()
    if gaussian:
        fixed = fit.posterior_from("trace", window=100)
        mean = fit.trace.loc[-100:].mean(axis=0)
        np.testing.assert_allclose(fixed.loc, mean, rtol=1e-4, atol=1e-5)


def test_predict_draws_outcomes(posterior):
    predicted = posterior.predict(model, X[:5], num_samples=200, seed=0)
    assert predicted["y"].shape == (200, 5)
    assert np.isfinite(predicted["y"]).all()


def test_to_arviz_carries_the_guarantee(posterior):
    data = posterior.to_arviz(300, seed=0)
    assert data.posterior["w"].shape == (1, 300, 2)
    assert data.posterior.attrs["delta"] == 1e-4
    assert data.posterior.attrs["relation"] == "zero_out"
    assert data.posterior.attrs["epsilon"] == pytest.approx(2.0, rel=0.01)


# -- files -----------------------------------------------------------------------------------------


def test_a_saved_fit_needs_neither_data_nor_model(fit, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path, not_for_release=True)
    loaded = dpvim.load(path)
    assert str(loaded.privacy) == str(fit.privacy)
    assert loaded.plan == fit.plan
    np.testing.assert_array_equal(loaded.trace.loc, fit.trace.loc)
    np.testing.assert_array_equal(loaded.trace.steps, fit.trace.steps)
    for name, draws in fit.posterior.sample(50, seed=2).items():
        np.testing.assert_allclose(loaded.posterior.sample(50, seed=2)[name], draws, rtol=1e-5)
    np.testing.assert_allclose(loaded.params["auto_loc"], fit.params["auto_loc"])
    with pytest.raises(RuntimeError, match="loaded fit"):
        _ = loaded.guide
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]
    loaded.save(path, not_for_release=True)  # and again, in place
    assert str(dpvim.load(path).privacy) == str(fit.privacy)


@pytest.fixture(scope="module")
def nonprivate():
    return dpvim.fit_nonprivate(model, X, Y, num_steps=20)


def test_a_nonprivate_fit_stays_nonprivate(nonprivate, tmp_path):
    nonprivate.save(tmp_path / "a.npz", not_for_release=True)
    loaded = dpvim.load(tmp_path / "a.npz")
    assert "NOT PRIVATE" in str(loaded.privacy)
    assert "NOT PRIVATE" in repr(loaded)


def test_a_fit_without_a_guarantee_is_not_saved_by_accident(fit, nonprivate, tmp_path):
    for one, why in ((fit, "given seed"), (nonprivate, "without clipping")):
        with pytest.raises(dpvim.NotPrivateError, match=why):
            one.save(tmp_path / "a.npz")
    assert not any(tmp_path.iterdir())


def test_the_key_is_in_no_file_and_no_text(tmp_path, monkeypatch, caplog, capfd):
    """A private fit may be shared: what protects it must not be in it, in any usual notation."""
    keys = []
    real = secrets.randbits
    monkeypatch.setattr("secrets.randbits", lambda k: keys.append(real(k)) or keys[-1])
    caplog.set_level("DEBUG")
    private = dpvim.fit(model, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=20, progress=True)
    private.save(tmp_path / "a.npz")
    assert len(keys) >= 2  # membership is not drawn with whole batches, its key is
    text = repr(private) + str(private.privacy) + caplog.text + "".join(capfd.readouterr())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    for key in keys:
        assert str(key) not in text
        assert f"{key:x}" not in text
        for order in ("little", "big"):
            # Any eighth of the key would be a leak.
            raw = key.to_bytes(32, order)
            assert not any(raw[i : i + 8] in content for i in range(0, 32, 8))
        assert str(key).encode() not in content
        assert f"{key:x}".encode() not in content


def test_the_file_is_arrays_and_json(fit, tmp_path):
    fit.save(tmp_path / "a.npz", not_for_release=True)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        names = set(archive.namelist())
        meta = json.loads(archive.read("meta.json"))
    assert "meta.json" in names
    assert all(name.endswith((".npy", ".json")) for name in names)
    assert "seed" not in json.dumps(meta)


def rewritten(fit, tmp_path, **members):
    """A saved fit with some members of the archive replaced."""
    fit.save(tmp_path / "good.npz", not_for_release=True)
    with zipfile.ZipFile(tmp_path / "good.npz") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    for name, change in members.items():
        key = {"meta": "meta.json"}.get(name, f"{name}.npy")
        content[key] = change(content[key])
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return tmp_path / "bad.npz"


def change_meta(**changes):
    return lambda raw: json.dumps(json.loads(raw) | changes).encode()


def test_broken_files_are_explained(fit, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        dpvim.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(dpvim.FileError, match="not a fit saved by dpvim"):
        dpvim.load(tmp_path / "text.npz")
    fit.save(tmp_path / "whole.npz", not_for_release=True)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(dpvim.FileError, match="cut short"):
        dpvim.load(tmp_path / "short.npz")
    np.savez(tmp_path / "foreign.npz", a=np.zeros(3))
    with pytest.raises(dpvim.FileError, match="another kind"):
        dpvim.load(tmp_path / "foreign.npz")
    with pytest.raises(dpvim.FileError, match="Install a newer dpvim"):
        dpvim.load(rewritten(fit, tmp_path, meta=change_meta(version=99)))
    with pytest.raises(dpvim.FileError, match="damaged"):
        dpvim.load(rewritten(fit, tmp_path, meta=change_meta(family="unheard_of")))
    with pytest.raises(dpvim.FileError, match="damaged"):
        dpvim.load(rewritten(fit, tmp_path, meta=change_meta(sites=[])))
    with pytest.raises(dpvim.FileError, match="damaged"):
        dpvim.load(rewritten(fit, tmp_path, loc=lambda raw: raw[:40]))


def test_a_hostile_file_runs_nothing(fit, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(dpvim.FileError, match="damaged"):
        dpvim.load(rewritten(fit, tmp_path, loc=lambda raw: buffer.getvalue()))
    with pytest.raises(dpvim.FileError):
        dpvim.load(rewritten(fit, tmp_path, loc=lambda raw: pickle.dumps(Bomb())))


def test_a_file_that_unfolds_to_more_than_the_memory_is_not_read(fit, tmp_path):
    """Neither zeros that compress to nothing nor a header that promises more than there is."""
    fit.save(tmp_path / "good.npz", not_for_release=True)
    shutil.copy(tmp_path / "good.npz", tmp_path / "bomb.npz")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("more.npy", bytes(2**27))
    with pytest.raises(dpvim.FileError, match="unfold to"):
        dpvim.load(tmp_path / "bomb.npz")

    def promise(raw):
        header = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (10**13, 3)}
        np.lib.format.write_array_header_1_0(header, shape)
        return header.getvalue() + bytes(100)

    with pytest.raises(dpvim.FileError, match="as long as its header says"):
        dpvim.load(rewritten(fit, tmp_path, loc=promise))
    with pytest.raises(dpvim.FileError, match="damaged"):
        dpvim.load(rewritten(fit, tmp_path, meta=lambda raw: b"[" * 200_000))


def test_a_file_cannot_claim_less_than_its_plan_costs(fit, tmp_path):
    def claiming(**fields):
        def change(raw):
            meta = json.loads(raw)
            meta["privacy"] |= fields
            return json.dumps(meta).encode()

        return change

    with pytest.raises(dpvim.FileError):
        dpvim.load(rewritten(fit, tmp_path, meta=claiming(epsilon=1e-3)))
    with pytest.raises(dpvim.FileError, match="1 are accounted for"):
        dpvim.load(rewritten(fit, tmp_path, meta=claiming(steps_done=1)))
    for odd in (lambda steps: 0 * steps, lambda steps: np.append(steps[:-1], 1), lambda s: s * 1.0):

        def change(raw, odd=odd):
            buffer = io.BytesIO()
            np.save(buffer, odd(np.load(io.BytesIO(raw))))
            return buffer.getvalue()

        with pytest.raises(dpvim.FileError, match="numbers that grow"):
            dpvim.load(rewritten(fit, tmp_path, steps=change))


@pytest.mark.parametrize(
    "support",
    [
        dist.constraints.real,
        dist.constraints.real_vector,
        dist.constraints.positive,
        dist.constraints.unit_interval,
        dist.constraints.simplex,
        dist.constraints.ordered_vector,
        dist.constraints.corr_cholesky,
        dist.constraints.interval(-1.0, 2.0),
        dist.constraints.greater_than(np.array([1.0, 2.0])),
        dist.constraints.independent(dist.constraints.positive, 1),
    ],
    ids=lambda support: type(support).__name__,
)
def test_supports_survive_the_file(support):
    from dpvim.serialization import _site_from_json, _site_to_json

    site = Site("a", (2,), (2,), support)
    if type(support).__name__ == "_CorrCholesky":
        site = Site("a", (2, 2), (1,), support)
    if type(support).__name__ == "_Simplex":
        site = Site("a", (3,), (2,), support)
    again = _site_from_json(json.loads(json.dumps(_site_to_json(site))))
    raw = jax.random.normal(jax.random.key(0), site.raw_shape)
    np.testing.assert_allclose(again.constrain(raw), site.constrain(raw), rtol=1e-6)


def test_an_unusual_support_is_refused_when_saving():
    from dpvim.serialization import _site_to_json

    with pytest.raises(ValueError, match="ZeroSum cannot be saved"):
        _site_to_json(Site("a", (3,), (2,), dist.constraints.zero_sum(1)))


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dim", [5, 700])
def test_pictures_for_few_and_for_many(dim, tmp_path):
    def wide(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
        numpyro.sample("x", dist.Normal(w, 1).to_event(1), obs=x)

    data = np.random.default_rng(0).normal(size=(50, dim))
    private = dpvim.fit(
        wide, data, epsilon=10.0, delta=1e-3, num_steps=300, learning_rate=1e-2, seed=0
    )
    baseline = dpvim.fit_nonprivate(wide, data, num_steps=300, learning_rate=1e-2, seed=0)
    for name, figure in {
        "trace": private.plot_trace(),
        "posterior": private.plot_posterior(nonprivate=baseline.posterior),
        "convergence": private.plot_convergence(),
    }.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        # Not more text than one can read.
        texts = [t for ax in figure.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels())]
        assert len(texts) < 60
        plt.close(figure)
