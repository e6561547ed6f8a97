r"""One DP estimate of the ELBO's gradient, whatever the variant and the family.

.. code-block:: text

    eta ~ base                 one shared draw a step
    theta = probe(xi, eta)     where the likelihood's gradient is taken
    S = sum_x min(1, C/|E g_x|) E g_x          the only line that sees data
    R = S + noise, on a lattice                the only thing that is released
    step = decode(R / (q N)) with free = grad_xi [log p(theta) + H(q)] / N

Prior and entropy do not depend on the data, so they are added after the noise: never clipped,
subsampled or noised. (The paper keeps their 1/N share inside the clip for some variants. The
difference is O(1/N), and outside it is exact.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpvim.batches import in_pieces, usual_piece
from dpvim.family import Family, Params
from dpvim.mechanism import Lattice, Likelihood, add_noise
from dpvim.plan import Plan
from dpvim.types import Latent, LogPrior, Record, Scalar
from dpvim.variants import Variant

_SMALLEST_WEIGHT = 1e-30


class Problem(NamedTuple):
    """What is fitted: a likelihood over records and a log prior, both of the flat latent."""

    dim: int
    likelihood: Likelihood
    log_prior: LogPrior


class Estimator(NamedTuple):
    """The two sides of a release.

    Attributes:
        probe: ``(params, eta) -> latent``, the point at which the gradient is taken.
        release: ``(params, eta, records, rows, noise) -> R``; sees data. The batch are the records
            with these row numbers, or all of them if there are no numbers.
        direction: ``(params, eta, release) ->`` ascent direction of ELBO / N; sees no data.
    """

    probe: Callable[[Params, Array], Latent]
    release: Callable[
        [Params, Array, Record, Int[Array, " batch"], Int[Array, " r"]], Float[Array, " r"]
    ]
    direction: Callable[[Params, Array, Float[Array, " r"]], Params]


def make_estimator(problem: Problem, family: Family, variant: Variant, plan: Plan) -> Estimator:
    """Put a problem, a family, a variant and a plan together."""
    probe = family.reparametrise
    lattice = Lattice.of(plan, dim=problem.dim, num_released=variant.num_released)
    batch_sum = in_pieces(problem.likelihood.clipped_sum, usual_piece(plan, problem.dim))

    def release(
        params: Params,
        eta: Array,
        records: Record,
        rows: Int[Array, " batch"],
        noise: Int[Array, " r"],
    ) -> Float[Array, " r"]:
        weights = variant.weights(params, eta)
        if weights is not None:
            # One whose squares may have underflown says nothing; its coordinate is left out.
            weights = jnp.where(weights < _SMALLEST_WEIGHT, 0.0, weights)
        total = batch_sum(probe(params, eta), weights, records, rows, lattice.row_bound)
        with jax.enable_x64(True):  # the sum is in double precision and stays there
            encoded = variant.encode(params, eta, total)
            # Coordinates that were left out may have infinite slopes: nothing times infinity.
            encoded = jnp.where(jnp.isfinite(encoded), encoded, 0.0)
        return add_noise(encoded, noise, lattice.grid)

    def free_terms(params: Params, eta: Array) -> Scalar:
        latent = family.reparametrise(params, eta)
        return (problem.log_prior(latent) + family.entropy(params)) / plan.num_examples

    def direction(params: Params, eta: Array, release: Float[Array, " r"]) -> Params:
        free = jax.grad(free_terms)(params, eta)
        return variant.decode(params, eta, release / plan.expected_batch_size, free)

    return Estimator(probe, release, direction)
