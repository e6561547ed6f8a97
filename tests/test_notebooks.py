"""Objects in notebooks, pictures of plans, norms and coverage: right numbers, escaped names."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
import pytest

import dpvim
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.inference.clip_relief import count_error
from dpvim.inference.families import FAMILIES
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.trace import Trace
from dpvim.inference.windows import windows_of
from dpvim.plots import plot_coverage, plot_norms, plot_plan, plot_posterior
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.posterior.posterior import Posterior
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.result import Fit
from dpvim.strategy import FitPlan
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import Twin

mpl.use("Agg")
HOSTILE = "<img src=x onerror=alert(1)>\"'&$x^2$"
# The only tags, and attributes, that are ever used.
TAGS = {"div", "strong", "p", "details", "summary", "ul", "li"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}
ATTRIBUTES = {"style", "role", "aria-label", "title"}

PLAN = PrivacyPlan(num_examples=5000, sampling_prob=1.0, num_steps=4096, clip_norm=0.12)
PLAN = PLAN.calibrate(epsilon=1.0, delta=1e-5)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def text_of(thing) -> str:
    """The words of an object's HTML, which has only tags that it may have, all closed."""
    words: list[str] = []
    open_tags: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert tag in TAGS, tag
            assert {name for name, _ in attributes} <= ATTRIBUTES
            for name, value in attributes:
                if name == "style":
                    # Colours of the reader's, or that can be read on white and on black.
                    colours = re.findall(r"#\w+", value)
                    assert set(colours) <= {"#0072B2", "#D55E00"}, value
                    assert "url(" not in value
            open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

        def handle_data(self, data):
            words.append(data)

    reader = Reader()
    reader.feed(thing._repr_html_())
    reader.close()
    assert open_tags == []
    return " ".join(words)


def statement(**changes) -> PrivacyStatement:
    options = {"delta": 1e-5, "steps_done": 4096, "released": HOSTILE, "for_testing": False}
    return PrivacyStatement.of(PLAN, **(options | changes))


def posterior(loc=(1.5, -0.25), *, name="w", **changes) -> Posterior:
    size = len(loc)
    space = LatentSpace([Site(name, (size,), (size,), dist.constraints.real_vector)])
    windows = Windows(np.full(size, 10), np.arange(size) != 1)
    scale = np.full(size, 0.5)
    found = GaussianPosterior(np.array(loc), scale, 0.6 * scale, windows)
    return Posterior(found, space, 1, {"private": True}, **changes)


def fitted(**changes) -> Fit:
    family = FAMILIES["mean_field"](2)
    start = family.init(jnp.zeros(2), 1.0)
    params = type(start)(*(np.stack([leaf, leaf]) for leaf in start))
    trace = Trace(np.array([0, 4096]), params)
    options = {"plan": PLAN, "privacy": statement(), "trace": trace, "family": family}
    return Fit(space=posterior(name=HOSTILE).space, **(options | changes))


def test_statements():
    text = text_of(statement())
    assert re.search(r"\((1|0\.99\d+), 1e-05\)-differential privacy", text)
    assert HOSTILE in text
    assert "4,096 of 4,096" in text
    assert "Each person contributes one record." in text
    seeded = text_of(statement(for_testing=True))
    assert "NOT PRIVATE" in seeded
    assert "-differential privacy" not in seeded.replace("privacy guarantee", "")
    assert "do not publish" in text_of(NoPrivacy())


def test_posteriors():
    text = text_of(posterior(name=HOSTILE, remarks=(HOSTILE,), reason=HOSTILE))
    for shown in ("1.5", "-0.25", "0.5", "36%", "not converged", HOSTILE):
        assert shown in text
    assert "and 5 more" in text_of(posterior(np.zeros(25)))
    nonprivate = dataclasses.replace(posterior(), privacy={"private": False})
    assert "NOT PRIVATE" in text_of(nonprivate)


def test_fits():
    text = text_of(fitted())
    assert HOSTILE in text
    assert "4,096" in text
    assert "-differential privacy" in text
    assert "NOT PRIVATE Fit" in text_of(fitted(privacy=NoPrivacy()))


def test_schemas_and_twins():
    columns = [
        {"name": HOSTILE, "kind": "categorical", "levels": [HOSTILE, *map(str, range(20))]},
        {"name": "age", "kind": "integer", "lower": 0, "upper": 120, "reviewed": True},
        {"name": "visits", "kind": "count", "upper": 9, "reviewed": True, "nullable": True},
    ]
    schema = Schema.from_dict({"dpvim_schema": 1, "columns": columns})
    text = text_of(schema)
    for shown in (HOSTILE, "and 13 more", "0 to 120", "0 to 9", "may be missing"):
        assert shown in text
    assert "1 not reviewed: a draft is as private as the data" in text
    twin = Twin(schema, SimpleNamespace(privacy=statement()), None, 1234)  # type: ignore[arg-type]
    text = text_of(twin)
    for shown in ("1,234", HOSTILE, "-differential privacy"):
        assert shown in text


