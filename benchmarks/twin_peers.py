"""AIM, MST and NAPSU-MQ on a table of codes, for benchmarks/twin_quality.py.

Each has an environment of its own:

    python3.11 -m venv /tmp/peers && /tmp/peers/bin/pip install dpmm==0.1.9
    /tmp/peers/bin/python benchmarks/twin_peers.py aim table.npz tables/ --epsilon 1 --delta 1e-6

`dpmm` (SAS, Python 3.10 or 3.11) is what installs: its AIM and MST are adapted from the authors'
own. The wheel of `mbi` 2 has the inference of private-pgm, but none of its mechanisms.

Settings are dpmm's defaults, which are the authors': AIM with pairs as its workload, 16 rounds a
column to begin with, models of up to 80 MB, 1000 iterations a round; MST with 5000 iterations; both
join levels that are rarer than three standard deviations of the noise. Rows are made by rounding
expected counts, not by drawing, as the authors do. The seed is that of choices and rows: the noise
comes from OpenDP, which takes none.

NAPSU-MQ (Raisa, Jalko, Kaski and Honkela 2023) is the authors' `twinify`, at commit c522a90, which
is newer than the 2.0.0 of PyPI and selects pairs of columns by itself:

    git clone https://github.com/DPBayes/twinify && git -C twinify checkout c522a90
    python3.11 -m venv /tmp/napsu && /tmp/napsu/bin/pip install ./twinify jax==0.4.13 \\
        jaxlib==0.4.13 numpyro==0.11.0 d3p==0.2.0 numpy==1.25.2 scipy==1.11.4 'arviz<0.18' \\
        'matplotlib<3.9'

Settings of NAPSU-MQ, those of the authors for Adult: full marginals of the pairs of columns that
the caller names (a regression's outcome with each of its predictors), and of those that join the
other columns to them, selected as in MST; in 64 bits, a Laplace approximation with up to 6000
iterations, then NUTS, which begins there: one chain of 500 draws after 500, for 4 of 2000 after 800
would take three quarters of an hour on `fair`, the smallest table. `napsu-mq-laplace` stops before
NUTS. `napsu-mq-tree` counts a whole selected tree of columns beside the pairs that are named:
joined columns alone leave out pairs of predictors, which the authors add by hand. Each table is
from a draw of the posterior of its own.

Two of its functions are replaced, without which it does not get there: JAX's BFGS, whose line
search fails (on `fair`, from five starting points of five), by SciPy's; and the one that puts
parameters into their places a cell at a time, which makes gradients ten times as slow, by one that
puts them there all at once.

What the budget pays for: the authors leave out what selection costs, and twinify spends all of
epsilon on counts, after two thirds of the rho of another epsilon on it. Here all is within epsilon:
a third of rho (zCDP) for selection and two thirds for counts, or all for counts, by the Gaussian
mechanism's own curve, if there is nothing to be selected. Noise is that of one record that is left
out, as for all others here; twinify's is that of one that is replaced, 1.41 times as much. Both are
had by the epsilon that its `fit` is given.

table.npz holds `codes` (rows by columns), `sizes` (how many codes each column can have) and `pairs`
of columns (for NAPSU-MQ). The folder gets 000.npy, 001.npy, ..., and facts.json once the first
one is there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

DPMM = ("aim", "mst")
NAPSU = {  # by twinify's names
    "napsu-mq": "laplace+mcmc",
    "napsu-mq-tree": "laplace+mcmc",
    "napsu-mq-laplace": "laplace",
}
SELECTION_SHARE = 1 / 3
MAX_ITERATIONS = 6000
NUM_DRAWS = 500  # of NUTS, and as many before them

Codes = np.ndarray
Pair = tuple[str, str]


def peak_memory() -> float:
    """Largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


# -- AIM and MST


def from_dpmm(args: argparse.Namespace, frame: pd.DataFrame, sizes: list[int]) -> Iterator[Codes]:
    """Tables of codes; the model is fitted before the first."""
    from dpmm.models import (  # type: ignore[import-not-found,unused-ignore]
        AIMGM,
        MSTGM,
    )

    model = {"aim": AIMGM, "mst": MSTGM}[args.method](
        epsilon=args.epsilon,
        delta=args.delta,
        domain=dict(zip(frame.columns, sizes, strict=True)),
        random_state=np.random.RandomState(args.seed),
        n_jobs=1,
    )
    model.fit(frame)
    for _ in range(args.count):
        yield model.generate(len(frame))[frame.columns].to_numpy(np.int32)


# -- NAPSU-MQ


