r"""One DP estimate of the ELBO's gradient, whatever the variant and the family.

.. code-block:: text

    eta ~ base                 one shared draw a step
    theta = probe(xi, eta, width) = f(xi, width eta)     where the likelihood's gradient is taken
    S = sum_x min(1, C/|E g_x|) E g_x          the only line that sees data
    R = S + noise, on a lattice                the only thing that is released
    step = decode(R / (q N)) with free = grad_xi [log p(theta) + H(q)] / N

Prior and entropy do not depend on the data, so they are added after the noise: never clipped,
subsampled or noised. (The paper keeps their 1/N share inside the clip for some variants. The
difference is O(1/N), and outside it is exact.)

With a width above 1 the likelihood's gradient is taken further away than a draw of q, and what it
says about the scales is divided by the width: decode sees eta / width. For a quadratic
log-likelihood the expectation of the step is unchanged, the noise of the scales' gradient falls by
the width, and the releases tell more about the curvature. Prior and entropy stay where they were.
The width is public, and the clip is as before, so privacy does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpvim.inference.blocks import Blocks
from dpvim.inference.families import Family, Params
from dpvim.inference.sharing import Sharing
from dpvim.inference.variants import Variant
from dpvim.privacy.batches import microbatch_size, microbatched
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.lattice import Lattice, add_noise
from dpvim.privacy.plan import Plan
from dpvim.types import Latent, LogPrior, Record, Scalar, Whitening

_SMALLEST_WEIGHT = 1e-30


class Problem(NamedTuple):
    """A likelihood over records and a log prior, both of the flat latent.

    `arrange` brings records into the form that the likelihood's clipped sum takes, each row by
    itself. It is applied once, to arrays with a public number of rows: a program for another
    number could round the rows of others differently. `blocks` are the likelihood's; None if
    nothing is known about them.
    """

    dim: int
    likelihood: Likelihood
    log_prior: LogPrior
    arrange: Callable[[Record], Record] = lambda records: records
    blocks: Blocks | None = None


def width_schedule(width: float, num_steps: int) -> Callable[[Array], Array]:
    """By a step's number: `width` in the first three quarters of a run, 1 in the last one.

    The wide part is for learning the curvature. In the last quarter the gradient is taken where the
    approximation is: means and scales come to rest there, and the two parts together tell how far
    the log-likelihood departs from a quadratic.
    """
    return lambda step: jnp.where(4 * step < 3 * num_steps, width, 1.0)


def default_width(*, num_examples: int, dim: int) -> float:
    """As wide as a log-likelihood of N records is still close to a quadratic, at most 8.

    Probes at `width` standard deviations move the log-likelihood by about width^2 d / 2, of which
    a record's share is width^2 d / 2N; with 1/4 sqrt(N / d) that is a thirtieth, which for a
    logistic regression is a quarter of a unit of the linear predictor.

    >>> round(default_width(num_examples=4000, dim=6), 2)
    6.45
    >>> default_width(num_examples=100, dim=50)
    1.0
    """
    return min(8.0, max(1.0, 0.25 * math.sqrt(num_examples / dim)))


class PrivateGradient(NamedTuple):
    """The two sides of a release.

    Attributes:
        probe: ``(params, eta, width=1) -> latent``, the point at which the gradient is taken.
        release: ``(params, eta, records, rows, noise, width=1) -> R``; sees data. The batch are
            the records with these row numbers, or all of them if there are no numbers.
        direction: ``(params, eta, release, width=1) ->`` ascent direction of ELBO / N; sees no
            data.
    """

    probe: Callable[..., Latent]
    release: Callable[..., Float[Array, " r"]]
    direction: Callable[..., Params]


def make_private_gradient(
    problem: Problem,
    family: Family,
    variant: Variant,
    plan: Plan,
    sharing: Sharing | None = None,
) -> PrivateGradient:
    """Put a problem, a family, a variant and a plan together.

    With `sharing` the records are those of one process of several, and the release is that of all.
    """
    lattice = Lattice.of(plan, dim=problem.dim, num_released=variant.num_released)
    size = microbatch_size(plan, problem.dim)
    shard = None if sharing is None else sharing.shard
    batch_sum = microbatched(problem.likelihood.clipped_sum, size, shard)

    def probe(params: Params, eta: Array, width: Scalar | float = 1.0) -> Latent:
        return family.reparametrise(params, width * eta)

    def release(
        params: Params,
        eta: Array,
        records: Record,
        rows: Int[Array, " batch"],
        noise: Int[Array, " r"],
        width: Scalar | float = 1.0,
    ) -> Float[Array, " r"]:
        weights = variant.weights(params, eta)
        if weights is not None and not isinstance(weights, Whitening):
            # One whose squares may have underflown says nothing; its coordinate is left out.
            weights = jnp.where(weights < _SMALLEST_WEIGHT, 0.0, weights)
        point = probe(params, eta, width)
        total = batch_sum(point, weights, records, rows, lattice.row_bound)
        if sharing is not None:
            total = sharing.meet(point, total)
        if isinstance(weights, Whitening):  # rows were encoded before they were clipped
            return add_noise(total, noise, lattice.grid)
        with jax.enable_x64(True):  # the sum is in double precision and stays there
            encoded = variant.encode(params, eta, total)
            # Coordinates that were left out may have infinite slopes: nothing times infinity.
            encoded = jnp.where(jnp.isfinite(encoded), encoded, 0.0)
        return add_noise(encoded, noise, lattice.grid)

    def free_terms(params: Params, eta: Array) -> Scalar:
        latent = family.reparametrise(params, eta)
        return (problem.log_prior(latent) + family.entropy(params, eta)) / plan.num_examples

    def direction(
        params: Params, eta: Array, release: Float[Array, " r"], width: Scalar | float = 1.0
    ) -> Params:
        free = jax.grad(free_terms)(params, eta)
        return variant.decode(params, eta / width, release / plan.expected_batch_size, free)

    return PrivateGradient(probe, release, direction)