def test_ledgers(tmp_path):
    ledger = dpvim.Ledger.create(tmp_path / "a", name=HOSTILE, epsilon=2.0, delta=1e-5)
    ledger.book(PLAN, purpose=HOSTILE)
    text = text_of(ledger)
    assert f"epsilon {ledger.spent():.4g} spent of" in text
    assert HOSTILE in text
    assert "open" in text
    share = re.search(r"width:([\d.]+)%", ledger._repr_html_())
    assert share is not None
    assert float(share[1]) == pytest.approx(50 * ledger.spent(), abs=0.1)
    (ax,) = ledger.plot().axes
    assert "of 2 spent" in ax.get_title()


def a_plan(why_not=None) -> FitPlan:
    return FitPlan(PLAN, "whitened", "full_rank", 5, 5, 1e-5, why_not)


def test_plans():
    text = text_of(a_plan())
    assert "nothing to choose" in text
    assert "5,000 records; 5 parameters" in text
    figure = plot_plan(a_plan())
    steps, widths = figure.axes
    parts = [int(t.get_text().split("\n")[1].replace(",", "")) for t in steps.texts]
    assert sum(parts) == PLAN.num_steps
    (line,) = [line for line in widths.lines if line.get_label() == "by budget"]
    assert list(line.get_xdata()) == pytest.approx([0.25, 0.5, 1, 2, 4], rel=0.01)
    assert line.get_ydata()[2] == pytest.approx(a_plan().expected_width, rel=0.01)
    assert all(np.diff(line.get_ydata()) < 0)
    assert a_plan("asked for").plot().axes[1].get_ylabel() == "noise multiplier"


def test_norms_are_the_released_counts():
    releases = SteeredReleases.zeros(2, 2)
    windows = windows_of(PLAN.num_steps)
    steps = np.array([float(window.length) for window in windows])
    counts = np.zeros_like(releases.counts)
    narrow = [not window.is_wide for window in windows]
    counts[narrow] = [0, 100, 900, 2000, 1500, 400, 100, 0, -3]
    counts[np.logical_not(narrow)] = 7777.0  # of the way, not of the place
    figure = plot_norms(releases._replace(steps=steps, counts=counts), PLAN)
    (ax,) = figure.axes
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in ax.patches}
    assert [bars[i].get_height() for i in range(9)] == pytest.approx(list(counts[-1]))
    # Bins from the clip norm on are those that are marked.
    clipped = [i for i in range(9) if bars[i].get_hatch()]
    assert clipped == [4, 5, 6, 7, 8]
    assert ax.get_title() == "39.9% of 5,000 records clipped"
    whisker = ax.collections[0].get_segments()[1][:, 1]
    error = count_error(PLAN, steps[narrow].sum())
    assert np.diff(whisker)[0] == pytest.approx(4 * error)
    with pytest.raises(ValueError, match="complete run"):
        plot_norms(releases, PLAN)
    with pytest.raises(ValueError, match="fit with defaults"):
        fitted().plot_norms()


def test_coverage():
    rng = np.random.default_rng(0)
    honest = [posterior(rng.normal(size=4) * 0.5) for _ in range(200)]
    (ax,) = plot_coverage(honest, {"w": np.zeros(4)}).axes
    (line,) = [line for line in ax.lines if line.get_label() == "measured"]
    np.testing.assert_allclose(line.get_ydata(), line.get_xdata(), atol=0.05)
    too_narrow = plot_coverage(honest, [{"w": np.full(4, 0.7)}] * 200, levels=[0.5, 0.9])
    measured = too_narrow.axes[0].lines[1].get_ydata()
    assert (measured < [0.4, 0.8]).all()
    for wrong, message in [({"v": 0.0}, "sites of the model"), ([{}], "one each")]:
        with pytest.raises(ValueError, match=message):
            plot_coverage(honest[:2], wrong)  # type: ignore[arg-type]


def test_pictures_can_be_drawn_with_hostile_names(tmp_path):
    figure = plot_posterior(posterior(name=HOSTILE), nonprivate=posterior())
    figure.savefig(tmp_path / "posterior.png")
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert any("not converged" in label for label in labels)
