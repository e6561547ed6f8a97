"""The experiments with the generative model: its optimum, its cells, and quick runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from dpvim.experiments import population, ukb, ukb_experiments
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, Scope
from dpvim.experiments.running import fits, quiet, reproduce, rows_of
from dpvim.experiments.ukb_downstream import poisson_regression, regression_cells

ALL = [
    ukb_experiments.UKB_INIT,
    ukb_experiments.UKB_EPOCHS,
    ukb_experiments.UKB_AVERAGE,
    ukb_experiments.UKB_NATURAL,
]


@pytest.fixture(scope="module")
def study():
    return ukb.study_of(population.simulate(20_000, seed=0), population.SCHEMA)


def test_the_model_is_the_papers(study):
    assert study.model.dim == 747
    assert study.model.num_components == 16
    assert study.model.response == ("infected", "poisson")
    assert (study.model.prior_scale, study.model.intercept_scale) == (1.0, 1.0)


def test_cells_have_the_likelihood_of_the_rows(study):
    cells = regression_cells(study.model, study.values, study.missing)
    X = np.asarray(study.model.features(study.model.batch_of(study.values, study.missing)), float)
    y = study.values["infected"]
    assert len(cells.X) < len(X)
    point = np.linspace(-0.5, 0.5, X.shape[1])
    rate = np.exp(X @ point + study.model.log_mean_offset)
    by_rows = X.T @ (y - rate)
    by_cells = cells.X.T @ (cells.totals - np.exp(cells.X @ point + cells.offset))
    np.testing.assert_allclose(by_cells, by_rows, rtol=1e-4, atol=1e-2)


def test_the_regression_is_the_one_of_scipy(study):
    cells = regression_cells(study.model, study.values, study.missing)

    def loss(point):
        mean = np.exp(cells.X @ point + cells.offset)
        value = mean.sum() - cells.totals @ (cells.X @ point)
        return value, cells.X.T @ (mean - cells.totals)

    found = optimize.minimize(loss, study.optimum.loc, jac=True, method="BFGS")
    np.testing.assert_allclose(study.original.coefficients, found.x, atol=2e-3)
    assert poisson_regression(cells._replace(has_empty_level=True), study.optimum.loc) is None


def test_the_optimum_has_no_gradient_in_the_models_own_elbo(study):
    """Order and names of the coefficients in the flat latent are those of the optimum."""
    import jax
    import jax.numpy as jnp

    options = {"epsilon": 1.0, "delta": 1e-5, "relation": "zero_out", "clip_norm": 2.0}
    with quiet():
        fit = fits(
            study.model,
            study.values,
            study.missing,
            each=[{"seed": 0}],
            num_steps=2,
            sampling_prob=0.01,
            variant="aligned",
            **options,
        )[0]
    part = ukb.coefficients_of(fit)
    assert (part.start, part.stop) == (703, 747)
    rows = study.model.batch_of(study.values, study.missing)
    eta = np.random.default_rng(0).normal(size=(4, 44))
    eta = np.concatenate([eta, -eta])  # their mean is exactly zero

    def elbo(loc):
        def at(each):
            latent = jnp.zeros(747).at[part].set(loc + study.optimum.scale * each)
            sites = fit.space.constrain(latent)
            prior = -jnp.sum((loc + study.optimum.scale * each) ** 2) / 2
            return study.model.log_prob(sites, rows).sum() + prior

        return jnp.mean(jax.lax.map(at, jnp.asarray(eta)))

    gradient = np.asarray(jax.grad(elbo)(jnp.asarray(study.optimum.loc)))
    # In standard deviations: by how much the optimum would have to move.
    assert np.abs(gradient * study.optimum.scale).max() < 0.5
    elsewhere = np.asarray(jax.grad(elbo)(jnp.asarray(study.optimum.loc[::-1].copy())))
    assert np.abs(elsewhere * study.optimum.scale).max() > 10


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
@pytest.mark.parametrize("quick", [True, False])
def test_cells_are_distinct_and_those_of_one_call_are_adjacent(experiment, quick):
    cells = experiment.cells(Scope(quick=quick))
    keys = [tuple(sorted(cell.items())) for cell in cells]
    assert len(set(keys)) == len(keys)
    assert {cell["way"] for cell in cells} == {AS_PUBLISHED, RECOMMENDED}
    for first, second in zip(cells[::2], cells[1::2], strict=True):
        assert experiment.together(first) == experiment.together(second)
    assert [cell["seed"] for cell in cells[:2]] == [0, 1]
    only = experiment.cells(Scope(quick=quick, ways=(RECOMMENDED,), repeats=1, epsilons=(2.0,)))
    assert {(cell["way"], cell["seed"], cell["epsilon"]) for cell in only} == {
        (RECOMMENDED, 0, 2.0)
    }


def test_experiments_share_cells():
    def keys(experiment):
        return {tuple(sorted(cell.items())) for cell in experiment.cells(Scope(quick=False))}

    init, epochs, _, natural = map(keys, ALL)
    assert len(init & epochs) == 40
    assert len(init & natural) == 40
    assert len({experiment.store_name for experiment in ALL}) == 1


def test_tables_of_ones_own_are_read(tmp_path, study):
    def first_cell(folder, frame):
        folder.mkdir()
        frame.to_csv(folder / "people.csv", index=False)
        population.SCHEMA.save(folder / "schema.toml")
        scope = Scope(table=folder / "people.csv", schema=folder / "schema.toml")
        return ukb_experiments.UKB_INIT.cells(scope)[0]

    frame = population.simulate(20_000, seed=0)
    cell = first_cell(tmp_path / "here", frame)
    assert cell["table"] == "people.csv"
    found = ukb.load(cell["content"])
    assert found.num_rows == 20_000
    np.testing.assert_allclose(found.optimum.loc, study.optimum.loc, atol=1e-5)
    # A cell is the content of the files, not the place where they are.
    assert first_cell(tmp_path / "there", frame) == cell
    assert first_cell(tmp_path / "shorter", frame[1:]) != cell


def test_a_level_without_outcomes_is_an_error():
    frame = population.simulate(4000, seed=1)
    name = next(n for n in frame if n != population.OUTCOME and frame[n].nunique() < 10)
    frame.loc[frame[name] == frame[name].iloc[0], population.OUTCOME] = 0
    with pytest.raises(ValueError, match="outcomes at every level"):
        ukb.study_of(frame, population.SCHEMA)


def test_pooled_errors_are_one_at_the_start_and_zero_at_the_optimum(study):
    start = study.optimum.loc + 1.0
    errors = ukb.Errors(study.optimum, start, np.ones(44))
    at_start = errors.of("last", start, np.ones(44))
    assert at_start["means"] == pytest.approx(1)
    assert at_start["stds_pooled"] == pytest.approx(1)
    at_optimum = errors.of("last", study.optimum.loc, study.optimum.scale)
    assert at_optimum["means_pooled"] == at_optimum["stds"] == at_optimum["stds_log"] == 0


# -- verdicts -------------------------------------------------------------------------------------

_LEVELS = {"vanilla": 0.9, "preconditioned": 0.7, "natural": 0.8, "aligned_natural": 0.6}


def made_up(experiment, scope, levels=_LEVELS, **numbers):
    """Rows as the experiment's cells would have, with errors by variant (default 0.3)."""
    entries = []
    for cell in experiment.cells(scope):
        rng = np.random.default_rng([cell["seed"], int(10 * cell["epsilon"])])
        error = levels.get(cell["variant"], 0.3) / cell["epsilon"]
        estimates = ["average", "noise-aware"]
        if cell["way"] == AS_PUBLISHED:
            estimates = ["last", *(ukb.WINDOWS if "datasets" in cell else [])]
        rows = []
        for estimate in estimates:
            row = {name: error + 0.01 * rng.random() for name in ukb_experiments._ERRORS}
            row |= {"estimate": estimate, "norm_start": 2.0, "norm_end": 0.5} | numbers
            if "datasets" in cell:
                names = ("rmse", "coverage", "failed", "window", "passed", "passed_drifting")
                row |= {name: error + 0.01 * rng.random() for name in names}
                row |= {"worse_than_last": 0.5}
            rows.append(row)
        arrays = {f"curve_{name}": np.full(3, error) for name in ukb_experiments._ERRORS[:4]}
        arrays |= {"curve_steps": np.arange(3)}
        arrays |= {f"error {estimate}": rng.normal(size=5) for estimate in estimates}
        entries.append({"cell": cell, "rows": rows, "arrays": arrays, "seconds": 1.0})
    return rows_of(entries)


