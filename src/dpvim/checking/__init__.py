"""Checks of a fit at a price: how well it predicts records, and whether they look like its own.

Both ask one thing of each record, put it into a cell, and release the cells' counts by the
mechanism of `dpvim.privacy.counts`: a record is in one cell of each question, whatever it holds.

* `held_out`: the log predictive density of records, on average. Its cells need no bounds to be
  declared: a first round counts on a scale of orders of magnitude, and a second one between the
  ends that the first one found.
* `predictive_check`: the rank of a record among replicates that the fit would have made in its
  place. If the model is right, all ranks are equally likely.
"""

from dpvim.checking.density import Score, held_out
from dpvim.checking.ranks import PredictiveCheck, RankCheck, predictive_check

__all__ = ["PredictiveCheck", "RankCheck", "Score", "held_out", "predictive_check"]
