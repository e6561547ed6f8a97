from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

from dpvim.synthesis.analysis import glm_workers
from dpvim.synthesis.analysis import pooling as analysis
from dpvim.synthesis.analysis.pooling import FailedFitsError, FailedFitsWarning, analyze
from dpvim.synthesis.analysis.rubin import NegativeVarianceWarning, combine

FAMILIES = {
    "gaussian": sm.families.Gaussian(),
    "binomial": sm.families.Binomial(),
    "poisson": sm.families.Poisson(),
}
FORMULAS = {
    "gaussian": "height ~ age + region",
    "binomial": "sick ~ age + region + np.log1p(visits)",
    "poisson": "visits ~ age * region",
}


def table(seed: int, num_rows: int = 400) -> pd.DataFrame:
    """A data set from a draw of the parameters, as a synthesiser makes them."""
    rng = np.random.default_rng(seed)
    age = rng.normal(size=num_rows)
    region = rng.choice(["east", "north", "west"], size=num_rows)
    weights = rng.normal([0.3, 0.5, -0.4], 0.3)
    signal = weights @ [np.ones(num_rows), age, region == "west"]
    return pd.DataFrame(
        {
            "age": age,
            "region": region,
            "height": signal + rng.normal(size=num_rows),
            "sick": (rng.random(num_rows) < 1 / (1 + np.exp(-signal))).astype(int),
            "visits": rng.poisson(np.exp(signal)),
        }
    )


@pytest.fixture(scope="module")
def tables() -> list[pd.DataFrame]:
    return [table(seed) for seed in range(8)]


def run(tables, formula="sick ~ age + region", **options):
    """In this process, and without the warning that rests on chance."""
    options = {"family": "binomial", "workers": 1} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NegativeVarianceWarning)
        return analyze(tables, formula, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_statsmodels_on_every_table_and_then_combine(tables, family):
    found = run(tables, FORMULAS[family], family=family, num_rows=300)
    models = [smf.glm(FORMULAS[family], data, family=FAMILIES[family]) for data in tables]
    # With its own tolerance statsmodels stops earlier, and a difference of variances shows that.
    fits = [model.fit(tol=1e-13) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NegativeVarianceWarning)
        expected = combine(
            [fit.params for fit in fits],
            [fit.cov_params() for fit in fits],
            num_rows=300,
            num_synthetic_rows=400,
        )
    pd.testing.assert_frame_equal(
        found.combined.to_frame(), expected.to_frame(), rtol=1e-6, atol=1e-9
    )
    assert found.num_failed == 0
    assert found.failures == ()
    assert found.combined.test(["age"]).p_value == pytest.approx(expected.test(["age"]).p_value)


@pytest.mark.parametrize(("alias", "family"), [("logistic", "binomial"), ("linear", "gaussian")])
def test_families_have_everyday_names(tables, alias, family):
    found = run(tables, family=alias)
    assert found.family == family
    assert (found.combined.estimate == run(tables, family=family).combined.estimate).all()


def test_files_are_read_and_processes_agree(tables, tmp_path):
    paths = []
    for i, data in enumerate(tables[:4]):
        paths.append(tmp_path / f"{i}.csv")
        data.to_csv(paths[-1], index=False)
    data = tables[4].copy()
    data.loc[data["region"] == "west", "sick"] = 0
    mixed = [*paths, data, *tables[5:]]
    levels = {"region": ["west", "east", "north"]}
    with pytest.warns(FailedFitsWarning, match="1 of 8"):
        alone = run(mixed, levels=levels)
    with pytest.warns(FailedFitsWarning, match="1 of 8"):
        together = run(mixed, levels=levels, workers=2)
    pd.testing.assert_frame_equal(
        together.combined.to_frame(), alone.combined.to_frame(), rtol=1e-9, atol=1e-12
    )
    assert together.failures == alone.failures
    assert alone.combined.names == ("Intercept", "region[T.east]", "region[T.north]", "age")


def test_a_process_that_dies_is_a_failure_and_the_next_table_gets_another(tables, monkeypatch):
    stand_in = """
import pickle, sys
requests, answers = sys.stdin.buffer, sys.stdout.buffer
pickle.load(requests)
while True:
    table = pickle.load(requests)
    if table == "deadly":
        sys.exit(1)
    pickle.dump({"failure": "", "names": [table]}, answers)
    answers.flush()
"""
    started = []
    real = subprocess.Popen

    def start_stand_in(command, **options):
        started.append(command)
        return real([sys.executable, "-c", stand_in], **options)

    monkeypatch.setattr(glm_workers.subprocess, "Popen", start_stand_in)
    names = ["a", "deadly", "b", "deadly", "c"]
    ticks = []
    outcomes = glm_workers.fit_tables(
        names, "y ~ x", "gaussian", {}, workers=2, done=lambda: ticks.append(1)
    )
    assert [outcome["names"] for outcome in outcomes] == [["a"], [], ["b"], [], ["c"]]
    assert "died" in outcomes[1]["failure"]
    assert len(ticks) == 5
    assert 3 <= len(started) <= 4


# Failures


def spoil(tables, index, **columns):
    """The tables, one of them with other columns."""
    spoilt = list(tables)
    spoilt[index] = spoilt[index].assign(**columns)
    return spoilt


def separated(data):
    return data["sick"].where(data["region"] != "west", 0)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"sick": separated}, r"separation: the estimate of region\[T.west\] is infinite"),
        ({"sick": lambda d: (d["age"] > 0) * 1}, "separation: the estimate of .*age is infinite"),
        ({"age": 0.0}, "not estimable: no row has age"),
        ({"age": 2.0}, "singular design: 4 columns have rank 3"),
        ({"age": lambda d: d["age"].replace(d["age"].max(), np.inf)}, "infinite values"),
        ({"age": np.nan}, "no row is without missing values"),
        ({"sick": 2}, "values above 1"),
        ({"sick": -1}, "negative values"),
        ({"region": "east"}, r"columns missing in its design: region\[T.north\], region\[T.west\]"),
    ],
)
def test_a_table_without_a_fit_is_counted_and_the_others_are_pooled(tables, columns, reason):
    with pytest.warns(FailedFitsWarning, match=f"1 of 8 data sets.*\n.*1 x .*{reason}"):
        found = run(spoil(tables, 3, **columns))
    assert found.num_failed == 1
    assert [index for index, _ in found.failures] == [3]
    assert found.combined.num_datasets == 7
    others = run(tables[:3] + tables[4:])
    pd.testing.assert_frame_equal(found.combined.to_frame(), others.combined.to_frame())
    assert "1 of 8 data sets could not be fitted" in str(found)
    assert repr(found) == "<Analysis 'sick ~ age + region': 7 of 8 data sets fitted>"