def judgement(verdicts, begin):
    return next(v for v in verdicts if v.claim.startswith(begin)).judgement


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_nothing_holds_after_one_repeat(experiment):
    frame = made_up(experiment, Scope(quick=False, repeats=1))
    found = experiment.judge(frame)
    assert len(found) >= 4
    assert {verdict.judgement for verdict in found} == {"does not hold"}
    experiment.summarise(frame)
    experiment.draw(frame)


@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_verdicts_and_figures_are_of_the_smallest_epsilon(experiment):
    one = made_up(experiment, Scope(repeats=3))
    several = made_up(experiment, Scope(repeats=3, epsilons=(8.0, 1.0)))
    assert experiment.judge(several) == experiment.judge(one)
    lines = [
        [line.get_ydata() for ax in experiment.draw(frame).axes for line in ax.get_lines()]
        for frame in (one, several)
    ]
    for first, second in zip(*lines, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("way", [AS_PUBLISHED, RECOMMENDED])
@pytest.mark.parametrize("experiment", ALL, ids=lambda experiment: experiment.name)
def test_one_way_alone_has_no_verdicts_on_the_other(experiment, way):
    frame = made_up(experiment, Scope(repeats=2, ways=(way,)))
    ours = [verdict for verdict in experiment.judge(frame) if verdict.claim.startswith("(Ours)")]
    assert not ours
    experiment.draw(frame)


def test_defaults_are_compared_with_the_best_published_setting():
    init = ukb_experiments.UKB_INIT
    frame = made_up(init, Scope(repeats=3), {"default": 0.2})
    assert judgement(init.judge(frame), "(Ours)") == "holds"
    best = (frame["variant"] == "vanilla") & (frame["init_scale"] == 0.03)
    frame.loc[best, "means_rmse"] = 0.1
    ours = next(v for v in init.judge(frame) if v.claim.startswith("(Ours)"))
    assert ours.judgement == "holds in part"
    assert "vanilla, start 0.03" in ours.measured


def test_a_difference_vanishes_if_there_was_one():
    epochs, claim = ukb_experiments.UKB_EPOCHS, "The difference in means"
    scope = Scope(quick=False, repeats=4)
    frame = made_up(epochs, scope)
    assert judgement(epochs.judge(frame), claim) == "does not hold"  # it stays
    long = frame["num_steps"] == frame["num_steps"].max()
    frame.loc[long, "means_pooled"] = 0.3
    assert judgement(epochs.judge(frame), claim) == "holds"
    found = next(
        v for v in epochs.judge(frame.assign(means_pooled=0.3)) if v.claim.startswith(claim)
    )
    assert found.judgement == "does not hold"
    assert "not shown" in found.measured


@pytest.mark.parametrize(("error", "expected"), [(0.31, "holds"), (0.35, "does not hold")])
def test_as_good_is_within_a_margin(error, expected):
    natural = ukb_experiments.UKB_NATURAL
    frame = made_up(natural, Scope(repeats=4), {"aligned_natural": error})
    assert judgement(natural.judge(frame), "(Asked here) There are settings") == expected


def test_spreads_are_compared_by_more_than_chance():
    average, claim = ukb_experiments.UKB_AVERAGE, "From standard deviations of 0.1"
    frame = made_up(average, Scope(repeats=6))
    slope = frame["estimate"] == "slope"
    for factor, expected in {1.5: "does not hold", 10.0: "holds"}.items():
        other = frame["rmse"].where(~slope, 0.3 + 0.01 * factor * (-1.0) ** frame["seed"])
        other = other.where(slope, 0.3 + 0.01 * (-1.0) ** frame["seed"])
        assert judgement(average.judge(frame.assign(rmse=other)), claim) == expected


@pytest.mark.long
def test_quick_runs_show_the_directions(tmp_path):
    """What the paper says of stds, and that the second run of a cell is not run again."""
    found = reproduce(ukb_experiments.UKB_INIT, Scope(), tmp_path)
    assert found.done == found.wanted
    errors = found.summary.set_index(["variant", "init_scale"])["stds_pooled"]
    for start in ukb_experiments.QUICK_INIT_SCALES:
        assert errors["aligned", start] < errors["preconditioned", start]
        assert errors["preconditioned", start] < errors["vanilla", start]
    pooled = next(v for v in found.verdicts if "pooled" in v.claim)
    assert pooled.judgement != "does not hold"
    assert judgement(found.verdicts, "(Ours)") != "does not hold"
    again = reproduce(ukb_experiments.UKB_INIT, Scope(), tmp_path, run=False)
    assert again.verdicts == found.verdicts
    assert (found.folder / "figure.png").stat().st_size > 10_000
    natural = reproduce(ukb_experiments.UKB_NATURAL, Scope(), tmp_path)
    assert natural.done == natural.wanted


@pytest.mark.long
def test_quick_runs_of_lengths_and_averages(tmp_path):
    lengths = reproduce(ukb_experiments.UKB_EPOCHS, Scope(), tmp_path)
    table = lengths.summary[lengths.summary["clip_norm"] == 2.0]
    stds = table.set_index(["variant", "num_steps"])["stds_pooled"]
    assert (stds["aligned"] < stds["vanilla"]).all()
    averages = reproduce(ukb_experiments.UKB_AVERAGE, Scope(), tmp_path)
    assert averages.done == averages.wanted
    table = averages.summary.set_index(["way", "estimate"])
    zeros = np.sqrt(np.mean(ukb.load().original.coefficients ** 2))
    assert (table["rmse"] < 0.7 * zeros).all()
    assert (table["coverage"] > 0.8).all()
