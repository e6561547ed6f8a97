"""Doors for files: every reader, with strategies of files that are broken or hostile."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import whole_files
from fuzz_harness import Harness, expect
from hostile_values import (
    VALUES,
    archives,
    bomb,
    damaged,
    damaged_text,
    json_text,
    read_archive,
    trees,
    zipped,
)
from hypothesis import strategies as st

import dpvim
from dpvim import checkpoints
from dpvim.ledger import chain
from dpvim.ledger.book import Ledger
from dpvim.privacy.statement import PrivacyStatement
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_pieces, read_table
from dpvim.synthesis.twin import Twin

_SCRATCH = Path(tempfile.mkdtemp(prefix="dpvim-fuzz-"))


def _clean() -> Path:
    """An empty folder; the same for every case, so that its name does not change."""
    folder = _SCRATCH / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _put(files: dict[str, bytes]) -> Path:
    folder = _clean()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def _one_damaged(base: dict[str, bytes], strategies: dict[str, Any]) -> Any:
    """A folder of files of which one is damaged by its strategy, or absent."""

    def of(name: str) -> Any:
        gone = {n: c for n, c in base.items() if n != name}
        return strategies[name].map(lambda content: {**base, name: content}) | st.just(gone)

    return st.one_of([of(name) for name in strategies])


# -- fits and twins -------------------------------------------------------------------------------


def _check_privacy(privacy: Any) -> None:
    """A statement that was believed costs at least what its plan costs."""
    str(privacy), json.dumps(privacy.to_dict(), allow_nan=privacy.epsilon == math.inf)
    if isinstance(privacy, PrivacyStatement):
        cost = 0.0
        if privacy.steps_done:
            cost = privacy.plan.with_steps(privacy.steps_done).epsilon(privacy.delta)
        expect(privacy.epsilon >= cost, f"epsilon {privacy.epsilon} is less than {cost}")
        expect(isinstance(privacy.released, str), "what was released is no text")


def _load_fit(content: bytes) -> None:
    fit = dpvim.load(_put({"fit.npz": content}) / "fit.npz")
    _check_privacy(fit.privacy)
    repr(fit)
    done = getattr(fit.privacy, "steps_done", math.inf)
    expect(fit.trace.steps[-1] <= done, "the trace has steps that are not accounted for")
    expect(isinstance(fit.space.dim, int), "the latent has no size")


def _load_twin(files: dict[str, bytes]) -> None:
    twin = Twin.load(_put(files), model=lambda **_: None)
    _check_privacy(twin.privacy)
    expect(twin.num_rows >= 1, "the twin has no rows")
    stated = json.loads(files["privacy.json"])
    if "epsilon" in stated or twin.privacy.epsilon < math.inf:
        expect(stated["epsilon"] >= 0.999 * twin.privacy.epsilon, "it claims less than it cost")
    twin.schema.to_toml()


def _of_twin(base: dict[str, bytes]) -> Any:
    strategies = {
        "posterior.npz": archives(base["posterior.npz"]),
        "schema.toml": _schemas(),
    }
    for name in ("twin.json", "privacy.json"):
        text = base[name].decode()
        strategies[name] = trees(json.loads(text)).map(json_text).map(
            lambda text: text.encode("utf-8", "surrogatepass")
        ) | damaged_text(text)
    return _one_damaged(base, strategies)


# -- schemas --------------------------------------------------------------------------------------

_TOML_VALUES = (
    *("0", "-1", "1.5", "nan", "inf", "-inf", "1e400", "true", '""', '"a"', "[]", "{}", "[[]]"),
    *("0x" + "f" * 5000, "9" * 5000, "9" * 400, '"' + "x" * 100_000 + '"', "{a = {b = 1}}"),
    *("[" * 5000 + "]" * 5000, "{a=" * 3000 + "1" + "}" * 3000, "2020-13-45", "0000-01-01"),
    *("9999-12-31", "07:32:00", "1979-05-27T07:32:00Z", '"\\u0000"', '"0001-01-01"', '"%Y"'),
    *('["a", "a"]', '["a", 1]', "[1, 2]", "[true, false]", '[""]', '["NA"]', '"2020-02-30"'),
)


@st.composite
def _schemas(draw: Any) -> bytes:
    """A schema with a value replaced, a line doubled or removed, or bytes damaged."""
    text = whole_files.SCHEMA
    deed = draw(st.sampled_from(["value", "value", "value", "line", "bytes", "key"]))
    if deed == "bytes":
        return draw(damaged_text(text))
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, value = lines[at].partition(" = ")
        if deed == "value" and equals:
            lines[at] = f"{key} = {draw(st.sampled_from(_TOML_VALUES))}"
        elif deed == "key" and equals:
            new = draw(st.sampled_from(["name", "kind", "a.b", ".".join("a" * 3000), '""', "x"]))
            lines[at] = f"{new} = {value}"
        elif draw(st.booleans()):
            del lines[at]
            lines = lines or [""]
        else:
            lines.insert(at, lines[at])
    return "\n".join(lines).encode()


def _load_schema(content: bytes) -> None:
    folder = _put({"schema.toml": content})
    schema = Schema.load(folder / "schema.toml")
    schema.save(folder / "again.toml")
    expect(Schema.load(folder / "again.toml") == schema, "it is another schema when it is saved")


_WORDS = (
    *("age", "visits", "sex", "code", "seen", "dose", "Q('age')", "Q(1)", "'f'", "'01'", "20"),
    *("-1", "1e999", "9" * 400, "0x" + "f" * 900, "nan", "None", "True", "'2021-01-01'", "1j"),
    *("b'x'", "'\ud800'", "'\x00'", "lambda: 1", "__import__('os')", "f'{age}'", "...", "x"),
    *("[1, 2]", "['f']", "[]", "(1, 'a')", "{}", "age[0]", "age.real", "(" * 90 + "1" + ")" * 90),
)
_JOINTS = (
    "==",
    "!=",
    "<",
    ">=",
    "in",
    "not in",
    "and",
    "or",
    "not",
    "+",
    "-",
    "*",
    "is",
    ":=",
    ",",
)


@st.composite
def _constraints(draw: Any) -> str:
    """Words of the grammar, and of Python outside of it, in any order."""
    if draw(st.booleans()):  # two sides that may go together
        return " ".join(draw(st.sampled_from(w)) for w in (_WORDS, _JOINTS[:6], _WORDS))
    words = [draw(st.sampled_from(_WORDS))]
    for _ in range(draw(st.integers(0, 5))):
        words += [draw(st.sampled_from(_JOINTS)), draw(st.sampled_from(_WORDS))]
    text = " ".join(words)
    return draw(st.sampled_from([text, text, text, "not " * 200 + text, text + "\n" + text]))


def _obey(text: str) -> None:
    schema = whole_files.schema()
    declared = Schema(schema.columns, schema.missing, "schema", (text,))
    values = {column.name: np.zeros(3, int) for column in schema.columns}
    held = declared.rules[0].holds(values, {"code": np.zeros(3, bool)})
    expect(held.shape == (3,) and held.dtype == bool, "it marks no rows")


_DATES = ("2020-01-01", "0001-01-01", "9999-12-31", "10000-01-01", "2020-02-30", "2020", "", "\x00")
_FORMATS = ("%Y-%m-%d", "%d.%m.%y", "%Y", "%", "%%", "%Q", "%Y%Y%m%d", "%H", "(%Y[", "%Y\\", "é%Y")


def _date_column(entry: dict[str, Any]) -> None:
    column = {"name": "seen", "kind": "date", "reviewed": True, **entry}
    schema = Schema.from_dict({"dpvim_schema": 1, "columns": [column]})
    (made,) = schema.columns
    lower, upper = made.bounds
    expect(lower < upper, "its bounds are in no order")
    made.text(lower), made.text(upper), schema.dates


_dates = st.fixed_dictionaries(
    {
        "lower": st.sampled_from(_DATES) | st.sampled_from([*_DATES, *VALUES]),
        "upper": st.sampled_from([*_DATES, *VALUES]) | st.dates() | st.just("9999-12-31"),
    },
    optional={
        "resolution": st.sampled_from(["year", "month", "day", "hour", "second", "week", 1, []]),
        "format": st.sampled_from([*_FORMATS, *VALUES]),
        "not_a_number": st.sampled_from([*_DATES, *VALUES]),
        "outside": st.sampled_from(["clamp", "missing", 1, None]),
    },
)


# -- ledgers --------------------------------------------------------------------------------------


@st.composite
def _ledgers(draw: Any) -> dict[str, bytes]:
    """A ledger with damaged bytes; or one whose hashes are right and whose entries are not."""
    base = whole_files.ledger()
    deed = draw(st.sampled_from(["bytes", "head", "key", "entries", "entries", "entries", "move"]))
    name = {"head": "a.ledger.head", "key": "a.ledger.key"}.get(deed, "a.ledger")
    if deed == "head" and draw(st.booleans()):
        text = json_text(draw(trees(json.loads(base[name]))))
        return {**base, name: text.encode()}
    if deed in ("bytes", "head", "key"):
        gone = {n: c for n, c in base.items() if n != name}
        return {**base, name: draw(damaged(base[name]))} if draw(st.integers(0, 9)) else gone
    lines = base["a.ledger"].decode().splitlines()
    fields = [json.loads(line) for line in lines]
    fields = [{k: v for k, v in f.items() if k not in ("after", "hash")} for f in fields]
    if deed == "move":
        fields = draw(st.permutations([*fields, fields[-1]]))
    else:
        at = draw(st.integers(0, len(fields) - 1))
        fields[at] = draw(trees(fields[at]))
    last, text = chain.START, ""
    for each in fields:
        body = json_text(each)
        line = chain.linked(body if body.endswith("}") else "{}", last)
        last = line[-66:-2]
        text += line + "\n"
    head = json.dumps({"entries": len(fields), "hash": last})
    return {**base, "a.ledger": text.encode(), "a.ledger.head": head.encode()}


def _use_ledger(files: dict[str, bytes]) -> None:
    path = _put(files) / "a.ledger"
    ledger = Ledger(path)
    problems = ledger.check()
    expect(not problems, f"it has problems: {problems}")
    repr(ledger), ledger.entries, ledger.name
    spent = ledger.spent()
    alone = [each.price.epsilon(ledger.delta) for each in ledger.releases if each.price]
    expect(spent >= max(alone, default=0.0), "the total is less than that of one release")
    ledger.left()
    before = len(ledger.releases)
    ledger.book(whole_files.PLAN.with_steps(1), purpose="one more", data=np.arange(3.0))
    expect(len(Ledger(path).releases) == before + 1, "what is booked is not there")


# -- checkpoints ----------------------------------------------------------------------------------


def _continue_run(case: tuple[str, Any]) -> None:
    """Facts of the run are changed in the file that it began with (a copy is refused for its
    place), or its progress is another one."""
    what, change = case
    folder = _clean() / "run"
    with checkpoints.opened(folder, whole_files.QUESTION, whole_files.DIGEST) as made:
        made.save({"step": np.arange(4)})
    if what == "facts":
        facts = {**made._facts, "format": checkpoints.FORMAT, "version": checkpoints.VERSION}
        facts |= {name: value for name, value in change.items() if value != _GONE}
        facts = {name: value for name, value in facts.items() if change.get(name) != _GONE}
        content = zipped([("meta.json", json_text(facts).encode())])
        _overwrite(folder / checkpoints.BEGIN, content)
    else:
        id = json.loads(read_archive(whole_files.checkpoint_archive())["meta.json"])["id"]
        meta = {**made._facts, "id": id, "format": checkpoints.FORMAT, "version": 1}
        _overwrite(folder / checkpoints.BEGIN, zipped([("meta.json", json.dumps(meta).encode())]))
        _overwrite(folder / what, change)
    with checkpoints.opened(folder, whole_files.QUESTION, whole_files.DIGEST) as found:
        arrays = found.load()
        found.streams(), repr(found)
        expect(isinstance(found.start, int), "it has no start")
        expect(arrays is None or all(isinstance(a, np.ndarray) for a in arrays.values()), "arrays")


_GONE = "@gone@"
_FACTS = ("id", "question", "data_key", "data", "start", "secret", "place", "format", "version")


def _overwrite(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(content)


def _of_checkpoint() -> Any:
    odd = st.sampled_from([*VALUES, _GONE, "0" * 64, {"path": 1}, {"plan": 1}])
    facts = st.dictionaries(st.sampled_from(_FACTS), odd, min_size=1, max_size=2)
    archive = archives(whole_files.checkpoint_archive())
    return st.one_of(
        st.tuples(st.just("facts"), facts),
        st.tuples(st.just(checkpoints.STATE), archive),
        st.tuples(st.just(checkpoints.BEGIN), archive),
    )


def _read_result(content: bytes) -> None:
    folder = _put({checkpoints.RESULT: content})
    with checkpoints.opened(folder, whole_files.QUESTION, whole_files.DIGEST) as found:
        expect(isinstance(found.load(), dict), "it has no result")
        expect(isinstance(found.start, int) and found.id, "it has no id")


# -- tables ---------------------------------------------------------------------------------------

_NASTY_ROWS = (
    *("", ",", ",,,,,,", '"', '"a', 'a"b', '""', "\x00", "a\x00b", "x" * 200_000, "\r", "\r\r\n"),
    *("f,01,3,1,2.5,01.02.2021", "f,01,3,1,2.5", "f,01,3,1,2.5,a,b", '"f\n",01,3,1,2.5,a', "=1+1"),
    *("\ufeff", "\u2028,a", "é,ß,,,,", "'=a,1,1,1,1,1", ";;;;;", "|||||", "\t\t\t\t\t"),
)


@st.composite
def _csv(draw: Any) -> bytes:
    text = whole_files.table_file(".csv").decode()
    if draw(st.booleans()):
        return draw(damaged_text(text))
    lines = text.splitlines()[:4]
    for _ in range(draw(st.integers(1, 3))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(_NASTY_ROWS)))
    return draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines).encode("utf-8")


def _tables() -> Any:
    plain = _csv()
    packed = _csv().map(lambda c: gzip.compress(c, 1))
    packed = packed | packed.flatmap(damaged) | plain
    parquet = damaged(whole_files.table_file(".parquet")) | plain
    files = st.one_of(
        st.tuples(st.sampled_from([".csv", ".tsv"]), plain),
        st.tuples(st.sampled_from([".csv.gz", ".tsv.gz"]), packed),
        st.tuples(st.just(".parquet"), parquet),
    )
    return st.tuples(files, st.just({}) | st.just({}) | _reading)


_reading = st.fixed_dictionaries(
    {},
    optional={
        "delimiter": st.sampled_from([",", ";", "\t", "", '"', "\n", "é", "ab", "\x00", 1]),
        "encoding": st.sampled_from(
            [
                *("utf-8", "latin-1", "utf-16", "utf-8-sig", "base64", "rot13", "idna", "x", ""),
                *("a\0b", "undefined", "unicode_escape", "utf-7", "cp037", 1),
            ]
        ),
        "columns": st.sampled_from([["age"], [], ["x"], ["age", "age"], "age", [1], 1, [None]]),
    },
)


def _read_table(case: Any) -> None:
    (suffix, content), reading = case
    path = _put({f"table{suffix}": content}) / f"table{suffix}"
    for frame in (read_table(path, **reading), next(read_pieces(path, **reading))):
        expect(len(frame) >= 1, "it has no rows")
        expect(len(set(frame.columns)) == len(frame.columns), "names occur twice")
        frame.astype(str)


# -- all ------------------------------------------------------------------------------------------


def harnesses() -> list[Harness]:
    """All doors for files."""
    counts, dpvi = whole_files.twin_of_counts(), whole_files.twin_by_dpvi()
    return [
        Harness("saved fit", archives(whole_files.saved_fit()), _load_fit),
        Harness("twin of counts", _of_twin(counts), _load_twin),
        Harness("twin by dpvi", _of_twin(dpvi), _load_twin),
        Harness("schema", _schemas(), _load_schema, 2),
        Harness("constraint", _constraints(), _obey, 2),
        Harness("date", _dates, _date_column),
        Harness("ledger", _ledgers(), _use_ledger),
        Harness("checkpoint", _of_checkpoint(), _continue_run),
        Harness("checkpoint result", archives(whole_files.finished_checkpoint()), _read_result),
        Harness("table", _tables(), _read_table, 2),
    ]


BOMBS = ("zip", "zip of an array", "page of json", "gzip", "gzip without lines")


def bomb_of(name: str) -> tuple[str, bytes]:
    """A file of some kilobytes that would fill the memory, and its suffix."""
    if name.startswith("gzip"):
        packed = gzip.compress(b" " * 2**20) * 300  # members one after the other
        header = gzip.compress(b"age\n") if name == "gzip" else b""
        return ".csv.gz", header + packed
    member = "loc.npy" if "array" in name else "meta.json"
    return ".npz", bomb(member, 40 if "page" in name else 80)


def remove_scratch() -> None:
    shutil.rmtree(_SCRATCH, ignore_errors=True)
    os.makedirs(_SCRATCH, exist_ok=True)
