"""Fits with defaults alone: epsilon and delta are all that is given."""

from __future__ import annotations

import io
import warnings
import zipfile

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import dpvim
from dpvim.inference.steering import SteeredReleases
from dpvim.posterior.from_releases.steered import closed_form
from dpvim.types import ConvergenceWarning

BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def units_model(X, y=None):
    """An outcome in hundreds, columns in their own units, priors that know neither."""
    a = numpyro.sample("a", dist.Normal(0, 1000))
    b = numpyro.sample("b", dist.Normal(0, 1000).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1000))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(a + X @ b, sigma), obs=y)


def make_data(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.uniform(20, 80, rows), rng.random(rows) < 0.5])
    return X, 300 + 12 * X[:, 0] - 250 * X[:, 1] + rng.normal(0, 100, rows)


X, Y = make_data()


def exact_of(X, y):
    """Means and standard deviations by least squares; those of a, b and log sigma."""
    design = np.column_stack([np.ones(len(X)), X])
    mean, (residual,), *_ = np.linalg.lstsq(design, y, rcond=None)
    sigma = np.sqrt(residual / (len(X) - 3))
    sd = sigma * np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
    return np.append(mean, np.log(sigma)), np.append(sd, 1 / np.sqrt(2 * len(X)))


@pytest.fixture(scope="module")
def fit():
    return dpvim.fit(units_model, X, Y, **BUDGET, seed=0)


def test_units_do_not_matter(fit):
    mean, sd = exact_of(X, Y)
    posterior = fit.posterior
    assert (posterior.method, posterior.doubts) == ("releases", ())
    assert np.abs((posterior.loc - mean) / posterior.scale).max() < 2.5
    assert (posterior.scale < 4 * sd).all()
    assert (posterior.scale > 0.9 * sd).all()
    assert 0 <= posterior.clipped < 0.1
    assert "records clipped" in repr(posterior)
    assert posterior.summary().attrs["clipped"] == posterior.clipped


def test_the_statement_names_the_counts(fit):
    assert 2.5 < fit.plan.clip_norm / np.sqrt(4 / 3000) < 4
    assert "counts of records" in str(fit.privacy)
    assert fit.family.name == "full_rank"


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"relation": "replace_one"},
        {"relation": "add_or_remove", "num_examples": 3100},
        {"sampling_prob": 0.2},
    ],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)
def test_other_relations_and_batches(changes):
    fit = dpvim.fit(units_model, X, Y, **(BUDGET | {"epsilon": 4.0} | changes), seed=1)
    mean, _ = exact_of(X, Y)
    assert isinstance(fit.releases, SteeredReleases)
    assert np.abs((fit.posterior.loc - mean) / fit.posterior.scale).max() < 3


def test_a_saved_fit_has_the_same_posterior(fit, tmp_path):
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    loaded = dpvim.load(tmp_path / "fit.npz")
    np.testing.assert_array_equal(loaded.posterior.loc, fit.posterior.loc)
    np.testing.assert_array_equal(loaded.posterior.scale, fit.posterior.scale)
    assert loaded.posterior.clipped == fit.posterior.clipped


@pytest.mark.long
def test_many_fits_are_the_fits_one_by_one(fit):
    each = [{"seed": 0}, {"seed": 5}]
    both = dpvim.fit_many(units_model, X, Y, delta=1e-5, epsilon=1.0, each=each)
    np.testing.assert_allclose(both[0].posterior.loc, fit.posterior.loc, rtol=1e-3)
    assert not np.allclose(both[1].posterior.loc, fit.posterior.loc, rtol=1e-5)


def test_an_interrupted_fit_goes_on_from_where_it_was(ctrl_c, monkeypatch):
    monkeypatch.setattr("dpvim.inference.loop._LONGEST_CHUNK", 50)
    ctrl_c(15)
    stopped = dpvim.fit(units_model, X, Y, **BUDGET, seed=0)
    monkeypatch.undo()
    assert stopped.interrupted
    assert not stopped.releases.is_complete
    assert stopped.privacy.epsilon < 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert stopped.posterior.method == "trace"
        assert "interrupted" in stopped.posterior.reason
    whole = stopped.resume(X, Y)
    assert whole.releases.is_complete
    mean, _ = exact_of(X, Y)
    assert np.abs((whole.posterior.loc - mean) / whole.posterior.scale).max() < 3


