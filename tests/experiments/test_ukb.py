"""The experiments with the generative model: its optimum, its cells, and quick runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from dpvim.experiments import population, ukb, ukb_experiments, ukb_verdicts
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, Scope
from dpvim.experiments.running import fits, quiet, reproduce
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


def test_tables_of_ones_own_are_read(tmp_path):
    frame = population.simulate(4000, seed=1)
    frame.to_csv(tmp_path / "table.csv", index=False)
    population.SCHEMA.save(tmp_path / "schema.toml")
    scope = Scope(table=tmp_path / "table.csv", schema=tmp_path / "schema.toml")
    cell = ukb_experiments.UKB_INIT.cells(scope)[0]
    try:
        found = ukb.load(cell["table"], cell["schema"])
    except ValueError as error:  # few rows may leave a level without an outcome
        assert "outcomes at every level" in str(error)  # noqa: PT017
    else:
        assert found.num_rows == 4000


def test_pooled_errors_are_one_at_the_start_and_zero_at_the_optimum(study):
    start = study.optimum.loc + 1.0
    errors = ukb.Errors(study.optimum, start, np.ones(44))
    at_start = errors.of("last", start, np.ones(44))
    assert at_start["means"] == pytest.approx(1)
    assert at_start["stds_pooled"] == pytest.approx(1)
    at_optimum = errors.of("last", study.optimum.loc, study.optimum.scale)
    assert at_optimum["means_pooled"] == at_optimum["stds"] == at_optimum["stds_log"] == 0


def test_verdicts_follow_the_numbers():
    import pandas as pd

    low = pd.DataFrame({"seed": [0, 1, 2], "error": [1.0, 1.1, 0.9]})
    high = pd.DataFrame({"seed": [2, 1, 0], "error": [1.9, 2.1, 2.0]})
    assert ukb_verdicts.Comparison.of(low, high, "error").is_clear
    assert not ukb_verdicts.Comparison.of(high, low, "error").is_clear
    assert not ukb_verdicts.Comparison.of(low, low, "error").is_clear
    assert ukb_verdicts.share_judged([True, True]) == "holds"
    assert ukb_verdicts.share_judged([True, False]) == "holds in part"
    assert ukb_verdicts.share_judged([False]) == "does not hold"


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
    ours = next(v for v in found.verdicts if v.claim.startswith("(Ours)"))
    assert ours.judgement == "holds"
    again = reproduce(ukb_experiments.UKB_INIT, Scope(), tmp_path, run=False)
    assert again.verdicts == found.verdicts
    assert (found.folder / "figure.png").stat().st_size > 10_000
    natural = reproduce(ukb_experiments.UKB_NATURAL, Scope(), tmp_path)
    assert natural.done == natural.wanted


@pytest.mark.long
def test_quick_runs_of_lengths_and_averages(tmp_path):
    lengths = reproduce(ukb_experiments.UKB_EPOCHS, Scope(), tmp_path)
    stds = next(v for v in lengths.verdicts if v.claim.startswith("However long"))
    assert stds.judgement == "holds"
    averages = reproduce(ukb_experiments.UKB_AVERAGE, Scope(), tmp_path)
    assert averages.done == averages.wanted
    table = averages.summary
    assert table["rmse"].between(0, 2).all()
    assert table["coverage"].between(0, 1).all()
