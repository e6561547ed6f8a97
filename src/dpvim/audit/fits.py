"""A canary audit of whole fits: NumPyro model in, iterates out, nothing mocked."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpvim.audit.canaries import Records, concat
from dpvim.audit.findings import Finding, two_sided_normal
from dpvim.audit.game import hockey_stick, log_likelihood_ratio, strongest_attack
from dpvim.audit.paths import CodePath, FitCase, ReferenceGradients, clipped
from dpvim.inference.families import FAMILIES
from dpvim.inference.variants import make_variant
from dpvim.privacy.norm_counts import COUNT_SHARE
from dpvim.privacy.plan import SMALLEST_CLIP_NORM, PrivacyPlan
from dpvim.svi import DPSVI
from dpvim.types import NotForReleaseWarning, Relation

CHECK = "whole fits"
_STEPS = 12
# Increments are far above the rounding of the means, and the means hardly move.
_LEARNING_RATE = 0.02
# The metric of a whitened release moves with the scales: less than they are large, with this.
_LEARNING_RATE_WHITENED = 1e-4
_DELTAS = (1e-2, 0.03, 0.1, 0.3)
# What the canary must move the score by, in its standard deviations and in standard errors. A
# vanilla full-rank release has a number for each pair of coordinates, which share the clip norm
# with the means; the attack looks at the means alone.
_MIN_GAP, _MIN_GAP_AMONG_PAIRS = 0.5, 0.25
_MIN_ERRORS = 3.0
# Bystanders would else add noise of their own.
_INIT_SCALE = 1e-3


def fit_checks(
    path: CodePath, *, family: str, variant: str, fits: int, seeds: tuple[int | None, int | None]
) -> list[Finding]:
    """Fits with an extreme record and without it, told apart by all of their iterates.

    The record is really absent in the other world, under the relation that allows for it.
    """
    case = path.fit
    whitens = make_variant(variant, FAMILIES[family](2)).whitens
    # A whitened gradient is that of the latent in units of the approximation's scale.
    unit = _INIT_SCALE if whitens else 1.0
    plan = PrivacyPlan(
        num_examples=len(case.others[0]) + 1,
        sampling_prob=0.3,
        num_steps=_STEPS,
        clip_norm=max(unit * path.clip_norm, SMALLEST_CLIP_NORM),
        relation=Relation.ADD_OR_REMOVE,
        noise_multiplier=1.0,
        max_rows_per_person=case.max_rows_per_person,
    )
    kept = np.sqrt(1 - COUNT_SHARE) if whitens else 1.0  # the rest of a share is a count
    canary = _CanaryDirection(case, plan, unit, kept)
    with_it, without = (
        canary.project(kept * unit * _increments(case, records, plan, family, variant, fits, seed))
        for records, seed in zip(
            (concat([case.others, case.canary]), case.others), seeds, strict=True
        )
    )
    present, absent = (
        log_likelihood_ratio(released, canary.shift, plan).sum(axis=1)
        for released in (with_it, without)
    )
    claims = [(plan.epsilon(delta), delta) for delta in _DELTAS]
    candidates = [
        (p, f"breaks ({epsilon:.3g}, {delta:g})")
        for first, second in ((present, absent), (-absent, -present))
        for (epsilon, delta), p in zip(claims, hockey_stick(first, second, claims), strict=True)
    ]
    gap = (present.mean() - absent.mean()) / absent.std()
    errors = gap * np.sqrt(fits / 2)
    among_pairs = variant != "aligned" and FAMILIES[family](2).num_params > 4
    min_gap = _MIN_GAP_AMONG_PAIRS if among_pairs else _MIN_GAP
    has_power = bool(gap > min_gap and errors > _MIN_ERRORS)
    power = f"the canary moves the score by {gap:.1f} sd, {errors:.0f} standard errors"
    return [
        strongest_attack(CHECK, f"canary in {fits} fits", power, candidates),
        _correlation_between_fits(without),
        # An attack that cannot see the canary at all would prove nothing.
        Finding.rule(CHECK, "the attack has power", power, holds=has_power),
    ]


class _CanaryDirection:
    """The direction of the canary's share in the increments of the means, in a unit."""

    def __init__(self, case: FitCase, plan: PrivacyPlan, unit: float, kept: float) -> None:
        problem = case.bridged.problem
        records = concat([case.others, case.canary])
        gradients = ReferenceGradients(problem).at(case.loc[None], records)
        *others, canary = kept * clipped(unit * gradients[0], plan.clip_norm)
        self.shift = float(np.linalg.norm(canary))
        self._unit = canary / self.shift
        # What the others and the prior add in the mean.
        prior = np.asarray(jax.jit(jax.grad(problem.log_prior))(jnp.asarray(case.loc)))
        self._rest = plan.sampling_prob * float(self._unit @ (sum(others) + kept * unit * prior))

    def project(self, increments: np.ndarray) -> np.ndarray:
        """Increments [fits, steps, d] along the canary's share, less what the rest adds."""
        return increments @ self._unit - self._rest


def _correlation_between_fits(released: np.ndarray) -> Finding:
    """Two fits with one stream would have taken the same steps."""
    standard = (released - released.mean()) / released.std()
    products = standard[:-1] * standard[1:]
    z = float(products.sum() / np.sqrt(products.size))
    observed = f"correlation {products.mean():+.4f} between one fit and the next"
    return Finding(CHECK, "noise of different fits", observed, float(two_sided_normal(z)))


def _increments(
    case: FitCase,
    records: Records,
    plan: PrivacyPlan,
    family: str,
    variant: str,
    fits: int,
    seed: int | None,
) -> np.ndarray:
    """Steps of the means, as sums over a batch: [fits, steps, d]."""
    whitens = make_variant(variant, FAMILIES[family](2)).whitens
    learning_rate = _LEARNING_RATE_WHITENED if whitens else _LEARNING_RATE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotForReleaseWarning)  # nothing is kept
        svi = DPSVI(
            case.model,
            family,
            optax.sgd(learning_rate),
            plan,
            variant=variant,
            init_scale=_INIT_SCALE,
            seed=seed,
        )
    args, kwargs = case.arguments(records)
    runs = svi.run_many(
        jax.random.key(0 if seed is None else seed),
        fits,
        plan.num_steps,
        *args,
        init_params=case.bridged.space.constrain(jnp.asarray(case.loc)),
        trace_every=1,
        progress_bar=False,
        **kwargs,
    )
    loc = np.stack([run.trace.params.loc for run in runs])
    return np.diff(loc, axis=1) / learning_rate * plan.expected_batch_size
