"""The library's own step function on a path, set up so that an adversary chooses every record.

Engine, sampler and noise are those that fits use; what is made here is where a step starts and
which rows it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from dpvim.audit.canaries import Records, take
from dpvim.audit.paths import CodePath, ReferenceGradients, clipped, clipped_and_counted
from dpvim.inference.engine import Engine, State, eta_for, make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.sharing import Sharing
from dpvim.inference.variants import make_variant
from dpvim.privacy.norm_counts import COUNT_SHARE
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams

_LEARNING_RATE = 1.0
# Runs that are attacked at a time: more would not fit the processor's caches, nor many releases
# of many numbers the memory.
_RUNS_AT_A_TIME = 20_000
_NUMBERS_AT_A_TIME = 8_000_000

T = TypeVar("T")


class Target(NamedTuple):
    """An engine under attack, where its steps start from, and the path that it takes."""

    engine: Engine
    state: State
    path: CodePath
    reference: ReferenceGradients

    @property
    def plan(self) -> PrivacyPlan:
        assert isinstance(self.engine.plan, PrivacyPlan)
        return self.engine.plan

    def prepare(self, records: Records) -> Any:
        """Records as the engine takes them, made as fits make them."""
        return self.engine.prepare([jnp.asarray(leaf) for leaf in records])

    def zero_noise(self) -> np.ndarray:
        """Noise of a step that releases its sum as it is."""
        return np.zeros(self.engine.variant.num_released, np.int32)

    def etas(self) -> Array:
        """The public draws of all steps."""
        family, key = self.engine.family, self.state.key
        return jnp.stack([eta_for(family, key, jnp.int32(i)) for i in range(self.plan.num_steps)])

    def shares(self) -> np.ndarray:
        """Shares of releases that the adversary expects of the path's rows: [steps, rows, r]."""
        params, etas = self.state.params, self.etas()
        family, encode = self.engine.family, self.engine.variant.encode
        latents = np.stack([family.reparametrise(params, eta) for eta in etas])
        gradients = self.reference.at(latents, self.path.rows)
        with jax.enable_x64(True):
            by_step = jax.vmap(jax.vmap(lambda eta, g: encode(params, eta, g), (None, 0)))
            encoded = np.asarray(by_step(etas, gradients))
        if not self.engine.variant.whitens:
            return clipped(encoded, self.plan.clip_norm)
        rows = encoded[..., : family.dim] / np.sqrt(1 - COUNT_SHARE)
        return clipped_and_counted(rows, self.plan.clip_norm)


def make_target(
    path: CodePath,
    reference: ReferenceGradients,
    plan: PrivacyPlan,
    *,
    variant: str = "aligned",
    family: str = "mean_field",
    scale: float = 1.0,
    sharing: Sharing | None = None,
) -> Target:
    """The library's engine for a plan, on a path; with `sharing` that of one process of several."""
    guide = FAMILIES[family](path.problem.dim)
    estimator = make_variant(variant, guide)
    problem = path.by_record if estimator.whitens else path.problem
    engine = make_engine(
        problem, guide, estimator, optax.sgd(_LEARNING_RATE), plan, sharing=sharing
    )
    state = engine.init(jax.random.key(0), jnp.asarray(path.loc), scale)
    # Somewhere: a family starts with scales that are all alike, and without correlations.
    packed = guide.pack(state.params)
    moved = packed + 0.1 * scale * jnp.sin(jnp.arange(len(packed)))
    return Target(engine, state._replace(params=guide.unpack(moved)), path, reference)


class AdversaryView(NamedTuple):
    """The adversary's view of a step: the release, and the change of the parameters.

    Of many runs side by side it is the sum of the changes' sizes.
    """

    release: Any
    update: Any


def step_once(
    target: Target, eta: Array, number: Any, records: Any, rows: Array, noise: Array
) -> AdversaryView:
    """A step on the records with these row numbers; records as `Engine.prepare` returns them."""
    state = target.state._replace(step=jnp.int32(number))
    after, info = target.engine.step(state, eta, records, rows, noise)
    pack = target.engine.family.pack
    return AdversaryView(info.release, pack(after.params) - pack(state.params))


class VectorizedRuns:
    """Many runs of the plan's steps as one program, compiled once for each shape."""

    def __init__(self, target: Target) -> None:
        self.target = target
        etas, numbers = target.etas(), jnp.arange(target.plan.num_steps)

        def one_run(records: Any, rows: Array, noise: Array) -> AdversaryView:
            def one(eta: Array, number: Array, *rest: Any) -> AdversaryView:
                view = step_once(target, eta, number, *rest)
                return view._replace(update=jnp.sum(jnp.abs(view.update)))

            return jax.vmap(one)(etas, numbers, records, rows, noise)

        self._all_runs = jax.jit(jax.vmap(one_run, in_axes=(None, 0, 0)))

    def prepare_steps(self, records: Records, numbers: Sequence[np.ndarray]) -> Any:
        """Records with these numbers, for each step, as the engine takes them."""
        by_step = [self.target.prepare(take(records, each)) for each in numbers]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_step)

    def run_without_noise(self, records: Any, rows: np.ndarray) -> AdversaryView:
        """Steps on batches of chosen rows, shape [runs, steps, batch], without noise."""
        noise = np.zeros((*rows.shape[:2], self.target.engine.variant.num_released), np.int32)
        return jax.tree.map(np.asarray, self._all_runs(records, rows.astype(np.int32), noise))

    def run_sampled(
        self,
        records: Any,
        num_rows: int,
        *,
        runs: int,
        streams: SecretStreams,
        summarize: Callable[[AdversaryView], T],
    ) -> T:
        """Summaries of `runs` independent runs on the first `num_rows` records.

        The library's sampler and noise draw from `streams`. Results of `summarize` are
        concatenated along their first axes.
        """
        engine, steps = self.target.engine, self.target.plan.num_steps
        source = engine.source(num_rows, streams)
        most = max(1, _NUMBERS_AT_A_TIME // (steps * engine.variant.num_released))
        at_a_time = min(_RUNS_AT_A_TIME, most, runs)
        found = []
        for start in range(0, runs, at_a_time):
            # The last ones are drawn for a whole program, and those too many are dropped.
            drawn = source.draw(at_a_time * steps, at_a_time * steps)
            by_run = [each.reshape(at_a_time, steps, -1) for each in drawn]
            view = jax.tree.map(np.asarray, self._all_runs(records, *by_run))
            kept = min(at_a_time, runs - start)
            found.append(summarize(jax.tree.map(lambda leaf, n=kept: leaf[:n], view)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)