def test_counts_that_are_all_zero_in_a_level_have_no_estimate(tables):
    visits = tables[0]["visits"].where(tables[0]["region"] != "west", 0)
    with pytest.warns(FailedFitsWarning, match="separation"):
        found = run(spoil(tables, 0, visits=visits), "visits ~ age + region", family="poisson")
    assert found.failures[0][0] == 0


def test_a_level_that_a_table_lacks_keeps_its_column_if_levels_are_given(tables):
    lacking = spoil(tables, 2, region=lambda d: d["region"].replace("west", "east"))
    levels = {"region": ["east", "north", "west"]}
    with pytest.warns(FailedFitsWarning, match=r"not estimable: no row has region\[T.west\]"):
        found = run(lacking, levels=levels)
    assert found.failures == ((2, "not estimable: no row has region[T.west]"),)


def test_levels_that_a_table_should_not_have(tables):
    levels = {"region": ["east", "north"]}
    with pytest.raises(FailedFitsError, match="8 x the column 'region' holds 'west', not among"):
        run(tables, levels=levels)
    with pytest.raises(FailedFitsError, match="8 x the column 'town', for which levels"):
        run(tables, levels={"town": ["a"]})


def test_numbers_with_levels_are_categories(tables):
    found = run(
        [data.assign(group=np.arange(400) % 3) for data in tables],
        "height ~ group",
        family="linear",
        levels={"group": [2, 0, 1]},
    )
    assert found.combined.names == ("Intercept", "group[T.0]", "group[T.1]")


def test_reasons_are_counted(tables):
    spoilt = spoil(spoil(spoil(tables, 1, age=0.0), 5, age=0.0), 6, sick=separated)
    with pytest.warns(FailedFitsWarning):
        found = run(spoilt)
    assert "3 of 8" in str(found)
    assert "2 x not estimable" in str(found)
    assert "1 x separation" in str(found)


def test_a_formula_that_fits_no_table_is_an_error_that_says_why(tables):
    with pytest.raises(FailedFitsError, match=r"got 0 of 8.*\n  8 x .*'wage' is not defined"):
        run(tables, "sick ~ wage")


def test_one_fit_is_not_enough(tables):
    with pytest.raises(FailedFitsError, match="got 1 of 2"):
        run([tables[0], tables[1].assign(age=0.0)])


# Outcomes


