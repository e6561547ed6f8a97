"""The random numbers that protect privacy: a cryptographic generator on the host.

Batch membership and noise come from AES-128 in counter mode under NumPy's `Generator`. Key and
first counter are 256 bits from the operating system, others for each purpose. (Processors have
instructions for AES: a normal takes half as long as with ChaCha20.) What does not protect privacy
(the draws eta, initial values, posterior draws) comes from `jax.random`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import jax
import numpy as np
from randomgen import AESCounter

SECRET_BYTES = 32


class SecretStreams:
    """Hands out independent cryptographic generators, one for each named purpose.

    Args:
        seed: For tests and experiments only: keys and counters are then derived from it by
            SHA-256, and whoever knows it can take the noise away.
        start_step: Where the run starts. A continued run derives other keys, so that no noise is
            ever used twice.
        run: Number of the run among those of one seed; every run derives keys of its own.
        secret: 256 bits from the operating system, of a run that is continued after a crash: it
            must go on with the very same noise. Whoever keeps it keeps it secret.

    Guarantees:
        Without a seed every generator has a fresh key and first counter from the operating system,
        128 bits each, which exist nowhere but in the generator; with a secret they are derived
        from it by HMAC-SHA256, and exist wherever it does.
    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        start_step: int = 0,
        run: int = 0,
        secret: bytes | None = None,
    ) -> None:
        if secret is not None and (seed is not None or len(secret) != SECRET_BYTES):
            raise ValueError(f"secret: expected {SECRET_BYTES} bytes, and no seed beside them.")
        self._seed, self._root = seed, secret
        self._place = f"{start_step}/{run}"

    def generator(self, purpose: str) -> np.random.Generator:
        counter, key = divmod(self._secret(purpose), 2**128)
        return np.random.Generator(AESCounter(key=key, counter=counter))

    def _secret(self, purpose: str) -> int:
        """256 bits."""
        if self._root is not None:
            text = f"dpvim/{purpose}/{self._place}".encode()
            return int.from_bytes(hmac.digest(self._root, text, "sha256"), "little")
        if self._seed is None:
            return secrets.randbits(256)
        text = f"dpvim/{purpose}/{self._place}/{self._seed}".encode()
        return int.from_bytes(hashlib.sha256(text).digest(), "little")

    def __repr__(self) -> str:
        return f"SecretStreams(seeded={self._seed is not None})"


def position_of(generator: np.random.Generator) -> np.ndarray:
    """Position of a generator in its stream, without its key. Secret: what comes next is in it."""
    state = generator.bit_generator.state
    inner: Any = state["s"]
    single: list[Any] = [inner["offset"], state["has_uint32"], state["uinteger"]]
    return np.concatenate(
        [inner["counter"], inner["state"].view(np.uint64), np.array(single, np.uint64)]
    )


def move_to(generator: np.random.Generator, position: np.ndarray) -> None:
    """Move a generator to a position that one with the same key had."""
    state: Any = generator.bit_generator.state
    inner = state["s"]
    counters, words = len(inner["counter"]), len(inner["state"]) // 8
    if position.shape != (counters + words + 3,) or position.dtype != np.uint64:
        raise ValueError("no position of a generator")
    inner["counter"] = position[:counters].copy()
    inner["state"] = position[counters : counters + words].view(np.uint8).copy()
    inner["offset"], state["has_uint32"], state["uinteger"] = map(int, position[-3:])
    generator.bit_generator.state = state


def fresh_key() -> jax.Array:
    """A key for `jax.random` from the operating system: for draws that protect no privacy."""
    words = np.frombuffer(secrets.token_bytes(8), dtype=np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words))
