"""Faults that an implementation of this kind may have, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from count_faults import COUNT_FAULTS
from path_faults import PATH_FAULTS
from person_faults import PERSON_FAULTS
from planting import Fault, everywhere, patch
from process_faults import PROCESS_FAULTS

from dpvim import svi
from dpvim.audit import target
from dpvim.inference import gradient
from dpvim.inference.engine import Engine
from dpvim.privacy import accounting, clipping, lattice
from dpvim.privacy.accounting import accountant, calibration
from dpvim.privacy.noise import RoundedGaussianNoise
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY, PoissonSampler
from dpvim.types import Relation

# -- noise ----------------------------------------------------------------------------------------


def _noise(change: Callable[[np.ndarray, RoundedGaussianNoise], np.ndarray]) -> Callable[[], Any]:
    """A fault in what the source of noise hands out."""

    def make(draw: Any) -> Any:
        def faulty(self: RoundedGaussianNoise, num_steps: int) -> np.ndarray:
            return change(draw(self, num_steps), self).astype(np.int32)

        return faulty

    return lambda: patch(RoundedGaussianNoise, "draw", make)


def _short_tailed(noise: np.ndarray, source: RoundedGaussianNoise) -> np.ndarray:
    """Single-precision normals by inversion."""
    key = jax.random.key(int(np.abs(noise.ravel()[:3]).sum()))
    return np.asarray(jax.random.normal(key, noise.shape, jnp.float32)) * source._stddev_in_grids


def _leaning_on_the_step_before(noise: np.ndarray, source: RoundedGaussianNoise) -> np.ndarray:
    """Noise added twice, the second time with the opposite sign of the step before."""
    return (noise - 0.5 * np.roll(noise, 1, axis=0)) / np.sqrt(1.25)


# -- clip and sum ---------------------------------------------------------------------------------


def _no_clip() -> Any:
    return everywhere("clip_factors", lambda old: lambda norms, pad, bound: 1.0 - pad)


def _clip_to_root_two() -> Any:
    return everywhere(
        "clip_factors",
        lambda old: lambda norms, pad, bound: old(norms, pad, bound * np.sqrt(2)),
    )


def _clip_after_the_sum() -> Any:
    def make(old: Any) -> Any:
        def faulty(gradients: Any, weights: Any, is_padding: Any, bound: float) -> Any:
            rows = gradients()
            usable = jnp.isfinite(rows).all(axis=1) & ~is_padding
            safe = jnp.clip(jnp.where(usable[:, None], rows, 0.0), -1e15, 1e15)
            return old(lambda: safe.sum(axis=0)[None], weights, jnp.zeros(1, bool), bound)

        return faulty

    return patch(clipping, "clipped_sum", make)


def _nan_rows_kept() -> Any:
    """The gradient is scaled by C over its norm, and the norm of a NaN is NaN."""

    def make(old: Any) -> Any:
        def faulty(gradients: Any, weights: Any, is_padding: Any, bound: float) -> Any:
            nan_rows = (jnp.isnan(gradients()).any(axis=1) & ~is_padding).sum()
            total = old(gradients, weights, is_padding, bound)
            with jax.enable_x64(True):
                return total + jnp.where(nan_rows, jnp.nan, 0.0).astype(jnp.float64)

        return faulty

    return patch(clipping, "clipped_sum", make)


def _unsafe_norm() -> Any:
    """Squares that overflow: the norm of 1e25 is infinite, the factor zero times infinity."""

    def make(old: Any) -> Any:
        def faulty(norms: Any, is_padding: Any, bound: float) -> Any:
            overflows = jnp.isinf((norms * 1e10) ** 2) & ~is_padding
            return jnp.where(overflows, 1.0, old(norms, is_padding, bound))

        return faulty

    return everywhere("clip_factors", make)


def _divided_by_the_realised_batch() -> Any:
    """Before the noise: the sum is turned into a mean over those who happened to be there."""

    def make(old: Any) -> Any:
        def faulty(gradients: Any, weights: Any, is_padding: Any, bound: float) -> Any:
            size = jnp.maximum(1, jnp.sum(~is_padding))
            total = old(gradients, weights, is_padding, bound)
            with jax.enable_x64(True):
                return total * (5.0 / size.astype(jnp.float64))

        return faulty

    return patch(clipping, "clipped_sum", make)


def _update_divided_by_the_realised_batch() -> Any:
    """After the noise: the release is sound, the step gives the batch size away."""

    def make(old: Any) -> Any:
        def faulty(*args: Any, **options: Any) -> Engine:
            engine = old(*args, **options)

            def step(state: Any, eta: Any, records: Any, rows: Any, noise: Any) -> Any:
                after, info = engine.step(state, eta, records, rows, noise)
                factor = 2.0 / jnp.maximum(1, jnp.sum(rows != EMPTY))
                params = jax.tree.map(
                    lambda old, new: old + factor * (new - old), state.params, after.params
                )
                return after._replace(params=params), info

            return engine._replace(step=step)

        return faulty

    return patch(target, "make_engine", make)


@contextmanager
def _overflowing_sum() -> Iterator[None]:
    """Neither the pieces of a batch nor the blocks of a sum are small enough for the integers."""
    with (
        mock.patch.object(lattice, "_BLOCK_ROWS", 2**20),
        mock.patch.object(gradient, "microbatch_size", return_value=2**20),
    ):
        yield


def _sub_grid_bits() -> Any:
    def make(old: Any) -> Any:
        def faulty(encoded_sum: Any, noise: Any, grid: float) -> Any:
            with jax.enable_x64(True):
                return (encoded_sum + noise * grid).astype(jnp.float32)

        return faulty

    return patch(gradient, "add_noise", make)


# -- batches --------------------------------------------------------------------------------------


def _draw(make: Callable[[Any], Any]) -> Any:
    return patch(PoissonSampler, "draw", make)


def _everyone(old: Any) -> Any:
    def faulty(self: PoissonSampler, num_steps: int) -> np.ndarray:
        size = min(self._num_rows, self._max_batch_size)
        rows = np.full((num_steps, self._max_batch_size), EMPTY, np.int32)
        rows[:, :size] = np.arange(size)
        return rows

    return faulty


def _without_replacement(old: Any) -> Any:
    def faulty(self: PoissonSampler, num_steps: int) -> np.ndarray:
        size = max(1, round(self._num_rows * self._sampling_prob))
        order = np.argsort(self._gaps.random((num_steps, self._num_rows)), axis=1)
        rows = np.full((num_steps, self._max_batch_size), EMPTY, np.int32)
        rows[:, :size] = order[:, :size]
        return rows

    return faulty


def _twice_the_rate() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: PoissonSampler, *args: Any, **options: Any) -> None:
            options["sampling_prob"] *= 2
            old(self, *args, **options)

        return faulty

    return patch(PoissonSampler, "__init__", make)


def _cut_by_highest_index() -> Any:
    """Rows beyond the cap are dropped where they stand: always those with the highest numbers."""

    class NoShuffle:
        def permutation(self, count: int) -> np.ndarray:
            return np.arange(count)

    def make(old: Any) -> Any:
        def faulty(self: PoissonSampler, *args: Any, **options: Any) -> None:
            old(self, *args, **options)
            self._truncation = NoShuffle()  # type: ignore[assignment]

        return faulty

    return patch(PoissonSampler, "__init__", make)


# -- accountant and streams -----------------------------------------------------------------------


@contextmanager
def _wrong_relation() -> Iterator[None]:
    """One record replaced is charged as one removed."""

    def make(old: Any) -> Any:
        return lambda step, relation: old(step, Relation.ZERO_OUT)

    with _without_memory(), patch(accountant, "dominating_pairs", make):
        yield


@contextmanager
def _half_the_steps() -> Iterator[None]:
    def make(old: Any) -> Any:
        return lambda *, num_steps, **facts: old(num_steps=num_steps // 2, **facts)

    with (
        _without_memory(),
        patch(accounting, "dp_event", make),
        patch(calibration, "dp_event", make),
    ):
        yield


@contextmanager
def _without_memory() -> Iterator[None]:
    """Nothing the accountant said before is remembered, and nothing it says now will be."""
    _forget()
    try:
        with mock.patch.dict("os.environ", {"DPVIM_CACHE": "off"}):
            yield
    finally:
        _forget()


def _forget() -> None:
    for value in vars(accountant).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _one_stream_for_all() -> Any:
    return patch(SecretStreams, "_secret", lambda old: lambda self, purpose: 12345)


def _one_key_for_all_purposes() -> Any:
    """Batches and noise from one stream."""

    def make(old: Any) -> Any:
        def faulty(self: SecretStreams, purpose: str) -> int:
            self.__dict__.setdefault("_only_key", old(self, "everything"))
            return self.__dict__["_only_key"]

        return faulty

    return patch(SecretStreams, "_secret", make)


def _clip_norm_forgotten() -> Any:
    """Noise of the multiplier alone, for a threshold that is not one."""

    def make(old: Any) -> Any:
        def faulty(self: Any, streams: Any, *, stddev: float, grid: float, size: int) -> None:
            old(self, streams, stddev=stddev * 0.37, grid=grid, size=size)

        return faulty

    return patch(RoundedGaussianNoise, "__init__", make)


def _fits_share_a_stream() -> Any:
    """All fits of the step-by-step face are keyed alike."""
    return patch(svi, "SecretStreams", lambda old: lambda *_, **__: old(0))


FAULTS = [
    Fault("noise halved", _noise(lambda noise, _: noise / 2), "noise"),
    Fault("noise x 0.97", _noise(lambda noise, _: noise * 0.97), "noise"),
    Fault("no clip", _no_clip, "clip"),
    Fault("clip after the sum", _clip_after_the_sum, "clip"),
    Fault("clip to sqrt(2) C", _clip_to_root_two, "clip"),
    Fault(
        "noise reused between steps",
        _noise(lambda noise, _: np.repeat(noise[::2], 2, axis=0)[: len(noise)]),
        "noise",
    ),
    Fault(
        "one scalar broadcast to all coordinates",
        _noise(lambda noise, _: np.broadcast_to(noise[:, :1], noise.shape)),
        "noise",
    ),
    Fault("noise added twice with correlated sign", _noise(_leaning_on_the_step_before), "noise"),
    Fault("division by the realised batch", _divided_by_the_realised_batch, "clip"),
    Fault("update divided by the realised batch", _update_divided_by_the_realised_batch, "clip"),
    Fault("NaN row kept", _nan_rows_kept, "clip"),
    Fault("norm that overflows", _unsafe_norm, "clip"),
    Fault("no subsampling though accounted", lambda: _draw(_everyone), "batches"),
    Fault("sampling rate twice the declared one", _twice_the_rate, "batches"),
    Fault("truncation by highest index", _cut_by_highest_index, "batches"),
    Fault("sampling without replacement", lambda: _draw(_without_replacement), "batches"),
    Fault("wrong relation", _wrong_relation, "game"),
    Fault("half of the steps accounted", _half_the_steps, "game"),
    Fault("float32 noise with a short tail", _noise(_short_tailed), "noise"),
    Fault("sub-grid bits kept", _sub_grid_bits, "clip"),
    Fault("two fits with one stream", _one_stream_for_all, "noise"),
    Fault("fits of DPSVI with one stream", _fits_share_a_stream, "fits"),
    Fault("one key for all purposes", _one_key_for_all_purposes, "noise"),
    Fault("noise that forgets the clip norm", _clip_norm_forgotten, "noise"),
    Fault(
        "sum that overflows 32 bits",
        _overflowing_sum,
        "clip",
    ),
    *PATH_FAULTS,
    *PERSON_FAULTS,
    *PROCESS_FAULTS,
    *COUNT_FAULTS,
]
