from __future__ import annotations

import numpy as np
from randomgen import ChaCha

from dpvim.randomness import SecretStreams, fresh_key


def first(streams, purpose):
    return streams.generator(purpose).standard_normal(8)


def test_chacha20_known_answer():
    """The generator is ChaCha20: keystream of the all-zero key and counter (RFC 8439, A.1 #1)."""
    words = ChaCha(key=0, rounds=20).random_raw(8)
    stream = np.asarray(words, dtype="<u8").tobytes().hex()
    assert stream.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


def test_streams_are_chacha20():
    for streams in (SecretStreams(), SecretStreams(1)):
        source = streams.generator("noise").bit_generator
        assert isinstance(source, ChaCha)
        assert source.state["state"]["rounds"] == 20


def test_unseeded_streams_are_all_different():
    draws = [first(SecretStreams(), "noise") for _ in range(20)]
    assert len({draw.tobytes() for draw in draws}) == 20


def test_every_unseeded_generator_has_a_key_of_its_own(monkeypatch):
    keys = []

    def spy(*, key, rounds):
        keys.append(key)
        return ChaCha(key=key, rounds=rounds)

    monkeypatch.setattr("dpvim.randomness.ChaCha", spy)
    streams = SecretStreams()
    for purpose in ("membership", "truncation", "noise"):
        streams.generator(purpose)
    assert len(set(keys)) == 3
    assert all(key.bit_length() > 200 for key in keys)  # 256 random bits; 1 in 2^56 is shorter


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
