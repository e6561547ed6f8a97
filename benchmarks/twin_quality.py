"""How good are twins?

    python benchmarks/twin_quality.py downstream | distances | peers | settings | table

Tables: `population` (simulated, 58 261 rows, six categorical columns and a rare outcome by a
Poisson regression with known coefficients; see dpvim.experiments.population) and `randhie` (real,
20 190 rows, number of doctor's visits; comes with statsmodels, bounds as in its code book).

`downstream`: a twin with a Poisson target, 20 synthetic tables of the original's size, the same
regression on each, pooled. `rmse` is the error of the pooled coefficients (without the intercept),
`coverage` how often their 95 % intervals hold, `width` the intervals' median width; against the
truth for the population, against the regression of the original for randhie. `original` is the
same for the original table, where there is a truth. Posteriors: the last iterate as it is, the
averaged one as it is, and the averaged one that knows about the noise (what `synth` uses). Twins
are new in each repetition; the population is, too.

`distances`: mean total variation distance of pairs of columns between the original and a twin
(numbers in 20 bins), at the same epsilon and delta = 0.1 / rows for all.

`peers`: the same for MST and AIM of smartnoise-synth, which needs an environment of its own (pass
its interpreter with --python); they get the binned columns, so that nothing is spent on bounds.

`settings`: what other settings would give, one seed each: distance, and error of the posterior
mean's coefficients where there is a truth; and for scale the distance of two populations, of
independent columns, and of twins without privacy. Writes results/twin_settings.csv.

Appends to results/twin_downstream.csv and results/twin_distances.csv; rows that are there are not
made again. `table` prints what docs/synthesis.md has.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm
import statsmodels.formula.api as smf

from dpvim import fit_nonprivate
from dpvim.experiments import population
from dpvim.synthesis.analysis.contingency import BinnedTable, bin_table
from dpvim.synthesis.analysis.pooling import analyze
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fidelity import pairwise_tv
from dpvim.synthesis.fitting import resolve_delta, synthesize
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.schema import Binary, Count, Levelled, Real, Schema
from dpvim.synthesis.twin import Twin

RESULTS = Path(__file__).parent / "results"
EPSILONS = (1.0, 2.0, 4.0, 10.0)
NUM_TABLES = 20

# What the study's documents say: visits are few, shares are shares, logarithms of dollars.
RANDHIE = Schema(
    columns=(
        Count(name="mdvis", upper=100, reviewed=True),
        Real(name="lncoins", lower=0, upper=5, reviewed=True),
        Binary(name="idp", levels=(0, 1), reviewed=True),
        Real(name="lpi", lower=0, upper=8, reviewed=True),
        Real(name="fmde", lower=0, upper=9, reviewed=True),
        Real(name="physlm", lower=0, upper=1, reviewed=True),
        Real(name="disea", lower=0, upper=60, reviewed=True),
        Binary(name="hlthg", levels=(0, 1), reviewed=True),
        Binary(name="hlthf", levels=(0, 1), reviewed=True),
        Binary(name="hlthp", levels=(0, 1), reviewed=True),
    )
)


class Case(NamedTuple):
    """A table, its schema, and a regression on it."""

    schema: Schema
    load: Callable[[int], pd.DataFrame]
    target: str
    formula: str
    truth: pd.Series | None


def _randhie(_: int) -> pd.DataFrame:
    return sm.datasets.randhie.load_pandas().data


CASES = {
    "population": Case(
        population.SCHEMA,
        lambda seed: population.simulate(seed=seed),
        population.OUTCOME,
        population.FORMULA,
        population.truth().coefficients(),
    ),
    "randhie": Case(
        RANDHIE,
        _randhie,
        "mdvis",
        "mdvis ~ " + " + ".join(name for name in RANDHIE.names if name != "mdvis"),
        None,
    ),
}


def levels_of(case: Case) -> dict[str, Any]:
    columns = [c for c in case.schema.columns if isinstance(c, Levelled) and c.kind != "binary"]
    return {column.name: column.levels for column in columns}


def downstream(name: str, epsilon: float, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of results: one for each posterior, and one for the original."""
    case = CASES[name]
    frame = case.load(seed)
    original = frame.assign(
        **{c: pd.Categorical(frame[c], levels) for c, levels in levels_of(case).items()}
    )
    direct = smf.glm(case.formula, original, family=sm.families.Poisson()).fit()
    truth = direct.params if case.truth is None else case.truth
    if case.truth is not None:
        found = direct.conf_int().set_axis(["lower", "upper"], axis=1)
        yield {"posterior": "original", **_score(truth, found.assign(estimate=direct.params))}
    began = time.process_time()
    twin = synthesize(
        frame, case.schema, epsilon=epsilon, target=case.target, seed=seed, progress=False
    )
    seconds = time.process_time() - began
    posteriors = {
        "last": twin.fit.posterior_from("last", noise_aware=None),
        "averaged": twin.fit.posterior_from("trace", noise_aware=None),
        "noise-aware": twin.fit.posterior_from("trace"),
    }
    for label, posterior in posteriors.items():
        tables = twin.datasets(NUM_TABLES, posterior=posterior, seed=seed)
        found = analyze(
            list(tables),
            case.formula,
            family="poisson",
            num_rows=len(frame),
            levels=levels_of(case),
            workers=1,
            progress=False,
        )
        yield {
            "posterior": label,
            **_score(truth, found.combined.to_frame()),
            "failed": found.num_failed,
            "not_converged": len(posterior.not_converged) / posterior.loc.size,
            "cpu_seconds": round(seconds, 1),
        }


