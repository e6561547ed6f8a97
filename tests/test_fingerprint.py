"""Fingerprints of data: the same for the same data, and useless without their key."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pandas as pd

from dpvim.fingerprint import data_digest, file_digest, keyed_fingerprint

ROWS = np.arange(12.0).reshape(4, 3)
FRAME = pd.DataFrame({"age": [1, 2], "name": ["a", None]})


def test_how_data_lie_in_memory_does_not_matter():
    same = [ROWS, np.asfortranarray(ROWS), np.repeat(ROWS, 2, axis=0)[::2], ROWS.tolist()]
    digests = [data_digest(each) for each in same[:3]]
    assert len(set(digests)) == 1
    assert data_digest(jnp.arange(3)) == data_digest(np.arange(3, dtype=np.int32))
    assert data_digest(FRAME) == data_digest(FRAME.copy())


def test_everything_else_does():
    others = [
        (ROWS,),
        (ROWS[::-1],),
        (ROWS.T,),
        (ROWS.reshape(3, 4),),
        (ROWS.astype("f4"),),
        (ROWS, ROWS),
        ([ROWS, ROWS],),
        ({"x": ROWS},),
        ({"y": ROWS},),
        (ROWS.tolist(),),
        (np.nextafter(ROWS, 99),),
        (-0.0,),
        (0.0,),
        (0,),
        (False,),
        (None,),
        ("0",),
        (b"0",),
        ("ab", "c"),
        ("a", "bc"),
        (FRAME,),
        (FRAME.assign(age=[1, 3]),),
        (FRAME.assign(name=["a", "None"]),),
        (FRAME.rename(columns={"age": "years"}),),
        (FRAME[["name", "age"]],),
        (FRAME.iloc[::-1],),
        (np.array(["a", "b"]),),
        (np.array(["a", "b"], object),),
        (),
    ]
    assert len({data_digest(*each) for each in others}) == len(others)


def test_large_arrays_are_read_to_the_end():
    large = np.zeros(3 * 2**18 + 1)
    changed = large.copy()
    changed[-1] = 1
    assert data_digest(large) != data_digest(changed)


def test_files_are_what_they_hold(tmp_path):
    for name, content in {"a": "x", "b": "x", "c": "y"}.items():
        (tmp_path / name).write_text(content)
    a, b, c = (file_digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_without_the_key_nothing_is_learnt():
    digest = data_digest(ROWS)
    one, other = (keyed_fingerprint(key, digest) for key in (b"one", b"other"))
    assert one == keyed_fingerprint(b"one", digest)
    assert one != other
    assert keyed_fingerprint(b"one", data_digest(ROWS + 1)) != one
    assert digest.hex() not in (one, other)