@pytest.mark.parametrize("term", ['Q("is sick?")', " Q( 'is sick?' ) "])
def test_an_outcome_with_two_levels_may_be_quoted(tables, term):
    plain = run(tables).combined
    named = [data.assign(**{"is sick?": data["sick"].map({0: "no", 1: "yes"})}) for data in tables]
    found = run(named, f"{term}~ age + region", levels={"is sick?": ["no", "yes"]}).combined
    np.testing.assert_allclose(found.estimate, plain.estimate, rtol=1e-9)


def test_a_condition_is_modelled_as_true(tables):
    plain = run(tables).combined
    conditions = [data.assign(sick=data["sick"].map({0: "no", 1: "yes"})) for data in tables]
    found = run(conditions, "I(sick == 'yes') ~ age + region").combined
    np.testing.assert_allclose(found.estimate, plain.estimate, rtol=1e-9)
    booleans = run([data.assign(sick=data["sick"] == 1) for data in tables]).combined
    np.testing.assert_allclose(booleans.estimate, plain.estimate, rtol=1e-9)
    with pytest.raises(FailedFitsError, match="the outcome is categorical"):
        run(conditions)


def test_successes_and_failures_are_a_binomial_outcome(tables):
    counts = [data.assign(well=2 - data["sick"]) for data in tables]
    found = run(counts, "sick + well ~ age").combined
    fits = [smf.glm("sick + well ~ age", data, family=sm.families.Binomial()) for data in counts]
    expected = np.mean([fit.fit().params for fit in fits], axis=0)
    np.testing.assert_allclose(found.estimate, expected, rtol=1e-6)
    with pytest.raises(FailedFitsError, match="2 columns instead of one"):
        run(counts, "sick + well ~ age", family="linear")


# Rows


def test_rows_with_missing_values_are_left_out(tables):
    gaps = [data.assign(age=data["age"].mask(data.index % 10 == 0)) for data in tables]
    whole = [data[data.index % 10 != 0] for data in tables]
    np.testing.assert_allclose(run(gaps).combined.estimate, run(whole).combined.estimate)


def test_a_negative_variance_uses_the_rows_of_both(tables):
    same = [tables[0], tables[0].copy(), tables[0].copy()]
    with pytest.warns(NegativeVarianceWarning, match="n_syn / n = 4 times"):
        found = analyze(same, "height ~ age", num_rows=100, workers=1)
    assert found.combined.negative.all()
    within = np.diag(found.combined.within)
    np.testing.assert_allclose(found.combined.standard_error, np.sqrt(4 * within))


# Input


def test_large_tables_get_processes(tables, monkeypatch, tmp_path):
    monkeypatch.setattr(analysis.os, "cpu_count", lambda: 4)
    assert analysis._default_workers(tables) == 1
    monkeypatch.setattr(analysis, "_WORTH_A_PROCESS", 1000)
    assert analysis._default_workers(tables) == 4
    assert analysis._default_workers(tables[:3]) == 3
    path = tmp_path / "a.csv"
    tables[0].to_csv(path)
    assert analysis._default_workers([str(path)] * 2) == 2


def test_a_bar_is_shown_on_request(tables, capsys):
    run(tables, progress=True)
    assert "8/8" in capsys.readouterr().err
    run(tables, progress=False)
    assert capsys.readouterr().err == ""


def test_the_printed_result(tables):
    lines = str(run(tables, level=0.8)).splitlines()
    assert lines[0] == "sick ~ age + region  (binomial)"
    assert lines[1] == "8 synthetic data sets, 80 % intervals"
    assert "10 %" in lines[2]
    assert lines[3].startswith("Intercept")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"family": "binomail"}, ValueError, "Did you mean 'binomial'"),
        ({"formula": "sick"}, ValueError, "formula: expected an outcome and covariates"),
        ({"level": 95}, ValueError, "level"),
        ({"num_rows": 0}, ValueError, "num_rows"),
        ({"workers": 0}, ValueError, "workers"),
        ({"levels": {"region": "east"}}, ValueError, "levels: expected a list"),
        ({"levels": {"region": ["east", "east"]}}, ValueError, "levels: expected a list"),
        ({"tables": pd.DataFrame()}, TypeError, "a single DataFrame"),
        ({"tables": "a.csv"}, TypeError, "a single str"),
        ({"tables": [3, 4]}, TypeError, "got int at 0"),
        ({"tables": ["a.xlsx"]}, ValueError, "end in .csv"),
        ({"tables": ["missing.csv"]}, FileNotFoundError, "no file 'missing.csv'"),
        ({"tables": []}, ValueError, "at least 2, got 0"),
        ({"tables": [pd.DataFrame()]}, ValueError, "at least 2, got 1"),
    ],
)
def test_input_that_cannot_be_meant(tables, options, error, message):
    with pytest.raises(error, match=message):
        run(**({"tables": tables} | options))
