"""A canary audit of whole fits: NumPyro model in, iterates out, nothing mocked."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from dpvim.audit.findings import Finding, two_sided_normal
from dpvim.audit.game import hockey_stick, log_mixture, strongest_look
from dpvim.plan import PrivacyPlan
from dpvim.svi import DPSVI
from dpvim.types import NotForReleaseWarning, Relation

CHECK = "whole fits"
_BYSTANDERS = 20
_LEARNING_RATE = 1e-3
_DELTAS = (1e-2, 0.03, 0.1, 0.3)


def _model(x: np.ndarray) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


def fit_checks(*, variant: str, fits: int, seeds: tuple[int | None, int | None]) -> list[Finding]:
    """Fits with an extreme record and without it, told apart by all of their iterates.

    The record is really absent in the other world, under the relation that allows for it.
    """
    plan = PrivacyPlan(
        num_examples=_BYSTANDERS + 1,
        sampling_prob=0.3,
        num_steps=12,
        clip_norm=0.37,
        relation=Relation.ADD_OR_REMOVE,
        noise_multiplier=1.0,
    )
    others = np.zeros((_BYSTANDERS, 2), np.float32)
    canary = np.array([[1e4, 0.0]], np.float32)
    with_it = _released(plan, np.concatenate([others, canary]), variant, fits, seeds[0])
    without = _released(plan, others, variant, fits, seeds[1])
    present, absent = (
        log_mixture(released, plan.clip_norm, plan).sum(axis=1) for released in (with_it, without)
    )
    claims = [(plan.epsilon(delta), delta) for delta in _DELTAS]
    looks = [
        (p, f"breaks ({epsilon:.3g}, {delta:g})")
        for first, second in ((present, absent), (-absent, -present))
        for (epsilon, delta), p in zip(claims, hockey_stick(first, second, claims), strict=True)
    ]
    gap = (present.mean() - absent.mean()) / absent.std()
    seen = f"the canary moves the score by {gap:.1f} sd"
    return [
        strongest_look(CHECK, f"canary in {fits} fits", seen, looks),
        _unlike(without / plan.noise_stddev),
        # An attack that cannot see the canary at all would prove nothing.
        Finding.rule(CHECK, "the attack has power", seen, holds=bool(gap > 0.5)),
    ]


def _unlike(noise: np.ndarray) -> Finding:
    """Two fits with one stream would have taken the same steps."""
    products = noise[:-1] * noise[1:]
    z = float(products.sum() / np.sqrt(products.size))
    observed = f"correlation {products.mean():+.4f} between one fit and the next"
    return Finding(CHECK, "noise of different fits", observed, float(two_sided_normal(z)))


def _released(
    plan: PrivacyPlan, x: np.ndarray, variant: str, fits: int, seed: int | None
) -> np.ndarray:
    """What the increments of the means tell of the releases along the canary, [fits, steps]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotForReleaseWarning)  # nothing is kept
        svi = DPSVI(
            _model,
            "mean_field",
            optax.sgd(_LEARNING_RATE),
            plan,
            variant=variant,
            init_scale=1e-3,  # bystanders would else add noise of their own
            seed=seed,
        )
    runs = svi.run_many(
        jax.random.key(0 if seed is None else seed),
        fits,
        plan.num_steps,
        x,
        init_params={"mean": np.zeros(2, np.float32)},
        trace_every=1,
        progress_bar=False,
    )
    loc = np.stack([run.trace.params.loc[:, 0] for run in runs])
    return np.diff(loc, axis=1) / _LEARNING_RATE * plan.expected_batch_size
