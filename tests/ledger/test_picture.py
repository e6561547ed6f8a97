"""The picture of a ledger: a bar for each release, the total, the budget."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from ledgers import DELTA, make_ledger, plan_of

from dpvim.ledger import picture


@pytest.fixture
def ledger(tmp_path):
    return make_ledger(tmp_path)


def test_bars_are_releases_and_the_line_is_the_total(ledger):
    for noise in (20.0, 40.0):
        ledger.book(plan_of(noise), purpose=f"$ noise {noise:g}, a very long text about it all")
    ledger.book(plan_of(), purpose="not made").settle(0)
    figure = picture.draw(ledger)
    (ax,) = figure.axes
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [plan_of(20.0).epsilon(DELTA), plan_of(40.0).epsilon(DELTA), 0]
    total = ax.lines[0].get_xdata()
    assert total[0] == widths[0]
    assert total[1] == total[2] == ledger.spent()
    assert list(ax.lines[1].get_xdata()) == [ledger.epsilon] * 2
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0].endswith("…")
    assert "\\$" in labels[0]
    assert all(name in ax.get_title() for name in ("people", "of 1 spent"))
    figure.canvas.draw()
    plt.close(figure)


def test_ledgers_with_nothing_and_with_much_are_drawn(ledger, monkeypatch):
    figure = picture.draw(ledger)
    figure.canvas.draw()
    plt.close(figure)
    monkeypatch.setattr(picture, "_MOST_NAMES", 2)
    for i in range(5):
        ledger.book(plan_of(500.0), purpose=f"release {i}")
    figure = picture.draw(ledger)
    assert len(figure.axes[0].get_yticklabels()) == 2
    assert len(figure.axes[0].patches) == 5
    figure.canvas.draw()
    plt.close(figure)