def from_twinify(
    args: argparse.Namespace, frame: pd.DataFrame, sizes: list[int], wanted: list[Pair]
) -> Iterator[Codes]:
    """Tables of codes, each from a draw of the posterior; the model is fitted before the first."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    import d3p.random  # type: ignore[import-not-found,unused-ignore]
    from twinify.napsu_mq import napsu_mq  # type: ignore[import-not-found,unused-ignore]

    _mend_twinify()
    np.random.seed(args.seed)  # noqa: NPY002  (what the selection takes its noise from)
    pairs, noise_stddev = _select(args, frame, sizes, wanted)
    levels = dict(zip(frame.columns, map(range, sizes), strict=True))
    frame = frame.astype({name: pd.CategoricalDtype(levels[name]) for name in levels})
    config = napsu_mq.NapsuMQInferenceConfig(
        NAPSU[args.method],
        napsu_mq.NapsuMQLaplaceApproximationConfig(max_iters=MAX_ITERATIONS),
        napsu_mq.NapsuMQMCMCConfig(num_samples=NUM_DRAWS, num_warmup=NUM_DRAWS, num_chains=1),
    )
    model = napsu_mq.NapsuMQModel(queries=pairs, inference_config=config)
    fit_key, *keys = d3p.random.split(d3p.random.PRNGKey(args.seed), args.count + 1)
    epsilon = _epsilon_of_noise(noise_stddev, len(pairs), args.delta)
    fit = model.fit(frame, fit_key, epsilon, args.delta, show_progress=False)
    for key in keys:
        (drawn,) = fit.generate(key, 1, len(frame), single_dataframe=False)
        yield np.stack([drawn[name].cat.codes for name in levels], axis=1).astype(np.int32)


def _select(
    args: argparse.Namespace, frame: pd.DataFrame, sizes: list[int], wanted: list[Pair]
) -> tuple[list[Pair], float]:
    """The pairs to count, and the standard deviation of the noise of their counts."""
    from twinify import mst  # type: ignore[import-not-found,unused-ignore]
    from twinify.napsu_mq import privacy_accounting  # type: ignore[import-not-found,unused-ignore]
    from twinify.napsu_mq.private_pgm.dataset import Dataset  # type: ignore[import-not-found,unused-ignore]
    from twinify.napsu_mq.private_pgm.domain import Domain  # type: ignore[import-not-found,unused-ignore]

    whole_tree = args.method == "napsu-mq-tree"
    if not whole_tree and {name for pair in wanted for name in pair} == set(frame.columns):
        sensitivity = math.sqrt(len(wanted))
        return wanted, privacy_accounting.sigma(args.epsilon, args.delta, sensitivity)
    rho = privacy_accounting.eps_delta_budget_to_rho_budget(args.epsilon, args.delta)
    # The selection spends two thirds of what belongs to the epsilon that it is given.
    root = math.sqrt(SELECTION_SHARE * rho * 3 / 2)
    epsilon = root**2 + 2 * root * math.sqrt(-math.log(args.delta))
    data = Dataset(frame, Domain(list(frame.columns), sizes))
    begun = [] if whole_tree else wanted
    found = mst.MST_selection(data, epsilon, args.delta, begun)
    pairs = list(dict.fromkeys([*wanted, *((min(pair), max(pair)) for pair in found)]))
    return pairs, math.sqrt(len(pairs) / (2 * (1 - SELECTION_SHARE) * rho))


def _mend_twinify() -> None:
    """Replace the two functions that the docstring of this file names."""
    import jax
    import jax.numpy as jnp
    import jax.scipy.optimize as jax_optimize
    import scipy.optimize
    from twinify.napsu_mq.markov_network import (  # type: ignore[import-not-found,unused-ignore]
        MarkovNetwork,
    )

    def minimize(loss: Callable, start: jax.Array, **settings: Any) -> Any:
        gradient = jax.jit(jax.value_and_grad(loss))

        def both(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = gradient(x)
            return float(value), np.asarray(slope)

        found = scipy.optimize.minimize(both, np.asarray(start), jac=True, **settings)
        return SimpleNamespace(x=jnp.asarray(found.x), success=bool(found.success))

    def log_factor_vector(network: Any, lambdas: jax.Array, variables: tuple[str, ...]) -> Any:
        chosen = np.array(network.variable_associations[variables])
        cells = np.array([network.flat_queries.queries[index].value for index in chosen])
        shape = tuple(len(network.domain[name]) for name in variables)
        return jnp.zeros(shape).at[tuple(cells.T)].set(lambdas[chosen])

    jax_optimize.minimize = minimize  # type: ignore[assignment]
    MarkovNetwork.log_factor_vector = log_factor_vector


def _epsilon_of_noise(noise_stddev: float, num_pairs: int, delta: float) -> float:
    """What twinify must be given to add this noise."""
    from scipy.optimize import brentq
    from twinify.napsu_mq import privacy_accounting

    ratio = math.sqrt(2 * num_pairs) / noise_stddev
    return float(brentq(lambda e: privacy_accounting.delta(e, ratio) - delta, 0, 100))


# -- both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=[*DPMM, *NAPSU])
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="tables to make")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with np.load(args.table) as table:
        codes, sizes = table["codes"], table["sizes"].tolist()
        wanted = table["pairs"].tolist()
    names = [f"c{i:02}" for i in range(len(sizes))]
    frame = pd.DataFrame(codes.astype(np.int64), columns=names)

    began = time.process_time()
    if args.method in DPMM:
        tables = from_dpmm(args, frame, sizes)
    else:
        pairs = [(names[min(pair)], names[max(pair)]) for pair in wanted]
        tables = from_twinify(args, frame, sizes, pairs)
    for number, drawn in enumerate(tables):
        np.save(args.folder / f"{number:03}.npy", drawn)
        if number == 0:
            seconds = time.process_time() - began
            facts = {"cpu_seconds": seconds, "memory_mb": peak_memory()}
            (args.folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
