"""The library's step function, set up so that an adversary chooses every gradient.

The likelihood of a record x at latent theta is exp(theta . x): its gradient is the record itself,
so whoever writes the records writes the gradients. Everything else is the library's own: the
engine, the sampler, the noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from dpvim.estimator import Problem
from dpvim.family import FAMILIES
from dpvim.infer import Engine, State, Supply, eta_for, make_engine
from dpvim.mechanism import Likelihood
from dpvim.plan import PrivacyPlan
from dpvim.randomness import SecretStreams
from dpvim.sampling import EMPTY
from dpvim.variants import make_variant

DIM = 4
_LEARNING_RATE = 1.0
# Runs that are attacked at a time; more would not fit the processor's caches.
_RUNS_AT_A_TIME = 20_000


class Target(NamedTuple):
    """An engine under attack, and where its steps start from."""

    engine: Engine
    state: State

    @property
    def plan(self) -> PrivacyPlan:
        assert isinstance(self.engine.plan, PrivacyPlan)
        return self.engine.plan

    def eta(self, step: int) -> Array:
        """The public draw of a step."""
        return eta_for(self.engine.family, self.state.key, jnp.int32(step))

    def encode(self, step: int, gradient: np.ndarray) -> np.ndarray:
        """What the adversary expects of one gradient, before any clip."""
        variant = self.engine.variant
        return np.asarray(variant.encode(self.state.params, self.eta(step), jnp.asarray(gradient)))


class Seen(NamedTuple):
    """What the adversary sees of every run and step."""

    release: Any
    update: Any


class Player(Protocol):
    """Plays `num_runs` independent runs on `records`, gradients of shape [steps, rows, d].

    The rows may differ from step to step: an adversary chooses them so. The library's sampler and
    noise draw from `streams`.
    """

    def __call__(self, records: np.ndarray, *, num_runs: int, streams: SecretStreams) -> Seen: ...


def make_target(
    plan: PrivacyPlan, *, variant: str = "aligned", family: str = "mean_field"
) -> Target:
    """The library's engine for a plan, on records that are their own gradients."""
    guide = FAMILIES[family](DIM)
    likelihood = Likelihood.from_log_prob(lambda latent, record: jnp.dot(latent, record))
    problem = Problem(DIM, likelihood, lambda latent: jnp.zeros(()))
    engine = make_engine(
        problem, guide, make_variant(variant, guide), optax.sgd(_LEARNING_RATE), plan
    )
    return Target(engine, engine.init(jax.random.key(0), jnp.zeros(DIM), 1.0))


def step_once(
    target: Target, records: Array, is_padding: Array, noise: Array, step: int = 0
) -> tuple[Array, Array]:
    """Release and change of the parameters of one step on a given batch."""
    state = target.state._replace(step=jnp.int32(step))
    rows = jnp.where(is_padding, EMPTY, jnp.arange(len(records)))
    after, info = target.engine.step(state, target.eta(step), records, rows, noise)
    family = target.engine.family
    return info.release, family.pack(after.params) - family.pack(state.params)


def make_player(target: Target) -> Player:
    """A function that plays many runs of the plan's steps, compiled once for each shape."""
    num_steps = target.plan.num_steps
    numbers = jnp.arange(num_steps)
    etas = jnp.stack([target.eta(i) for i in range(num_steps)])
    pack = target.engine.family.pack

    def one_step(number: Array, eta: Array, records: Array, rows: Array, noise: Array) -> Seen:
        state = target.state._replace(step=number)
        after, info = target.engine.step(state, eta, records, rows, noise)
        return Seen(info.release, pack(after.params) - pack(state.params))

    def one_run(records: Array, rows: Array, noise: Array) -> Seen:
        return jax.vmap(one_step)(numbers, etas, records, rows, noise)

    all_runs = jax.jit(jax.vmap(one_run, in_axes=(None, 0, 0)))

    def play(records: np.ndarray, *, num_runs: int, streams: SecretStreams) -> Seen:
        supply = Supply(target.engine, records.shape[1], streams)
        seen = []
        for start in range(0, num_runs, _RUNS_AT_A_TIME):
            runs = min(_RUNS_AT_A_TIME, num_runs - start)
            drawn = supply.draw(runs * num_steps, runs * num_steps)
            by_run = [each.reshape(runs, num_steps, -1) for each in drawn]
            seen.append(jax.tree.map(np.asarray, all_runs(records, *by_run)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *seen)

    return play
