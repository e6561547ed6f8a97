"""A step over several processes: clipped sums meet in process 0, which draws the noise.

Every process clips and sums the rows of its shard. Sums are whole multiples of one quantum, so they
add up to what one process would have summed, in any order. Process 0 adds them up and sends the
total to all, as it sends them its noise before every chunk of steps. From there on all compute the
same: the same release, and what is made of it.

Why all of them, and not one that sends the release: a program that has the release from elsewhere
is compiled another way than one that computes it, and rounds the next parameters otherwise. One
that has nothing but the sum from elsewhere is not. So sums meet on the host, and not in a
collective of XLA's, whose programs for several devices are others (docs/processes.md).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, UInt

from dpvim.channel import Channel
from dpvim.privacy.shards import Shard
from dpvim.types import Latent, LostProcessError

_POINT = struct.Struct("<I")

Tree = TypeVar("Tree")


class Sharing:
    """One process of several, with its shard and its connections.

    Guarantees:
        Sums are added that were taken at the same point, to the last bit; else the run ends. The
        sum of each process is added once, and the noise is that of process 0, in all processes.
    """

    def __init__(self, shard: Shard, channel: Channel) -> None:
        self.shard, self.channel = shard, channel
        self._error: BaseException | None = None

    def meet(self, point: Latent, share: Float[Array, " d"]) -> Float[Array, " d"]:
        """The clipped sum of all shards; private.

        Args:
            point: Where gradients were taken.
            share: The clipped sum of this shard, in double precision; private.
        """
        words = jax.ShapeDtypeStruct((share.size, 2), jnp.uint32)
        words = io_callback(self._meet, words, point, _words_of(share))
        with jax.enable_x64(True):
            return jax.lax.bitcast_convert_type(words, jnp.float64)

    def chunk(self, program: Callable[..., Tree]) -> Callable[..., Tree]:
        """A chunk of steps with the noise of process 0.

        If processes do not meet in one of them it raises why, and what it computed is lost.
        """

        def call(state: Any, *, noise: np.ndarray, bounds: np.ndarray, **arrays: Any) -> Tree:
            sent = self.channel.share(noise[: bounds[-1]].tobytes())
            noise = np.zeros_like(noise)
            noise[: bounds[-1]] = np.frombuffer(sent, np.int32).reshape(-1, noise.shape[1])
            done = jax.block_until_ready(program(state, noise=noise, bounds=bounds, **arrays))
            if self._error is not None:
                raise self._error
            return done

        return call

    def _meet(self, point: Any, share: Any) -> np.ndarray:
        point, share = np.asarray(point), np.asarray(share)
        if self._error is None:
            # An error would reach the caller as a text, and the screen as a traceback.
            try:
                message = _POINT.pack(zlib.crc32(point.tobytes())) + share.tobytes()
                shares = self.channel.gather(message)
                found = self.channel.share(_sum_of(shares).tobytes() if shares else b"")
                return np.frombuffer(found, np.uint32).reshape(share.shape)
            except BaseException as error:
                self._error = error
        return np.zeros_like(share)


def _sum_of(shares: list[bytes]) -> Float[np.ndarray, " d"]:
    """The sum of what the processes sent: where they are, and their clipped sums."""
    points = [each[: _POINT.size] for each in shares]
    for number, point in enumerate(points):
        if point != points[0]:
            raise LostProcessError(
                f"processes 0 and {number} came to different numbers from the same releases. "
                "Machines of a run have to be of one kind, with the same versions of all packages."
            )
    return np.sum([np.frombuffer(each, np.float64, offset=_POINT.size) for each in shares], axis=0)


def _words_of(total: Float[Array, " d"]) -> UInt[Array, "d 2"]:
    """Double precision as integers: JAX would hand it to the host in single precision."""
    with jax.enable_x64(True):
        return jax.lax.bitcast_convert_type(total.astype(jnp.float64), jnp.uint32)
