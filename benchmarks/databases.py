"""Counts of a large table: by DuckDB, by Spark, and by the reader that takes Parquet in pieces.

    python benchmarks/databases.py            # 10 million rows, 8 columns
    python benchmarks/databases.py --rows 100000

All count what a twin asks for: columns of many cells, then all pairs. The counts must be the same.
Each way runs in a process of its own, for its CPU time and its peak memory, with the Java machine's
if there is one. Spark is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dpvim.fingerprint import data_digest
from dpvim.privacy.counts import CountMechanism, InPieces
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.marginals.release import codes_of, design, release
from dpvim.synthesis.schema import Binary, Categorical, Count, Date, Integer, Real, Schema
from dpvim.synthesis.tables import read_pieces

RESULTS = Path(__file__).parent / "results" / "databases.csv"
WAYS = ("pieces", "duckdb", "spark")
SCHEMA = Schema(
    (
        Integer(name="age", lower=0, upper=110),
        Categorical(name="region", levels=tuple(f"region {i}" for i in range(20)), nullable=True),
        Count(name="visits", upper=1000),
        Real(name="weight", lower=0.0, upper=200.0, nullable=True),
        Real(name="income", lower=1.0, upper=1e7, scale="log"),
        Binary(name="smokes", levels=(False, True)),
        Date(name="admitted", lower="2015-01-01", upper="2024-12-31"),
        Categorical(name="code", levels=("A", "B", "C", "other"), prefix=1, outside="other"),
    )
)
_PIECE = 1_000_000


def write(path: Path, rows: int) -> None:
    """A made-up table, piece by piece."""
    rng = np.random.default_rng(0)
    writer = None
    for first in range(0, rows, _PIECE):
        n = min(_PIECE, rows - first)
        region = rng.integers(0, 21, n)
        piece = pa.table(
            {
                "age": rng.integers(-2, 115, n),
                "region": pa.array([f"region {i}" for i in range(20)] + [None]).take(
                    pa.array(region)
                ),
                "visits": rng.geometric(0.05, n) - 1,
                "weight": pa.array(rng.normal(70, 20, n), mask=rng.random(n) < 0.05),
                "income": rng.lognormal(10, 1, n),
                "smokes": rng.random(n) < 0.2,
                "admitted": pa.array(rng.integers(16_000, 20_500, n).astype(np.int32)).cast(
                    pa.date32()
                ),
                "code": pa.array([f"{c}{i}" for c in "ABCDE" for i in range(100)]).take(
                    pa.array(rng.integers(0, 500, n))
                ),
            }
        )
        writer = writer or pq.ParquetWriter(path, piece.schema)
        writer.write_table(piece)
    assert writer is not None
    writer.close()


def count(way: str, path: Path, rows: int) -> dict[str, Any]:
    """Release counts of the table with fixed noise; what it took."""
    plan = PrivacyPlan(num_examples=rows, sampling_prob=1.0, num_steps=1, clip_norm=1.0)
    plan = plan.calibrate(epsilon=1.0, delta=0.1 / rows)
    wanted = design(SCHEMA, plan)
    start, wall = time.process_time(), time.perf_counter()

    def released(source: Any) -> bytes:
        found = release(CountMechanism(plan, SecretStreams(0), source), wanted)
        return data_digest([each.counts for each in found.noisy])

    if way == "pieces":
        pieces = InPieces(
            lambda: (
                codes_of(encode(piece, SCHEMA), SCHEMA, wanted.grids)
                for piece in read_pieces(path, columns=SCHEMA.names)
            )
        )
        digest = released(pieces)
    else:
        with open_table(f"{way}:{path}") as table:
            digest = released(table.counted(SCHEMA, wanted.grids))
    own, java = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = time.process_time() - start + java.ru_utime + java.ru_stime
    return {
        "way": way,
        "rows": rows,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "peak_megabytes": (own.ru_maxrss + java.ru_maxrss) // 1024,
        "digest": digest.hex(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(count(given.way, given.table, given.rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.parquet"
        write(table, given.rows)
        found = []
        for way in WAYS:
            if way == "spark" and importlib.util.find_spec("pyspark") is None:
                continue
            command = [sys.executable, __file__, "--rows", str(given.rows)]
            command += ["--way", way, "--table", str(table)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    if len({each["digest"] for each in found}) != 1:
        sys.exit("the ways released different counts")
    frame = pd.DataFrame(found).drop(columns="digest")
    frame.to_csv(RESULTS, index=False)
    print(frame.to_string(index=False))


if __name__ == "__main__":
    main()
