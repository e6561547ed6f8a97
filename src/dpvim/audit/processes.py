"""Checks of a step over two processes: one sum of all shards, one noise, one batch.

Steps, shards, sources and connections are those of fits over several processes. Here the two live
in threads of one process, so that what is attacked is what is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpvim.audit.batches import membership, membership_checks
from dpvim.audit.canaries import take
from dpvim.audit.findings import Finding, chi_square
from dpvim.audit.paths import CANARY, OPPOSITE
from dpvim.audit.target import Target, step_once
from dpvim.channel import Channel
from dpvim.inference.sharing import Sharing
from dpvim.privacy.batches import microbatch_size
from dpvim.privacy.randomness import SECRET_BYTES, SecretStreams
from dpvim.privacy.sampling import EMPTY
from dpvim.privacy.shards import Shard, ShardStreams

CHECK = "processes"
_ROWS, _CUT = 40, 17  # all rows, and those of process 0
_STEPS = 300
_BATCH = 6

T = TypeVar("T")
MakeTarget = Callable[[Sharing | None], Target]


def process_checks(
    make: MakeTarget, streams: Callable[[], SecretStreams], *, runs: int
) -> Iterator[Finding]:
    """Checks of two processes, with shards of different size."""
    alone, job = _Steps(make(None)), _Job(make)
    yield _same_as_one_process(alone, job)
    yield _share_of_one_row(job)
    yield from _batches(job, streams(), streams(), steps=runs)
    yield _noise(job, streams(), streams(), streams())


class _Steps:
    """The first step of a target many times, each on a batch of its own."""

    def __init__(self, target: Target) -> None:
        self.target = target
        eta = target.etas()[0]

        def many(state: Any, *, data: Any, rows: Any, noise: Any, bounds: Any) -> Any:
            def one(i: Any, found: Any) -> Any:
                view = step_once(target, eta, 0, data, rows[i], noise[i])
                return found[0].at[i].set(view.release), found[1].at[i].set(view.update)

            sizes = (target.engine.variant.num_released, target.engine.family.num_params)
            nothing = tuple(jnp.zeros((len(rows), size)) for size in sizes)
            return jax.lax.fori_loop(0, bounds[-1], one, nothing)

        sharing, program = target.engine.sharing, jax.jit(many)
        self._many = program if sharing is None else sharing.chunk(program)

    def run(self, records: Any, rows: np.ndarray, noise: np.ndarray) -> list[np.ndarray]:
        """Releases and updates of steps on batches [steps, rows], with their noise."""
        state, bounds = self.target.state, np.array([0, len(rows)], np.int32)
        done = self._many(state, data=records, rows=rows, noise=noise, bounds=bounds)
        return [np.asarray(each) for each in done]


class _Job:
    """Two processes, each with its part of forty rows."""

    def __init__(self, make: MakeTarget) -> None:
        ends = multiprocessing.Pipe()
        shards = (Shard(0, _CUT, _ROWS, True), Shard(_CUT, _ROWS - _CUT, _ROWS, False))
        self._channels = [Channel(number, [ends[number]]) for number in range(2)]
        self.members = [
            _Steps(make(Sharing(*each))) for each in zip(shards, self._channels, strict=True)
        ]
        self.shards = shards

    def both(self, function: Callable[[int, _Steps], T]) -> list[T]:
        """The results of a function in both processes, at a time."""

        def one(number: int) -> T:
            try:
                return function(number, self.members[number])
            except BaseException as error:
                self._channels[number].__exit__(type(error), error, None)
                raise

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, range(2)))

    def run(
        self, numbers: np.ndarray, rows: list[np.ndarray], noise: list[np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Steps on the path's rows with these numbers, of which each process has its part."""

        def one(number: int, member: _Steps) -> list[np.ndarray]:
            shard, target = self.shards[number], member.target
            own = numbers[shard.first : shard.first + shard.num_rows]
            return member.run(
                target.prepare(take(target.path.rows, own)), rows[number], noise[number]
            )

        return self.both(one)

    def rows_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """Batches of all rows, as each process has them."""
        engine = self.members[0].target.engine
        size = microbatch_size(engine.plan, engine.family.dim)
        return [shard.rows_of(rows, size) for shard in self.shards]

    def sources(self, common: SecretStreams, own: list[SecretStreams]) -> list[Any]:
        """Batches and noise, as each process draws them."""
        return [
            member.target.engine.source(shard.num_rows, ShardStreams(common, each))
            for member, shard, each in zip(self.members, self.shards, own, strict=True)
        ]


