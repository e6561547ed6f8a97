from __future__ import annotations

import dataclasses
import html
import math
import re
import shutil

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from small_twin import EVIL_LEVEL, EVIL_NAME, SCHEMA, small_twin
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.synthesis.comparison import NoAnalysisError, default_formula
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.report import page as report
from dpvim.synthesis.report import text as sentences
from dpvim.synthesis.report.page import write_report
from dpvim.synthesis.schema import Binary, Categorical, Count, Real, Schema
from dpvim.synthesis.tables import write_table
from dpvim.types import Relation


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def text_of_page(page: str) -> str:
    """The text of a page, without tags and pictures."""
    text = re.sub(r"<style>.*?</style>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def alts(page: str) -> list[str]:
    return [html.unescape(alt) for alt in re.findall(r'<img src="data:[^"]*" alt="([^"]*)"', page)]


def write_tables(tables, folder, suffix):
    folder.mkdir()
    for number, each in enumerate(tables, start=1):
        write_table(each, folder / f"synthetic-{number:03}.{suffix}")


@pytest.fixture(scope="module")
def made():
    return small_twin()


@pytest.fixture(scope="module")
def twin_folder(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "twin"
    made.twin.save(folder, not_for_release=True)
    write_tables(made.tables, folder / "data", "csv")
    (folder / "command.txt").write_text("dpvim synth original.csv --epsilon 5 -o twin\n")
    return folder


@pytest.fixture(scope="module")
def plain(twin_folder) -> str:
    target = twin_folder.parent / "plain.html"
    result = run(twin_folder, "-o", target)
    assert result.exit_code == 0, result.output
    return target.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared(twin_folder, made) -> str:
    made.original.to_csv(twin_folder.parent / "original.csv", index=False)
    result = run(twin_folder, "--compare", twin_folder.parent / "original.csv")
    assert result.exit_code == 0, result.output
    assert "NOT FOR RELEASE" in result.output
    # Not in the folder that is made to be published.
    assert not list(twin_folder.rglob("*.html"))
    target = twin_folder.parent / "report-NOT-FOR-RELEASE.html"
    return target.read_text(encoding="utf-8")


@pytest.fixture
def without_pictures(monkeypatch):
    """For tests of everything else: pictures take most of the time."""

    def blank(figure):
        plt.close(figure)
        return "data:image/png;base64,"

    monkeypatch.setattr("dpvim.synthesis.report.charts.as_data_uri", blank)


def private_statement(relation=Relation.ZERO_OUT, epsilon=1.0) -> PrivacyStatement:
    plan = PrivacyPlan(
        num_examples=400, sampling_prob=1.0, num_steps=10, clip_norm=1.0, relation=relation
    ).calibrate(epsilon=epsilon, delta=1e-5)
    return PrivacyStatement.of(
        plan, delta=1e-5, steps_done=10, released="all iterates", for_testing=False
    )


def with_statement(twin, statement):
    return dataclasses.replace(twin, fit=dataclasses.replace(twin.fit, privacy=statement))


# The page


def test_every_part_is_there(plain):
    text = text_of_page(plain)
    for part in (
        "Privacy statement",
        "What it can be used for",
        "Not good for",
        "Columns",
        "One column at a time",
        "Two columns at a time",
        "Has it settled?",
        "How to analyse it",
        "dpvim analyze twin",
        "dpvim sample twin",
        "dpvim synth original.csv --epsilon 5 -o twin",
        "Poisson regression of 'visits'",
        "Each person contributes one record.",
        "400 (public)",
    ):
        assert part in text
    assert "Original against synthetic" not in text
    assert 'href="#comparison"' not in plain
    # Four columns, a heat map, six pairs, four pictures of the fit.
    assert len(alts(plain)) == plain.count("<img") == 15
    assert all(len(alt) > 20 for alt in alts(plain))
    assert all(name in text for name in SCHEMA.names)


def test_the_page_needs_nothing_else(plain, compared):
    for page in (plain, compared):
        assert "<script" not in page
        assert "http://" not in page
        assert "https://" not in page
        assert not re.search(r'src="(?!data:)', page)
        assert not re.search(r'href="(?!#)', page)
        assert len(page) < 3_000_000


def test_names_and_levels_are_escaped(plain, compared):
    for page in (plain, compared):
        assert "<img src=x" not in page
        assert html.escape(EVIL_LEVEL, quote=False).replace("'", "&#39;") in page
        assert EVIL_NAME in text_of_page(page)


def test_a_seeded_twin_is_stamped_not_private(plain):
    assert "<title>NOT PRIVATE" in plain
    assert plain.count('class="stamp') == 2
    assert "NOT PRIVATE: for tests only" in text_of_page(plain)


def test_what_has_not_settled_is_said(plain, made):
    left = made.twin.fit.posterior.not_converged
    text = text_of_page(plain)
    assert f"{len(left)} of {made.twin.fit.family.dim} parameters have not settled" in text
    assert "may be too narrow" in text


def test_a_comparison_is_stamped_all_over(compared, plain):
    assert "<title>NOT FOR RELEASE - NOT PRIVATE" in compared
    body = compared.split("<body>")[1].strip()
    assert body.startswith('<p class="stamp stays" role="alert"><strong>NOT FOR RELEASE')
    stamped = [alt for alt in alts(compared) if alt.startswith("NOT FOR RELEASE. ")]
    # Columns, pairs and coefficients show the original; heat map and fit do not.
    assert len(stamped) == 4 + 6 + 1
    assert "NOT FOR RELEASE" not in plain


def test_what_a_comparison_says(compared):
    text = text_of_page(compared)
    assert "Original against synthetic" in text
    assert "The 6 worst of 6 pairs" in text
    assert len(re.findall(r"distance 0\.\d{3}", text)) == 4
    assert re.search(r"\d of 5 pooled intervals hold the original's estimate", text)
    # The target on all others, as the model has them.
    assert "visits ~ group + np.log(Q(" in text
    assert f"log({EVIL_NAME})" in text
    assert "(poisson)" in text


# Words


@pytest.mark.parametrize("relation", Relation)
def test_the_guarantee_in_words(relation):
    statement = private_statement(relation)
    guarantee = sentences.describe_guarantee(statement)
    text = " ".join(guarantee.sentences)
    factor, chance = (float(x) for x in re.findall(r"at most ([\d.]+) ", text))
    # Never better than what holds.
    assert math.exp(statement.epsilon) <= factor <= 2.73
    assert 100 * math.e / (1 + math.e) <= chance <= 73.3
    assert guarantee.short == "(1, 1e-05)-differential privacy for one record"
    assert guarantee.assumptions == statement.assumptions
    assert ("replaced by nothing" in text) == (relation is Relation.ZERO_OUT)
    assert ("only a bound" in text) == (relation is Relation.ADD_OR_REMOVE)
    assert "weak" not in text


def test_a_weak_guarantee_is_called_weak():
    assert "weak" in sentences.describe_guarantee(private_statement(epsilon=8.0)).sentences[-1]


def test_no_guarantee_is_no_guarantee():
    guarantee = sentences.describe_guarantee(NoPrivacy())
    assert guarantee.short.startswith("NOT PRIVATE")
    assert "do not publish" in guarantee.full


@pytest.mark.usefixtures("without_pictures")
def test_a_private_twin_has_no_stamp(made, tmp_path):
    twin = with_statement(made.twin, private_statement(Relation.ADD_OR_REMOVE))
    twin.report(tmp_path / "r.html", made.tables[:2])
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'class="stamp' not in page
    assert "<title>A synthetic twin" in page
    text = text_of_page(page)
    assert "NOT PRIVATE" not in text
    assert "at most 400 (public)" in text
    assert "The command that made it was not kept." in text


# Other twins


@pytest.mark.usefixtures("without_pictures")
def test_without_a_target(made, tmp_path):
    twin = dataclasses.replace(made.twin, model=build_mixture(SCHEMA, components=2))
    write_report(twin, made.tables[:2], tmp_path / "r.html", compare=made.original)
    text = text_of_page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "None: the twin has no target, and no formula was given." in text
    assert "regression of" not in text


@pytest.mark.usefixtures("without_pictures")
def test_a_build_mixture_ones_own(made, tmp_path):
    twin = dataclasses.replace(made.twin, model=lambda *a, **k: None)
    twin.report(tmp_path / "r.html", made.tables[:2])
    assert "the maker's own" in text_of_page((tmp_path / "r.html").read_text(encoding="utf-8"))


def test_one_table_and_one_column(made, tmp_path):
    schema = Schema((Binary(name="b", levels=(0, 1), reviewed=True),))
    twin = dataclasses.replace(made.twin, schema=schema, model=build_mixture(schema, components=2))
    frame = pd.DataFrame({"b": [0, 1, 1]})
    write_report(twin, [frame], tmp_path / "r.html", compare=frame)
    text = text_of_page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "The table has one column." in text
    assert "None: one synthetic table cannot be pooled." in text


@pytest.mark.long
def test_a_hundred_columns(made, tmp_path):
    rng = np.random.default_rng(0)
    common = rng.random((300, 1)) < 0.5
    values = np.where(rng.random((300, 100)) < 0.3, common, rng.random((300, 100)) < 0.5)
    frame = pd.DataFrame(values.astype(int), columns=[f"column {i}" for i in range(100)])
    schema = Schema(tuple(Binary(name=n, levels=(0, 1), reviewed=True) for n in frame.columns))
    twin = dataclasses.replace(made.twin, schema=schema, model=build_mixture(schema, components=2))
    write_report(twin, [frame, frame], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert len(page) < 3_000_000
    assert "The 12 most dependent of 4950 pairs" in text_of_page(page)
    assert "30 of 100 columns" in text_of_page(page)


def test_many_levels_are_cut_and_it_is_said(made, tmp_path):
    schema = Schema((Categorical(name="c", levels=tuple(range(500)), reviewed=True),))
    twin = dataclasses.replace(made.twin, schema=schema, model=build_mixture(schema, components=2))
    frame = pd.DataFrame({"c": np.arange(100)})
    write_report(twin, [frame, frame], tmp_path / "r.html")
    text = text_of_page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "c the most frequent of 500 levels" in text
    assert "10, 11 and 488 more" in text


# The command


@pytest.mark.usefixtures("without_pictures")
def test_the_report_lies_in_the_folder_and_is_not_overwritten(twin_folder, tmp_path):
    folder = tmp_path / "twin"
    shutil.copytree(twin_folder, folder)
    for old in sorted((folder / "data").iterdir())[2:]:
        old.unlink()
    assert run(folder).exit_code == 0
    first = (folder / "report.html").read_bytes()
    (folder / "report.html").write_text("mine")
    refused = run(folder)
    assert refused.exit_code == 2
    assert "exists already" in refused.output
    assert (folder / "report.html").read_text() == "mine"
    assert run(folder, "--force").exit_code == 0
    assert (folder / "report.html").read_bytes()[:200] == first[:200]
    assert not list(folder.glob("*.partial"))


def test_a_comparison_is_not_written_into_the_folder(twin_folder, made, tmp_path):
    made.original.to_csv(tmp_path / "o.csv", index=False)
    target = twin_folder / "data" / "report.html"
    result = run(twin_folder, "--compare", tmp_path / "o.csv", "-o", target)
    assert result.exit_code == 2
    assert "made to be published" in result.output
    assert not target.exists()


def test_a_twin_without_tables(twin_folder, tmp_path):
    shutil.copytree(twin_folder, tmp_path / "twin", ignore=shutil.ignore_patterns("data"))
    result = run(tmp_path / "twin")
    assert result.exit_code == 2
    assert "Draw some: dpvim sample" in " ".join(result.output.split())


@pytest.mark.usefixtures("without_pictures")
def test_parquet_and_a_formula(made, tmp_path):
    folder = tmp_path / "twin"
    made.twin.save(folder, not_for_release=True)
    write_tables(made.tables, folder / "data", "parquet")
    made.original.to_parquet(tmp_path / "o.parquet")
    options = ["--compare", tmp_path / "o.parquet", "--family", "poisson"]
    result = run(folder, *options, "--formula", "visits ~ age")
    assert result.exit_code == 0, result.output
    text = text_of_page((tmp_path / "report-NOT-FOR-RELEASE.html").read_text(encoding="utf-8"))
    assert "visits ~ age (poisson)" in text
    assert re.search(r"\d of 2 pooled intervals", text)
    # One that cannot be fitted was asked for, so it is an error.
    result = run(folder, *options, "--formula", "visits ~ nothing", "--force")
    assert result.exit_code == 2
    assert "nothing" in result.output


@pytest.mark.usefixtures("without_pictures")
def test_other_delimiters(twin_folder, made, tmp_path):
    made.original.to_csv(tmp_path / "o.csv", index=False, sep=";", encoding="utf-16")
    result = run(twin_folder, "--compare", tmp_path / "o.csv", "-o", tmp_path / "r.html")
    assert result.exit_code == 2
    options = ["--delimiter", ";", "--encoding", "utf-16"]
    result = run(twin_folder, "--compare", tmp_path / "o.csv", "-o", tmp_path / "r.html", *options)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--formula", "visits ~ age"], "only together with compare"),
        (["--output", "nowhere/r.html"], "no such folder"),
        (["--compare", "nothing.csv"], "no such file"),
    ],
    ids=str,
)
def test_misuse_is_said(twin_folder, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    result = run(twin_folder, *(["-o", "r.html"] if "--output" not in options else []), *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_formulas_for_targets_with_any_name(made):
    def formula(target):
        other = Real(name="a b", lower=1, upper=9, scale="log")
        schema = Schema((target, other, Count(name="np", upper=3)))
        model = build_mixture(schema, components=2, target=target.name)
        return default_formula(dataclasses.replace(made.twin, schema=schema, model=model))

    binary = Binary(name="y", levels=("no", "yes"))
    right = "np.log(Q('a b')) + np.log1p(Q('np'))"
    assert formula(binary) == (f"y ~ {right}", "binomial")
    positive = Real(name="y", lower=1, upper=9, scale="log")
    assert formula(positive) == (f"np.log(y) ~ {right}", "gaussian")
    with pytest.raises(NoAnalysisError, match="cannot stand in a formula"):
        formula(dataclasses.replace(binary, name="y?"))


def test_a_report_leaves_files_of_others_alone(made, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_render", lambda *arguments: "page")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "report.html.partial").symlink_to(tmp_path / "precious")
    write_report(made.twin, made.tables, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "page"
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "report.html.partial").is_symlink()


def test_a_comparison_is_not_written_into_the_folder_that_is_published(twin_folder):
    made = small_twin()
    for path in (twin_folder / "report.html", twin_folder / "data" / "report.html"):
        with pytest.raises(ValueError, match="outside of the twin's folder"):
            made.twin.report(path, made.tables, compare=made.original, force=True)
