r"""Privacy accounting: the cost (epsilon, delta) of a run, and the noise that a budget asks for.

One event describes the whole run (`dp_event`); the accountant interprets it and nothing else.

The accountant composes privacy loss distributions (PLD) and returns upper bounds. With P and Q
the distributions of one release on two neighbouring data sets, the privacy loss is
``L = log dP/dQ`` under P, the losses of T steps add, and ``delta(epsilon) = E max(0, 1 -
exp(epsilon - L))``. What is computed departs from that in one direction only:

* One step's loss is cut into bins, and the mass of a bin is put on the two ends of an interval
  of the grid, so that its mass under P and under Q are kept (connect-the-dots). A spread like this
  can only raise delta. How far is known, and the width of the grid is chosen after it (`pld`).
* The T-fold sum is one Fourier transform, under an exponential tilt that moves the losses of
  interest to the middle of the distribution. A delta of 1e-12 then keeps its leading digits. What
  wraps around counts on top of what belongs there, and what lies above the window is added
  (`composition`).
* Mass in the far tails counts as infinite loss, and rounding errors are added at their bound.
* A record that is drawn with so many others that the batch is truncated counts as infinite loss
  too (`truncation_prob`). Plans have caps for which this is next to nothing.

>>> event = dp_event(noise_multiplier=4.0, sampling_prob=0.1, num_steps=1000,
...                  num_examples=10_000, max_batch_size=1310)
>>> 1.9 < epsilon_of(event, delta=1e-5, relation="zero_out") < 4.5
True
"""

from dpvim.privacy.accounting.accountant import ACCOUNTANT, epsilon_of
from dpvim.privacy.accounting.calibration import calibrate_noise
from dpvim.privacy.accounting.events import dp_event, truncation_prob

__all__ = ["ACCOUNTANT", "calibrate_noise", "dp_event", "epsilon_of", "truncation_prob"]
