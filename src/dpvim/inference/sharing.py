"""A step over several processes: clipped sums meet in process 0, and the release goes to all.

Every process clips and sums the rows of its shard. Sums are whole multiples of one quantum, so they
add up to what one process would have summed, in any order. Process 0 adds the noise, once; what it
sends to the others is the release, never a sum without noise. From there on all of them compute the
same.

The sums meet on the host, between the clipped sum and the noise, and not in a collective of XLA's:
a program for several devices is compiled another way, and rounds otherwise.
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
        sum of all shards is in process 0 alone, and leaves it with noise.
    """

    def __init__(self, shard: Shard, channel: Channel) -> None:
        self.shard, self.channel = shard, channel
        self._error: BaseException | None = None

    def release(
        self,
        point: Latent,
        share: Float[Array, " d"],
        noised: Callable[[Float[Array, " d"]], Float[Array, " r"]],
        num_released: int,
    ) -> Float[Array, " r"]:
        """The release of a step, in all processes.

        Args:
            point: Where gradients were taken.
            share: The clipped sum of this shard, in double precision; private.
            noised: Encodes a sum and adds the noise; used in process 0.
            num_released: Length of a release.
        """
        words = jax.ShapeDtypeStruct((share.size, 2), jnp.uint32)
        released = jax.ShapeDtypeStruct((num_released,), jnp.float32)
        if not self.channel.leads:
            return io_callback(self._guarded(self._exchange), released, point, _words_of(share))
        total = io_callback(self._guarded(self._collect), words, point, _words_of(share))
        return io_callback(self._guarded(self._publish), released, noised(_double_of(total)))

    def watching(self, program: Callable[..., Tree]) -> Callable[..., Tree]:
        """A program that ends with the error that its steps ended with.

        XLA hands on the text of an error alone.
        """

        def call(*args: Any, **kwargs: Any) -> Tree:
            try:
                return jax.block_until_ready(program(*args, **kwargs))
            except Exception as error:
                raise (self._error or error) from None

        return call

    def _exchange(self, point: np.ndarray, share: np.ndarray) -> np.ndarray:
        self.channel.gather(_message(point, share))
        return np.frombuffer(self.channel.share(), np.float32)

    def _collect(self, point: np.ndarray, share: np.ndarray) -> np.ndarray:
        shares = self.channel.gather(_message(point, share))
        apart = [i for i, each in enumerate(shares) if each[: _POINT.size] != shares[0][: _POINT.size]]
        if apart:
            raise LostProcessError(
                f"processes 0 and {apart[0]} came to different numbers from the same releases. "
                "Machines of a run have to be of one kind, with the same versions of all packages."
            )
        total = np.zeros(len(share))
        for each in shares:
            total += np.frombuffer(each, np.float64, offset=_POINT.size)
        return total.view(np.uint32).reshape(share.shape)

    def _publish(self, release: np.ndarray) -> np.ndarray:
        self.channel.share(release.tobytes())
        return release

    def _guarded(self, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        """Remember the error of a function that a program calls."""

        def call(*arrays: Any) -> np.ndarray:
            try:
                return function(*map(np.asarray, arrays))
            except BaseException as error:
                self._error = error
                raise

        return call


def _message(point: np.ndarray, share: np.ndarray) -> bytes:
    return _POINT.pack(zlib.crc32(point.tobytes())) + share.tobytes()


def _words_of(total: Float[Array, " d"]) -> UInt[Array, "d 2"]:
    """Double precision as integers: JAX would hand it to the host in single precision."""
    with jax.enable_x64(True):
        return jax.lax.bitcast_convert_type(total.astype(jnp.float64), jnp.uint32)


def _double_of(words: UInt[Array, "d 2"]) -> Float[Array, " d"]:
    with jax.enable_x64(True):
        return jax.lax.bitcast_convert_type(words, jnp.float64)