def _ordinary(target: Target) -> np.ndarray:
    count = len(target.path.ordinary[0])
    return len(target.path.names) + np.arange(_ROWS) % count


def _same_as_one_process(alone: _Steps, job: _Job) -> Finding:
    """With the same keys releases and updates are those of one process, to the last bit."""
    same = functools.partial(SecretStreams, secret=secrets.token_bytes(SECRET_BYTES))
    numbers = _ordinary(alone.target)
    records = alone.target.prepare(take(alone.target.path.rows, numbers))
    wanted = alone.run(records, *alone.target.engine.source(_ROWS, same()).draw(_STEPS, _STEPS))
    drawn = [each.draw(_STEPS, _STEPS) for each in job.sources(same(), [same(), same()])]
    rows, noise = map(list, zip(*drawn, strict=True))
    found = job.run(numbers, rows, noise)
    apart = sum(
        int((a != b).any(axis=1).sum()) for each in found for a, b in zip(each, wanted, strict=True)
    )
    observed = f"{apart} of {2 * 2 * _STEPS} releases and updates differ"
    return Finding.rule(CHECK, "the same as one process", observed, holds=apart == 0)


def _share_of_one_row(job: _Job) -> Finding:
    """A row in the shard of either process moves the release by C at most."""
    target = job.members[0].target
    names = [name for name in target.path.names if name in (CANARY, OPPOSITE) or "1e" in name]
    noise = [np.zeros((2, target.engine.variant.num_released), np.int32)] * 2
    worst, where = 0.0, ""
    for place in (0, _CUT - 1, _CUT, _ROWS - 1):
        for name in names:
            numbers = _ordinary(target)
            numbers[place] = target.path.row_number(name)
            batch = np.full((2, job.members[0].target.engine.plan.max_batch_size), EMPTY, np.int32)
            others = [i for i in range(0, _ROWS, _ROWS // _BATCH) if i != place]
            batch[:, : len(others)] = others
            batch[1, len(others)] = place
            without, with_it = job.run(numbers, job.rows_of(batch), noise)[0][0].astype(float)
            share = float(np.linalg.norm(np.nan_to_num(with_it - without, nan=np.inf)))
            if share > worst:
                worst, where = share, f"{name} in place {place}"
    worst /= target.plan.clip_norm
    observed = f"at most {worst:.6f} C ({where})"
    return Finding.rule(CHECK, "share of one row", observed, holds=worst <= 1)


def _batches(
    job: _Job, common: SecretStreams, own: SecretStreams, *, steps: int
) -> Iterator[Finding]:
    """Batches of both processes together are those of Poisson sampling from all rows."""
    drawn = [source.draw(steps, steps)[0] for source in job.sources(common, [own, own])]
    member = np.concatenate(
        [membership(rows, shard.num_rows) for rows, shard in zip(drawn, job.shards, strict=True)],
        axis=1,
    )
    for finding in membership_checks(member, job.members[0].target.plan.sampling_prob):
        yield dataclasses.replace(finding, check=CHECK)


def _noise(
    job: _Job, common: SecretStreams, first: SecretStreams, second: SecretStreams
) -> Finding:
    """Empty batches release the noise of one process, once, in both."""
    target = job.members[0].target
    empty = np.full((_STEPS, target.engine.plan.max_batch_size), EMPTY, np.int32)
    sources = job.sources(common, [first, second])
    noise = [source.draw(_STEPS, _STEPS)[1] for source in sources]
    question = "noise of one process, once"
    found, other = (view[0] for view in job.run(_ordinary(target), [empty] * 2, noise))
    if not np.array_equal(found, other):
        return Finding.rule(CHECK, question, "processes have different releases", holds=False)
    z = found.astype(float) / target.plan.noise_stddev
    observed = f"{np.sqrt(np.mean(z**2)):.4f} of the declared standard deviation"
    return Finding(CHECK, question, observed, chi_square(float(np.sum(z**2)), z.size))