def groups_model(group, y=None):
    """The mean of a population of groups is in no record's likelihood."""
    mu = numpyro.sample("mu", dist.Normal(1, 3))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(mu, 2))
    with numpyro.plate("records", group.shape[0]):
        numpyro.sample("y", dist.Normal(a[group], 1), obs=y)


@pytest.fixture(scope="module")
def groups():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 3, 2000)
    return group, np.array([0.0, 2.0, 5.0])[group] + rng.normal(size=2000)


@pytest.fixture(scope="module")
def groups_fit(groups):
    return dpvim.fit(groups_model, *groups, epsilon=4.0, delta=1e-5, seed=0)


def test_parameters_of_the_prior_alone_are_learnt_from_the_others(groups, groups_fit):
    group, y = groups
    means = [y[group == g].mean() for g in range(3)]
    posterior = groups_fit.posterior
    assert groups_fit.releases.basis.any(axis=1).tolist() == [False, True, True, True]
    assert posterior.doubts == ()
    assert np.abs((posterior.mean["a"] - means) / posterior.std["a"]).max() < 3
    precision = 1 / 9 + 3 / 4  # intercepts are known far better than their spread
    assert posterior.mean["mu"] == pytest.approx((1 / 9 + sum(means) / 4) / precision, abs=0.1)
    assert posterior.std["mu"] == pytest.approx(precision**-0.5, rel=0.06)


def test_a_hierarchy_has_all_that_a_posterior_has(groups, groups_fit):
    posterior = groups_fit.posterior
    summary = posterior.summary()
    assert summary.converged.all()
    assert (summary.dp_share < 1).all()
    assert summary.dp_share["mu"] < summary.dp_share["a[0]"]
    assert set(posterior.sample(10, seed=0)) == {"mu", "a"}
    assert posterior.predict(groups_model, groups[0][:5], num_samples=7)["y"].shape == (7, 5)
    assert np.isfinite(posterior.log_prob(posterior.mean))
    assert posterior.to_arviz(50).posterior["a"].shape == (1, 50, 3)
    again = groups_fit.posterior_from("releases")
    np.testing.assert_array_equal(again.loc, posterior.loc)


