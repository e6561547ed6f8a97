"""The report on a twin from noisy counts."""

from __future__ import annotations

import dataclasses
import html
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from small_twin import EVIL_LEVEL, EVIL_NAME, SCHEMA, counted_twin

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.comparison import NoAnalysisError, default_formula, target_of
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.report import text as sentences
from dpvim.synthesis.report.model import model_content
from dpvim.synthesis.report.page import write_report
from dpvim.synthesis.schema import Binary, Schema
from dpvim.types import Relation


def words(page: str) -> str:
    """The text of a page, without tags and pictures."""
    text = re.sub(r"<style>.*?</style>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def changed(twin, **fields):
    """The twin with another fit."""
    return dataclasses.replace(twin, fit=dataclasses.replace(twin.fit, **fields))


def claimed(statement, **fields):
    """A statement as if the noise were nobody's, so that the guarantee is explained."""
    return dataclasses.replace(statement, for_testing=False, **fields)


@pytest.fixture(scope="module")
def made():
    return counted_twin()


@pytest.fixture(scope="module")
def page(made, tmp_path_factory) -> str:
    """With the original, so that all sections are in it; without pictures, which take the time."""
    target = tmp_path_factory.mktemp("report") / "r.html"

    def blank(figure):
        plt.close(figure)
        return "data:image/png;base64,"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpvim.synthesis.report.charts.as_data_uri", blank)
        write_report(made.twin, made.tables, target, compare=made.original)
    return target.read_text(encoding="utf-8")


def test_what_was_released_is_said(page, made):
    text = words(page)
    noisy = made.twin.fit.releases.noisy
    rows = re.findall(
        r"(Columns by themselves|Pairs with visits|Other pairs) (\d+) ([\d,]+) ([\d.]+) records",
        text,
    )
    assert [row[:2] for row in rows] == [
        ("Columns by themselves", "2"),
        ("Pairs with visits", "3"),
        ("Other pairs", "3"),
    ]
    cells = sum(int(row[2].replace(",", "")) for row in rows)
    assert cells == sum(each.counts.size for each in noisy)
    for shown, each in zip(rows, (noisy[0], noisy[2], noisy[-1]), strict=True):
        assert float(shown[3]) == pytest.approx(np.sqrt(each.variance), abs=0.06)
    assert "a latent trait model of 2 traits, fitted to noisy counts of pairs of columns" in text
    assert "of 300 rows. A cell of a pair holds" in text


def test_nothing_of_a_run_is_on_the_page(page):
    text = words(page)
    for part in ("Trace", "Convergence", "Has it settled?", "has settled"):
        assert part not in text
    assert "docs/synthesis.md" in text
    assert "fresh noise and fresh sampling errors" in text


def test_uses_and_limits(page):
    text = words(page)
    for part in (
        "Regressions of any column on others",
        "Above all what concerns 'visits'",
        "beyond what pairs of columns imply",
        "Sharp relations",
        "no more than about 7 records have",
        "closest.csv (in Python Twin.closest())",
        "Any interval or p-value from closest.csv",
    ):
        assert part in text


def test_names_are_escaped(page):
    assert "<img src=x" not in page
    assert "<script" not in page
    assert EVIL_NAME in words(page)
    assert EVIL_LEVEL in words(page)


def test_the_original_is_compared_by_a_regression_of_the_target(page, made):
    assert target_of(made.twin) == "visits"
    formula, family = default_formula(made.twin)
    assert formula == f"visits ~ group + np.log(Q({EVIL_NAME!r})) + age"
    assert family == "poisson"
    assert re.search(r"\d of 5 pooled intervals hold the original's estimate", words(page))


def test_targets_without_a_regression(made):
    with pytest.raises(NoAnalysisError, match="no target"):
        default_formula(changed(made.twin, target=None))
    with pytest.raises(NoAnalysisError, match="'group', has more than two levels"):
        default_formula(changed(made.twin, target="group"))
    assert default_formula(changed(made.twin, target="age"))[1] == "gaussian"


def test_the_guarantee_speaks_of_counts(made):
    seeded = sentences.describe_guarantee(made.twin.privacy)
    assert seeded.sentences[0].startswith("The noise came from a given seed")
    private = " ".join(sentences.describe_guarantee(claimed(made.twin.privacy)).sentences)
    assert "in the noisy counts that it was made from or in tables" in private
    assert f"are {made.twin.privacy.released}: Gaussian noise" in private
    assert "posterior" not in private


def test_the_number_of_rows_may_be_an_estimate(made):
    assert "estimated" not in sentences.describe_noise(made.twin.fit)
    statement = made.twin.privacy
    plan = dataclasses.replace(statement.plan, relation=Relation.ADD_OR_REMOVE)
    twin = changed(made.twin, privacy=claimed(statement, plan=plan))
    assert "estimated from the counts" in sentences.describe_noise(twin.fit)


# What the fit cannot explain


def test_all_within_the_noise(page, made):
    text = words(page)
    assert "All of it is within the noise" in text
    assert "The model does not explain" not in text
    worst = made.twin.fit.unexplained
    assert f"puts {100 * worst.mean():.2f} % of the records on average over 6 pairs" in text
    content = model_content(made.twin)
    assert content["unexplained"][0] == (*worst.index[0], worst.iloc[0])
    assert len(content["unexplained"]) == content["num_pairs"] == 6


def test_more_than_the_noise_is_a_warning(made):
    fit = made.twin.fit
    *others, last = fit.releases.noisy
    counts = last.counts.copy()
    counts[:2] += np.array([[40], [-40]])  # records moved from one group to the next
    releases = dataclasses.replace(fit.releases, noisy=(*others, last._replace(counts=counts)))
    content = model_content(changed(made.twin, releases=releases))
    assert content["caveat"]
    assert not content["fits"]
    assert "In 1 of the pairs this is more than the noise" in content["unexplained_message"]
    assert content["unexplained"][0][:2] == (EVIL_NAME, "age")


def test_the_threshold_is_that_of_chance(made):
    """Right models stay below it, and a standard deviation is what it says."""
    rng, size, rows, stddev = np.random.default_rng(0), 600, 500.0, 2.0
    expected = rows * rng.dirichlet(np.ones(size))
    variance = stddev**2 + expected
    errors = np.sqrt(variance) * rng.normal(size=(4000, size))
    shares = (np.abs(errors).sum(1) - np.sqrt(2 / np.pi * variance).sum()) / 2 / rows
    fit = made.twin.fit
    noisy = NoisyMarginal((0, 1), np.zeros((30, 20), int), stddev**2)
    releases = dataclasses.replace(fit.releases, noisy=(noisy,), num_rows=rows)
    limit = sentences._by_chance(dataclasses.replace(fit, releases=releases))[
        tuple(SCHEMA.names[:2])
    ]
    assert limit / 3 == pytest.approx(shares.std(), rel=0.05)
    assert np.mean(shares > limit) < 0.005


def test_one_column(tmp_path):
    schema = Schema((Binary(name="b", levels=(0, 1), reviewed=True),))
    frame = pd.DataFrame({"b": [0, 1, 1] * 20})
    twin = synthesize(frame, schema, epsilon=2.0, components=1, seed=0)
    twin.report(tmp_path / "r.html", list(twin.datasets(2, seed=0)))
    text = words((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "there is no pair to explain" in text
    assert "Columns by themselves 1 2 " in text
    assert "fitted to noisy counts of its column" in text
    assert "In the wrong cells" not in text
