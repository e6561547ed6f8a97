"""Windows of a steered run: they cover it, and are long enough for their regressions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpvim.inference.windows import (
    NUM_NARROW,
    NUM_WINDOWS,
    default_num_steps,
    fewest_steps,
    window_widths,
    windows_of,
)


@pytest.mark.parametrize("num_steps", [640, 4096, 5001, 12_345])
def test_windows_follow_each_other_and_cover_the_run(num_steps):
    windows = windows_of(num_steps)
    assert len(windows) == NUM_WINDOWS
    assert (windows[0].first, windows[-1].end) == (0, num_steps)
    assert all(one.end == next_.first for one, next_ in itertools.pairwise(windows))
    kinds = [(window.searches, window.is_wide) for window in windows]
    assert kinds == [(True, True)] * 16 + [(False, True)] * 8 + [(False, False)] * 8
    narrow = sum(window.length for window in windows[-NUM_NARROW:])
    assert narrow == pytest.approx(num_steps / 2, abs=1)


@pytest.mark.parametrize("dim", [1, 10, 60, 128])
def test_every_window_has_more_steps_than_coefficients(dim):
    assert fewest_steps(dim) <= default_num_steps(dim)
    for num_steps in (fewest_steps(dim), default_num_steps(dim)):
        assert min(window.length for window in windows_of(num_steps)) >= dim + 1 + 8


def test_probes_are_wide_until_the_narrow_windows():
    width_at = window_widths(5.0, 640)
    assert [float(width_at(np.int32(step))) for step in (0, 319, 320, 639)] == [5, 5, 1, 1]