def test_a_saved_hierarchy_has_its_draws(groups_fit, tmp_path):
    path = tmp_path / "fit.npz"
    groups_fit.save(path, not_for_release=True)
    loaded = dpvim.load(path)
    np.testing.assert_array_equal(loaded.posterior.loc, groups_fit.posterior.loc)
    np.testing.assert_array_equal(loaded.posterior.dp_scale, groups_fit.posterior.dp_scale)
    assert loaded.posterior.reason == groups_fit.posterior.reason
    loaded.save(tmp_path / "again.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "again.npz").posterior
    np.testing.assert_array_equal(again.loc, groups_fit.posterior.loc)


def test_a_hierarchy_in_an_older_file_has_gaussians_for_a_prior(groups_fit, tmp_path):
    path, older = tmp_path / "fit.npz", tmp_path / "older.npz"
    groups_fit.save(path, not_for_release=True)
    buffer = io.BytesIO()
    np.save(buffer, np.array([0.0, 1, 1, 1]))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(older, "w") as copy:
        for name in archive.namelist():
            if not name.startswith(("draws.", "windows.origin", "windows.basis")):
                copy.writestr(name, archive.read(name))
        copy.writestr("windows.informed.npy", buffer.getvalue())
    posterior = dpvim.load(older).posterior
    np.testing.assert_array_equal(dpvim.load(older).releases.basis, groups_fit.releases.basis)
    assert "independent Gaussians" in posterior.reason
    assert posterior.mean["mu"] == pytest.approx(1, abs=0.2)


def test_effects_of_levels_beside_an_intercept_are_not_taken_for_known():
    """Textbooks' way: of base, age and region the data know the sums alone."""

    def model(age, region, y=None):
        base = numpyro.sample("base", dist.Normal(0, 10))
        by_age = numpyro.sample("by_age", dist.Normal(0, 5).expand([3]).to_event(1))
        by_region = numpyro.sample("by_region", dist.Normal(0, 5).expand([4]).to_event(1))
        mean = base + by_age[age] + by_region[region]
        with numpyro.plate("records", age.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    rng = np.random.default_rng(0)
    age, region = rng.integers(0, 3, 3000), rng.integers(0, 4, 3000)
    y = (
        3
        + np.array([1.0, 0, -1])[age]
        + np.array([0.3, -0.4, 0, 1])[region]
        + rng.normal(size=3000)
    )
    assert "8 parameters; of 2 combinations the prior alone tells" in str(
        dpvim.plan(model, age, region, y, **BUDGET)
    )
    design = np.hstack([np.ones((3000, 1)), np.eye(3)[age], np.eye(4)[region]])
    prior = np.array([10.0] + 7 * [5.0])
    covariance = np.linalg.inv(design.T @ design + np.diag(prior**-2))
    mean, sd = covariance @ design.T @ y, np.sqrt(np.diag(covariance))
    posterior = dpvim.fit(model, age, region, y, **BUDGET, seed=0).posterior
    assert np.abs((posterior.loc - mean) / posterior.scale).max() < 1
    assert (posterior.scale > 0.9 * sd).all()
    assert (posterior.scale < 1.5 * sd).all()


def test_draws_of_other_shapes_are_refused(groups_fit, tmp_path):
    path, odd = tmp_path / "fit.npz", tmp_path / "odd.npz"
    groups_fit.save(path, not_for_release=True)
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((10, 3)))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(odd, "w") as copy:
        for name in archive.namelist():
            changed = name == "draws.latents.npy"
            copy.writestr(name, buffer.getvalue() if changed else archive.read(name))
    with pytest.raises(dpvim.FileError, match="draws"):
        dpvim.load(odd)


def test_priors_that_are_gaussians_where_it_matters_keep_the_closed_form(fit):
    closed = closed_form(fit.releases, fit.plan, fit.prior).mixture
    np.testing.assert_array_equal(fit.posterior.loc, closed.loc)
    np.testing.assert_array_equal(fit.posterior.scale, closed.scale)


@pytest.mark.long
def test_initial_values_are_where_the_run_starts():
    fit = dpvim.fit(units_model, X, Y, **BUDGET, init_params={"a": 250.0}, seed=0)
    assert fit.trace.params.loc[0, 0] == pytest.approx(250.0)


def test_a_model_that_is_no_quadratic_says_so():
    """Two factors of which only the product is identified."""

    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.Normal(0, 3))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(a * b * x, 0.3), obs=y)

    x = np.random.default_rng(0).normal(size=3000)
    y = 2 * x + 0.3 * np.random.default_rng(1).normal(size=3000)
    assert "act only together" in str(dpvim.plan(model, x, y, epsilon=8.0, delta=1e-5))
    fit = dpvim.fit(model, x, y, epsilon=8.0, delta=1e-5, seed=0)
    with pytest.warns(ConvergenceWarning, match="doubtful"):
        posterior = fit.posterior
    assert "act only together" in posterior.doubts[0]
    assert len(posterior.not_converged) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_steps": 500}, "need at least"),
        ({"num_epochs": 5000}, "epochs"),
    ],
)
def test_the_variant_by_name_says_why_it_cannot(changes, why):
    with pytest.raises(ValueError, match=why):
        dpvim.fit(units_model, X, Y, variant="whitened", **BUDGET, **changes)


def test_short_runs_and_several_modes_are_optimised(monkeypatch):
    fit = dpvim.fit(units_model, X, Y, **BUDGET, num_steps=100, seed=0)
    assert fit.family.name == "mean_field"
    monkeypatch.setattr(units_model, "several_modes", True, raising=False)
    fit = dpvim.fit(units_model, X, Y, **BUDGET, num_steps=1000, seed=0)
    assert fit.family.name == "mean_field"


@pytest.mark.long
def test_a_mixture_is_said_to_have_modes(tmp_path):
    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 3).expand([2]).to_event(1))
        parts = dist.Normal(mu, 1)
        with numpyro.plate("records", x.shape[0]):
            weights = dist.Categorical(probs=np.array([0.3, 0.7]))
            numpyro.sample("x", dist.MixtureSameFamily(weights, parts), obs=x)

    x = np.random.default_rng(0).normal(size=2000)
    fit = dpvim.fit(model, x, **BUDGET, seed=0)
    with pytest.warns(ConvergenceWarning, match="several modes"):
        _ = fit.posterior
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    with pytest.warns(ConvergenceWarning, match="several modes"):
        _ = dpvim.load(tmp_path / "fit.npz").posterior


@pytest.mark.parametrize("method", ["trace", "last"])
def test_iterates_of_a_steered_run_are_no_posterior(fit, method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = fit.posterior_from(method)
    assert len(found.not_converged) == 4
    assert "where it looked" in found.doubts[0]
    assert not found.summary().converged.any()
