"""Fingerprints: the same data have one, others another, and without the key they are noise."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from ledgers import lines_of, make_ledger

from dpvim.bridge.data import prepare
from dpvim.ledger.entries import LedgerError
from dpvim.ledger.fingerprint import Key, digest_of, key_path, make_key, read_key

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)), RNG.integers(0, 2, 20)


@pytest.mark.parametrize(
    "same",
    [
        (jnp.asarray(X), Y),
        (X.astype(np.float32), Y.astype(np.int8)),
        {"X": X, "y": Y},
        [np.asfortranarray(X), [Y]],
        prepare((X,), {"y": Y}).records,
        prepare((X, Y, 3.0, "constant"), {}).records,
    ],
    ids=["jax", "types", "dict", "nested", "keyword", "constants"],
)
def test_the_same_arrays_in_another_dress_have_the_same_digest(same):
    assert digest_of(same) == digest_of((X, Y))


@pytest.mark.parametrize(
    "other",
    [(X + 1e-3, Y), (X[::-1], Y), (X.T, Y), (X.reshape(30, 2), Y), (Y, X), (X,), (X, Y == 1)],
    ids=["values", "order", "transposed", "shape", "swapped", "fewer", "type"],
)
def test_other_arrays_have_another_digest(other):
    assert digest_of(other) != digest_of((X, Y))


def test_tables_are_known_by_their_columns():
    table = pd.DataFrame({"a": [1.0, None], "b": ["x", None], "c": pd.Categorical(["u", "v"])})
    assert digest_of(table) == digest_of(table.copy())
    others = [table.rename(columns={"a": "d"}), table[["b", "a", "c"]], table.assign(b=["x", "y"])]
    others += [table.iloc[:1], table.assign(b=["x", "None"]), table.assign(b=["xN", "one"])]
    digests = {digest_of(each) for each in [table, *others]}
    assert len(digests) == 1 + len(others)


def test_files_are_known_by_their_bytes(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, content in zip(paths, [b"1,2\n", b"1,2\n", b"1,3\n"], strict=True):
        path.write_bytes(content)
    first, again, other = (digest_of(path) for path in paths)
    assert first == again == digest_of(str(paths[0]))
    assert first != other


def test_another_key_gives_another_fingerprint():
    digest = digest_of(X)
    keys = [Key(bytes([i]) * 32) for i in range(2)]
    assert keys[0].fingerprint(digest) != keys[1].fingerprint(digest)
    assert keys[0].fingerprint(digest) == Key(bytes(32)).fingerprint(digest)
    assert "0000" not in repr(keys[0])


def test_the_ledger_holds_neither_key_nor_digest(tmp_path):
    """Who has the ledger alone cannot try a guess: two ledgers of one data set look unrelated."""
    (tmp_path / "other").mkdir()
    ledgers = [make_ledger(tmp_path, data=X), make_ledger(tmp_path / "other", data=X)]
    texts = [b"".join(lines_of(ledger)) for ledger in ledgers]
    for ledger, text in zip(ledgers, texts, strict=True):
        assert key_path(ledger.path).read_bytes().strip() not in text
        assert digest_of(X).hex().encode() not in text
    bound = [ledger.entries[1] for ledger in ledgers]
    assert bound[0].fingerprint != bound[1].fingerprint


def test_keys_are_kept_and_what_is_no_key_is_refused(tmp_path):
    ledger = tmp_path / "a.ledger"
    assert read_key(ledger) is None
    made, found = make_key(ledger), read_key(ledger)
    assert found is not None
    assert found.name == made.name
    for content in ("not hex", "abcd"):
        key_path(ledger).write_text(content)
        with pytest.raises(LedgerError, match="expected a key"):
            read_key(ledger)
