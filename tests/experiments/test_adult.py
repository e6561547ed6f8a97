"""The Adult data, and the benchmark against the published code in short."""

from __future__ import annotations

import numpy as np
import pytest

import dpvim
from dpvim.experiments import adult

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
