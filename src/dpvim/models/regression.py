r"""Regressions, ready to fit: logistic, Poisson and linear.

>>> import numpy as np
>>> import dpvim
>>> rng = np.random.default_rng(0)
>>> X = rng.normal(size=(5000, 2))
>>> y = rng.random(5000) < 1 / (1 + np.exp(-X[:, 0]))
>>> fit = dpvim.fit(logistic, X, y, epsilon=1.0, delta=1e-5, num_steps=300, learning_rate=0.05)
>>> sorted(fit.posterior.mean)
['coefficients', 'intercept']

For a record with covariates x and predictor e = w'x the gradient is s x, with the score
s = d log p(y | e) / de a number. So the norm is |s| |sqrt(w) x|, and the clipped sum is one of the
rows that the data already are, each times a number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.structured import PRECISION, StructuredModel
from dpvim.privacy.clipping import (
    ClippedSum,
    clamp,
    clip_factors,
    finite_or_nan,
    materialize,
    scales_of,
    unscaled,
)
from dpvim.privacy.lattice import exact_sum
from dpvim.types import Latent, Mask, Weights


class Score(NamedTuple):
    """Derivatives of log p(y): by the predictor, and by the logarithm of the noise's scale."""

    predictor: Float[Array, " batch"]
    noise: Float[Array, " batch"] | None


class GlmFamily(NamedTuple):
    """The distribution of an outcome given its linear predictor, and the score.

    Attributes:
        distribution: ``(predictor, noise_scale) -> `` distribution of y.
        score: ``(predictor, noise_scale, y) -> Score``.
        has_noise: True if there is an unknown noise scale.
    """

    distribution: Callable[[Array, Array | None], dist.Distribution]
    score: Callable[[Array, Array | None, Array], Score]
    has_noise: bool


def _normal_score(predictor: Array, noise_scale: Any, y: Array) -> Score:
    residual = (y - predictor) / noise_scale
    return Score(residual / noise_scale, residual**2 - 1)


GLM_FAMILIES = {
    "logistic": GlmFamily(
        lambda predictor, _: dist.Bernoulli(logits=predictor),
        lambda predictor, _, y: Score(y - jax.nn.sigmoid(predictor), None),
        has_noise=False,
    ),
    "poisson": GlmFamily(
        lambda predictor, _: dist.Poisson(jnp.exp(predictor)),
        lambda predictor, _, y: Score(y - jnp.exp(predictor), None),
        has_noise=False,
    ),
    "linear": GlmFamily(dist.Normal, _normal_score, has_noise=True),
}


