"""The Adult data as the paper's logistic regression takes them: 96 columns with the intercept."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import platformdirs
from scipy import special

from dpvim._extras import require
from dpvim.experiments.optimum import MeanField, mean_field_optimum

# The paper's table of clip norms, 97.5 % quantiles "at the non-private optima".
CLIP_NORMS = {
    "vanilla": 3.0,
    "preconditioned": 4.0,
    "aligned": 3.0,
    "natural": 0.1,
    "aligned_natural": 0.1,
}

_SOURCE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
_COLUMNS = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
]
_CONTINUOUS = ["age", "fnlwgt", "capital_gain", "capital_loss", "hours_per_week"]
# education_num says the same as education.
_DROPPED = ["education_num"]


class Adult(NamedTuple):
    """Design matrices and outcomes (income above 50 000), training and test part."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    columns: list[str]


def find() -> Path | None:
    """The folder with adult.data and adult.test: the one that the variable DPVIM_DATA names has it,
    or, without that variable, it was downloaded before. None if they are not there."""
    given = os.environ.get("DPVIM_DATA")
    folder = _downloads() if given is None else Path(given) / "adult"
    return folder if all((folder / name).exists() for name in _SHA256) else None


def fetch() -> Path:
    """The folder with the data, downloaded and checked if it is not there.

    Raises:
        FileNotFoundError: If they cannot be had; says how to get them.
    """
    folder = find()
    if folder is not None:
        return folder
    reason = "DPVIM_DATA names a folder without them"
    if "DPVIM_DATA" not in os.environ:
        pooch = require("pooch", extra="reproduce")
        try:
            for name, digest in _SHA256.items():
                url = f"{_SOURCE}/{name}"
                pooch.retrieve(url, f"sha256:{digest}", name, _downloads(), progressbar=False)
            return _downloads()
        except (OSError, ValueError) as error:  # no network; another file than expected
            reason = f"the download failed ({type(error).__name__})"
    raise FileNotFoundError(
        f"the Adult data were not found, and {reason}: expected a folder adult/ with adult.data "
        f"and adult.test (UCI Machine Learning Repository, data set 2: {_SOURCE}) in the folder "
        "that the environment variable DPVIM_DATA names."
    )


def _downloads() -> Path:
    return platformdirs.user_cache_path("dpvim") / "adult"


def load() -> Adult:
    """Read and encode both parts: rows without missing values, most frequent level dropped,
    continuous columns standardised, a column of ones at the end."""
    folder = fetch()
    train, test = (_read(folder / name) for name in ("adult.data", "adult.test"))
    categorical = [c for c in train.columns if c not in [*_CONTINUOUS, "income"]]
    blocks: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    for column in _CONTINUOUS:
        parts = [_standardise(part[column].to_numpy(float)) for part in (train, test)]
        blocks.append(([column], parts[0][:, None], parts[1][:, None]))
    for column in categorical:
        counts = train[column].value_counts()
        levels = [level for level in sorted(counts.index) if level != counts.idxmax()]
        names = [f"{column}={level}" for level in levels]
        parts = [
            (part[column].to_numpy()[:, None] == np.array(levels)).astype(float)
            for part in (train, test)
        ]
        blocks.append((names, parts[0], parts[1]))
    blocks.append((["intercept"], np.ones((len(train), 1)), np.ones((len(test), 1))))
    return Adult(
        X=np.concatenate([block[1] for block in blocks], axis=1).astype(np.float32),
        y=_outcome(train),
        X_test=np.concatenate([block[2] for block in blocks], axis=1).astype(np.float32),
        y_test=_outcome(test),
        columns=[name for block in blocks for name in block[0]],
    )


@cache
def loaded() -> Adult:
    """The data, read once."""
    return load()


@cache
def optimum() -> MeanField:
    """The best mean-field Gaussian for `model` without privacy."""
    return mean_field_optimum(loaded().X, loaded().y, "logistic")


def model(X: Any, y: Any = None) -> None:
    """Logistic regression with standard normal coefficients (appendix G.2 of the paper)."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


class Laplace(NamedTuple):
    """Gaussian at the mode of the posterior without privacy: mean and precision."""

    mean: np.ndarray
    precision: np.ndarray


def laplace(adult: Adult) -> Laplace:
    """Laplace approximation of `model` on the training part, not private, by Newton's method."""
    X, y = adult.X.astype(np.float64), adult.y
    dim = X.shape[1]
    mean, precision = np.zeros(dim), np.eye(dim)
    for _ in range(40):
        fitted = special.expit(X @ mean)
        precision = (X * (fitted * (1 - fitted))[:, None]).T @ X + np.eye(dim)
        mean = mean + np.linalg.solve(precision, X.T @ (y - fitted) - mean)
    return Laplace(mean, precision)


def accuracy(adult: Adult, loc: np.ndarray) -> float:
    """Share of the test part that the means classify rightly."""
    return float(np.mean((adult.X_test @ loc > 0) == (adult.y_test == 1)))


def _read(path: Path) -> pd.DataFrame:
    table = pd.read_csv(
        path, header=None, names=_COLUMNS, na_values="?", skipinitialspace=True, comment="|"
    )
    return table.dropna().drop(columns=_DROPPED)


def _standardise(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def _outcome(table: pd.DataFrame) -> np.ndarray:
    return table["income"].str.startswith(">50K").to_numpy().astype(np.int32)