def _score(truth: pd.Series, found: pd.DataFrame) -> dict[str, float]:
    found = found.drop(index="Intercept")
    wanted = truth.loc[found.index]
    return {
        "rmse": float(np.sqrt(np.mean((found["estimate"] - wanted) ** 2))),
        "coverage": float(((found["lower"] <= wanted) & (wanted <= found["upper"])).mean()),
        "width": float((found["upper"] - found["lower"]).median()),
    }


def distance(case: Case, original: BinnedTable, twin: Twin) -> float:
    binned = [bin_table(table, case.schema) for table in twin.datasets(3, seed=0)]
    return float(np.mean([pairwise_tv(original, each)["tv"].mean() for each in binned]))


def distances(name: str, epsilon: float, seed: int) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    frame = case.load(0)
    original = bin_table(frame, case.schema)
    for label, target in {"dpvim": None, "dpvim, target": case.target}.items():
        began = time.process_time()
        twin = synthesize(
            frame, case.schema, epsilon=epsilon, target=target, seed=seed, progress=False
        )
        seconds = time.process_time() - began
        tv = distance(case, original, twin)
        yield {"method": label, "tv": tv, "cpu_seconds": round(seconds, 1)}


_PEER = """
import sys, warnings, time, pandas as pd
warnings.simplefilter("ignore")
from snsynth import Synthesizer
source, method, epsilon, delta, target = sys.argv[1:]
frame = pd.read_csv(source).astype(str)
began = time.process_time()
synth = Synthesizer.create(method, epsilon=float(epsilon), delta=float(delta))
synth.fit(frame, categorical_columns=list(frame.columns), preprocessor_eps=0.0)
synth.sample(len(frame)).to_csv(target, index=False)
print(time.process_time() - began)
"""


