from __future__ import annotations

import numpy as np
import pytest
from randomgen import AESCounter

from dpvim.privacy.randomness import SecretStreams, fresh_key


def first(streams, purpose):
    return streams.generator(purpose).standard_normal(8)


def blocks_of(key, counter, count):
    """So many blocks of the generator's output, in hexadecimal numbers."""
    words = AESCounter(key=_number(key), counter=_number(counter)).random_raw(2 * count)
    stream = np.asarray(words, dtype="<u8").tobytes().hex()
    return [stream[32 * i : 32 * (i + 1)] for i in range(count)]


def _number(block):
    return int.from_bytes(bytes.fromhex(block), "little")


def test_aes_known_answers():
    """The generator is AES-128: the example of FIPS 197, appendix C.1, and a key of zeros."""
    (block,) = blocks_of("000102030405060708090a0b0c0d0e0f", "00112233445566778899aabbccddeeff", 1)
    assert block == "69c4e0d86a7b0430d8cdb78070b4c55a"
    (block,) = blocks_of("00" * 16, "00" * 16, 1)
    assert block == "66e94bd4ef8a2c3b884cfa59ca342b2e"


def test_every_block_has_a_counter_of_its_own():
    """All 128 bits of it count, across the carry in the middle and back to zero at the end."""
    key = "2b7e151628aed2a6abf7158809cf4f3c"
    for first in (0, 2**64 - 3, 2**128 - 3):
        counters = [((first + i) % 2**128).to_bytes(16, "little").hex() for i in range(9)]
        one_by_one = [blocks_of(key, counter, 1)[0] for counter in counters]
        assert blocks_of(key, counters[0], 9) == one_by_one
        assert len(set(one_by_one)) == 9


def test_streams_are_aes():
    for streams in (SecretStreams(), SecretStreams(1)):
        assert isinstance(streams.generator("noise").bit_generator, AESCounter)


def test_unseeded_streams_are_all_different():
    draws = [first(SecretStreams(), "noise") for _ in range(20)]
    assert len({draw.tobytes() for draw in draws}) == 20


@pytest.mark.parametrize("seed", [None, 1])
def test_every_generator_has_key_and_counter_of_its_own(monkeypatch, seed):
    secrets = []

    def spy(*, key, counter):
        secrets.extend([key, counter])
        return AESCounter(key=key, counter=counter)

    monkeypatch.setattr("dpvim.privacy.randomness.AESCounter", spy)
    streams = SecretStreams(seed)
    for purpose in ("membership", "truncation", "noise"):
        streams.generator(purpose)
    assert len(set(secrets)) == 6
    # 128 random bits; 1 in 2^56 is shorter
    assert all(72 < number.bit_length() <= 128 for number in secrets)


def test_purposes_seeds_and_starts_have_streams_of_their_own():
    draws = [
        first(SecretStreams(seed, start_step=start), purpose)
        for seed in (1, 2)
        for start in (0, 500)
        for purpose in ("noise", "membership", "truncation")
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_a_seed_repeats():
    np.testing.assert_array_equal(
        first(SecretStreams(3), "noise"), first(SecretStreams(3), "noise")
    )


def test_nothing_secret_in_the_repr():
    assert "12345" not in repr(SecretStreams(12345))


def test_fresh_keys_differ():
    assert fresh_key() != fresh_key()
