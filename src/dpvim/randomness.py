"""The random numbers that protect privacy: a cryptographic generator on the host.

Batch membership and noise come from ChaCha20 under NumPy's `Generator`, keyed with 256 bits from
the operating system, one key for each purpose. What does not protect privacy (the draws eta,
initial values, posterior draws) comes from `jax.random`.
"""

from __future__ import annotations

import hashlib
import secrets

import jax
import numpy as np
from randomgen import ChaCha


class SecretStreams:
    """Hands out independent cryptographic generators, one for each named purpose.

    Args:
        seed: For tests and experiments only: keys are then derived from it by SHA-256, and
            whoever knows it can take the noise away.
        start_step: Where the run starts. A continued run derives other keys, so that no noise is
            ever used twice.
        run: Number of the run among those of one seed; every run derives keys of its own.

    Guarantees:
        Without a seed every generator has a fresh 256-bit key from the operating system, which
        exists nowhere but in the generator.
    """

    def __init__(self, seed: int | None = None, *, start_step: int = 0, run: int = 0) -> None:
        self._seed = seed
        self._place = f"{start_step}/{run}"

    def generator(self, purpose: str) -> np.random.Generator:
        return np.random.Generator(ChaCha(key=self._key(purpose), rounds=20))

    def _key(self, purpose: str) -> int:
        if self._seed is None:
            return secrets.randbits(256)
        text = f"dpvim/{purpose}/{self._place}/{self._seed}".encode()
        return int.from_bytes(hashlib.sha256(text).digest(), "little")

    def __repr__(self) -> str:
        return f"SecretStreams(seeded={self._seed is not None})"


def fresh_key() -> jax.Array:
    """A key for `jax.random` from the operating system: for draws that protect no privacy."""
    words = np.frombuffer(secrets.token_bytes(8), dtype=np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words))