def peers(name: str, epsilon: float, seed: int, python: str) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    frame = case.load(0)
    original = bin_table(frame, case.schema)
    for method in ("mst", "aim"):
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in.csv", Path(folder) / "out.csv"
            pd.DataFrame(original.codes).to_csv(source, index=False)
            options = [method, str(epsilon), str(resolve_delta(None, len(frame)))]
            command = [python, "-c", _PEER, str(source), *options, str(target)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            drawn = pd.read_csv(target)
        codes = {column: drawn[column].to_numpy(int) for column in original.codes}
        tv = pairwise_tv(original, BinnedTable(original.bins, codes))["tv"].mean()
        seconds = float(output.split()[-1])
        yield {"method": method, "tv": float(tv), "cpu_seconds": round(seconds, 1)}


# Table, epsilon (None: not private), and what differs from the defaults.
SETTINGS: list[tuple[str, float | None, dict[str, Any]]] = [
    ("population", 1.0, {"num_steps": 2000}),
    ("population", 1.0, {"num_steps": 4000}),
    ("population", 1.0, {"num_steps": 10_000}),
    ("population", 1.0, {"clip_norm": 5.0}),
    ("randhie", 1.0, {"numbers": "histogram"}),
    ("randhie", 1.0, {"numbers": "normal"}),
    ("population", None, {"components": 8}),
    ("population", None, {"components": 16}),
]


def settings() -> Iterator[dict[str, Any]]:
    case = CASES["population"]
    frame = case.load(0)
    original = bin_table(frame, case.schema)
    apart = frame.apply(np.random.default_rng(0).permutation)
    for label, other in {"another population": case.load(1), "independent columns": apart}.items():
        tv = pairwise_tv(original, bin_table(other, case.schema))["tv"].mean()
        yield {"table": "population", "setting": label, "tv": tv}
    for name, epsilon, changes in SETTINGS:
        case = CASES[name]
        frame = case.load(0)
        if epsilon is None:
            twin = _not_private(case, frame, **changes)
        else:
            options = {"target": case.target, "seed": 0, "progress": False, **changes}
            twin = synthesize(frame, case.schema, epsilon=epsilon, **options)
        row = {"table": name, "epsilon": epsilon, "setting": str(changes)}
        row["tv"] = distance(case, bin_table(frame, case.schema), twin)
        if case.truth is not None:
            found = twin.fit.posterior_from("trace").mean[f"{case.target}.coefficients"][1:]
            row["rmse"] = float(np.sqrt(np.mean((found - case.truth.to_numpy()[1:]) ** 2)))
        yield row


def _not_private(case: Case, frame: pd.DataFrame, *, components: int) -> Twin:
    model = build_mixture(case.schema, components=components, target=case.target)
    table = encode(frame, case.schema)
    found = fit_nonprivate(
        model,
        table.values,
        table.missing,
        sampling_prob=0.05,
        num_steps=2000,
        learning_rate=0.03,
        seed=0,
        progress=False,
    )
    return Twin(case.schema, found, model, len(frame))


def collect(
    path: Path,
    make: Callable[..., Iterator[dict[str, Any]]],
    options: argparse.Namespace,
    **more: Any,
) -> None:
    """Make what is not there yet; write each row as it comes."""
    label = options.what
    done = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["made_by"])
    for seed in range(options.seeds):
        for name in options.tables:
            for epsilon in options.epsilons:
                key = {"made_by": label, "table": name, "epsilon": epsilon, "seed": seed}
                known = done.columns.intersection(list(key))
                if len(done) and (done[known] == pd.Series(key)[known]).all(axis=1).any():
                    continue
                rows = [{**key, **row} for row in make(name, epsilon, seed, **more)]
                print(pd.DataFrame(rows).to_string(index=False), flush=True)
                done = pd.concat([done, pd.DataFrame(rows)] if len(done) else [pd.DataFrame(rows)])
                done.to_csv(path, index=False, float_format="%.5g")


def table() -> None:
    found = pd.read_csv(RESULTS / "twin_downstream.csv")
    columns = ["rmse", "coverage", "width", "not_converged"]
    groups = found.groupby(["table", "epsilon", "posterior"], sort=False)
    summary = groups[columns].mean().join(groups.size().rename("twins")).round(3)
    found = pd.read_csv(RESULTS / "twin_distances.csv")
    mean = found.pivot_table(index=["table", "epsilon"], columns="method", values="tv")
    for frame in (summary.reset_index(), mean.round(3).reset_index()):
        print("|".join(["", *map(str, frame.columns), ""]))
        print("|".join(["", *["---"] * frame.shape[1], ""]))
        for row in frame.astype(object).fillna("").itertuples(index=False):
            print("|".join(["", *map(str, row), ""]))
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["downstream", "distances", "peers", "settings", "table"])
    parser.add_argument("--seeds", type=int, default=5, help="repetitions")
    parser.add_argument("--tables", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--python", help="interpreter with smartnoise-synth")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    RESULTS.mkdir(exist_ok=True)
    if options.what == "table":
        table()
    elif options.what == "settings":
        rows = []
        for row in settings():
            rows.append(row)
            print(row, flush=True)
            path = RESULTS / "twin_settings.csv"
            pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
    elif options.what == "downstream":
        collect(RESULTS / "twin_downstream.csv", downstream, options)
    elif options.what == "distances":
        collect(RESULTS / "twin_distances.csv", distances, options)
    elif options.python is None:
        parser.error("peers: expected --python, an interpreter with smartnoise-synth.")
    else:
        path = RESULTS / "twin_distances.csv"
        collect(path, peers, options, python=options.python)


if __name__ == "__main__":
    main()