@dataclasses.dataclass(frozen=True)
class Regression(StructuredModel):
    """A NumPyro model ``(X, y=None)`` of an outcome y given covariates X.

    Args:
        kind: "logistic" (y is 0 or 1), "poisson" (counts; the logarithm of the mean is linear) or
            "linear" (normal noise of unknown scale, for which the prior is log-normal(0, 1)).
        prior_scale: Standard deviation of the normal prior of the coefficients.
        intercept: True for an intercept; leave it out if X has a column of ones.
        intercept_scale: Standard deviation of its normal prior; `prior_scale` if not given.

    Without y the outcome is predicted, as NumPyro's Predictive has it.
    """

    kind: str
    _: dataclasses.KW_ONLY
    prior_scale: float = 1.0
    intercept: bool = True
    intercept_scale: float | None = None

    def __post_init__(self) -> None:
        _validate.one_of("kind", self.kind, GLM_FAMILIES)
        _validate.positive("prior_scale", self.prior_scale)
        if self.intercept_scale is not None:
            _validate.positive("intercept_scale", self.intercept_scale)

    def __call__(self, X: Any, y: Any = None) -> None:
        prior = dist.Normal(0, self.prior_scale).expand([X.shape[1]]).to_event(1)
        predictor = X @ numpyro.sample("coefficients", prior)
        if self.intercept:
            scale = self.intercept_scale or self.prior_scale
            predictor = predictor + numpyro.sample("intercept", dist.Normal(0, scale))
        noise = None
        if self._glm_family.has_noise:
            noise = numpyro.sample("noise_scale", dist.LogNormal(0, 1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", self._glm_family.distribution(predictor, noise), obs=y)

    @property
    def _glm_family(self) -> GlmFamily:
        return GLM_FAMILIES[self.kind]

    # -- the clipped sum ----------------------------------------------------------------------

    def batch_of(self, X: Any, y: Any = None) -> _Batch:
        """The arguments of the model, as the clipped sum takes them."""
        X = jnp.asarray(X, jnp.float32)
        is_usable = jnp.isfinite(X).all(axis=1)
        X = jnp.where(is_usable[:, None], clamp(X), 0.0)
        squares = jnp.where(is_usable, _squared_norms(X), jnp.nan)
        return _Batch(X, jnp.asarray(y, jnp.float32), squares)

    def clipped_sum_for(self, space: LatentSpace) -> ClippedSum:
        """One product for each entry of X instead of a gradient for each record."""
        return functools.partial(self._clipped_sum, space)

    def log_prior_for(self, space: LatentSpace) -> None:
        """None: the general one is a sum of squares already."""

    def _clipped_sum(
        self,
        space: LatentSpace,
        latent: Latent,
        weights: Weights,
        batch: _Batch,
        is_padding: Mask,
        bound: float,
    ) -> Float[Array, " d"]:
        scales = scales_of(weights)
        raw = space.unpack(latent)
        scale = {} if scales is None else {k: clamp(v) for k, v in space.unpack(scales).items()}
        predictor = batch.X @ raw["coefficients"] + raw.get("intercept", 0.0)
        noise = jnp.exp(raw["noise_scale"]) if self._glm_family.has_noise else None

        def make_score() -> Score:
            return jax.tree.map(finite_or_nan, self._glm_family.score(predictor, noise, batch.y))

        score = materialize(make_score, is_padding)

        # Groups of a row's numbers that share a factor.
        def constant_rows(name: str) -> Float[Array, "batch 1"]:
            return jnp.broadcast_to(scale.get(name, 1.0), (is_padding.size, 1))

        groups, squares = {"coefficients": batch.X}, batch.squares
        if scales is not None:  # without weights the norms do not change from step to step
            groups["coefficients"] = clamp(batch.X * scale["coefficients"])
            squares = jnp.where(jnp.isnan(squares), jnp.nan, _squared_norms(groups["coefficients"]))
        if self.intercept:
            groups["intercept"] = constant_rows("intercept")
            squares = squares + groups["intercept"][:, 0] ** 2
        norms = jnp.abs(score.predictor) * jnp.sqrt(squares)
        numbers = dict.fromkeys(groups, score.predictor)
        if score.noise is not None:
            groups["noise_scale"] = constant_rows("noise_scale")
            numbers["noise_scale"] = score.noise
            norms = jnp.hypot(norms, jnp.abs(score.noise) * groups["noise_scale"][:, 0])
        factors = clip_factors(norms, is_padding, bound)
        # A number may not be finite where the factor is zero; rows are.
        sums = {
            name: _sum(jnp.where(factors > 0, factors * numbers[name], 0.0), rows, bound)
            for name, rows in groups.items()
        }
        with jax.enable_x64(True):
            total = space.pack(sums)
        return unscaled(total, scales)


class _Batch(NamedTuple):
    """Records, and the squared norms of their covariates.

    A record with a covariate that is not finite has zeros for covariates and NaN for a norm, which
    takes it out.
    """

    X: Float[Array, "batch m"]
    y: Float[Array, " batch"]
    squares: Float[Array, " batch"]


def _squared_norms(rows: Float[Array, "batch m"]) -> Float[Array, " batch"]:
    # A product, not a sum over the row, which would be fused with what makes the rows, and slow.
    squares = jnp.matmul(rows**2, jnp.ones(rows.shape[1]), precision=PRECISION)
    # A square may have underflown, and the number that multiplies the row may be large.
    return squares + rows.shape[1] * float(jnp.finfo(jnp.float32).tiny)


def _sum(
    numbers: Float[Array, " batch"], rows: Float[Array, "batch m"], bound: float
) -> Float[Array, " m"]:
    if math.isinf(bound):
        return jnp.matmul(numbers, rows, precision=PRECISION)
    return exact_sum(numbers, rows, bound)


logistic = Regression("logistic")
poisson = Regression("poisson")
linear = Regression("linear")
