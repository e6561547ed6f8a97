"""The random numbers that protect privacy: a cryptographic generator on the host.

Batch membership and noise come from AES-128 in counter mode under NumPy's `Generator`. Key and
first counter are 256 bits from the operating system, others for each purpose. (Processors have
instructions for AES: a normal takes half as long as with ChaCha20.) What does not protect privacy
(the draws eta, initial values, posterior draws) comes from `jax.random`.
"""

from __future__ import annotations

import hashlib
import secrets

import jax
import numpy as np
from randomgen import AESCounter


class SecretStreams:
    """Hands out independent cryptographic generators, one for each named purpose.

    Args:
        seed: For tests and experiments only: keys and counters are then derived from it by
            SHA-256, and whoever knows it can take the noise away.
        start_step: Where the run starts. A continued run derives other keys, so that no noise is
            ever used twice.
        run: Number of the run among those of one seed; every run derives keys of its own.

    Guarantees:
        Without a seed every generator has a fresh key and first counter from the operating system,
        128 bits each, which exist nowhere but in the generator.
    """

    def __init__(self, seed: int | None = None, *, start_step: int = 0, run: int = 0) -> None:
        self._seed = seed
        self._place = f"{start_step}/{run}"

    def generator(self, purpose: str) -> np.random.Generator:
        counter, key = divmod(self._secret(purpose), 2**128)
        return np.random.Generator(AESCounter(key=key, counter=counter))

    def _secret(self, purpose: str) -> int:
        """256 bits."""
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
