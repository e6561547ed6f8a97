"""The Adult data, and the benchmark against the published code in short."""

from __future__ import annotations

import numpy as np
import pytest

import dpvim
from dpvim.experiments import adult
from dpvim.experiments.adult_experiments import ADULT, ADULT_NOISE
from dpvim.experiments.experiment import AS_PUBLISHED, Scope
from dpvim.experiments.running import reproduce

needs_adult = pytest.mark.skipif(
    adult.find() is None, reason="the Adult data are not here (set DPVIM_DATA to their folder)"
)


@needs_adult
def test_adult_has_the_papers_shape():
    data = adult.load()
    assert data.X.shape == (30_162, 96)
    assert data.X_test.shape == (15_060, 96)
    assert len(data.columns) == 96
    assert data.y.mean() == pytest.approx(0.2489, abs=1e-3)


@pytest.mark.long
@needs_adult
def test_private_accuracy_is_close_to_the_published_one():
    """2000 steps at epsilon 10: well above the share of the larger class (0.754)."""
    data = adult.load()
    fit = dpvim.fit(
        adult.model,
        data.X,
        data.y,
        noise_multiplier=1.375,
        delta=1e-5,
        clip_norm=3.0,
        sampling_prob=0.01,
        num_steps=2000,
        learning_rate=5e-3,
        seed=0,
    )
    assert adult.accuracy(data, fit.posterior.loc) > 0.83
    assert np.isfinite(fit.posterior.scale).all()


def test_missing_data_are_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="DPVIM_DATA"):
        adult.load()


def test_data_that_nobody_has_named_are_downloaded_once(monkeypatch, tmp_path):
    monkeypatch.delenv("DPVIM_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    asked = []

    def retrieve(url, known_hash, name, folder, progressbar):
        asked.append((url.rpartition("/")[2], known_hash.startswith("sha256:")))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")

    monkeypatch.setattr("pooch.retrieve", retrieve)
    assert adult.find() is None
    assert adult.fetch() == adult.fetch() == adult.find()
    assert asked == [("adult.data", True), ("adult.test", True)]


@pytest.mark.parametrize("error", [ConnectionError("no network"), ValueError("another hash")])
def test_a_download_that_fails_says_how_to_get_the_data(monkeypatch, tmp_path, error):
    monkeypatch.delenv("DPVIM_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)

    def retrieve(*args, **options):
        raise error

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(FileNotFoundError, match=r"download failed .*data set 2.*DPVIM_DATA"):
        adult.load()


@pytest.mark.long
@needs_adult
def test_the_papers_claims_on_adult_in_short(tmp_path):
    published = reproduce(ADULT, Scope(epsilons=(10.0,), ways=(AS_PUBLISHED,)), tmp_path)
    last = published.summary[published.summary.estimate == "last"].set_index("variant")
    # Two repeats show directions; what is clear beyond chance is for more of them.
    both = np.hypot(last.means, last.stds)
    assert both.idxmin() == "aligned_natural"
    assert last.stds["vanilla"] > 1.1 * last.stds["aligned"]
    assert last.means["natural"] > last.means["aligned"]
    assert "does not hold" not in {verdict.judgement for verdict in published.verdicts}
    # ../shared/reference.md: the published code, 3 seeds, at the same noise.
    for variant, (means, stds) in {
        "vanilla": (4.47, 3.78),
        "aligned_natural": (3.67, 2.45),
    }.items():
        assert last.means[variant] == pytest.approx(means, rel=0.08)
        assert last.stds[variant] == pytest.approx(stds, rel=0.08)
    noise = reproduce(ADULT_NOISE, Scope(epsilons=(10.0,), repeats=4), tmp_path)
    assert noise.done == 4
    assert noise.verdicts[0].judgement == "holds"
