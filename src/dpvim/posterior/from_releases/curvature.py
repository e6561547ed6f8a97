r"""Bayesian model of optimum and curvature given the released gradients, and its sampler.

.. math::

    \theta \sim N(\mu_0, \Sigma_0), \qquad
    H = S A A' S, \quad \log S_j^2 \sim N, \; A \text{ unit lower rows}, \qquad
    g \mid \theta, H \sim N(H (\theta - r), H), \qquad
    \text{releases} \mid g, H.

The distance of the rows of A from those of the identity is tau, one number for all, which is
learnt as well. The third line is the likelihood of a quadratic: its maximum is the true parameter
plus :math:`N(0, H^{-1})`, and g, the gradient at r, is H times the maximum's distance from r. Given
H all the rest is Gaussian and is integrated out in closed form, so only H is sampled: by
Hamiltonian Monte Carlo, preconditioned with the curvature of its own log-density at the mode. The
posterior of theta is then a mixture of Gaussians, one for each H.

If only diagonals were kept H is diagonal, its coordinates are independent, and the posterior of
each is a sum over a grid.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.infer.hmc import hmc
from scipy import optimize

from dpvim._compile import jit_once, jit_quickly
from dpvim.posterior.from_releases.linalg import inverse_and_log_det
from dpvim.posterior.from_releases.regression import LOG_SPREAD, RegressionStats

# Above this many numbers in H the preconditioner is diagonal.
_MAX_DENSE_PRECONDITIONER = 1200
_HUTCHINSON_DRAWS = 64
# Above this dimension chains run one after the other: factorisations of large matrices are faster
# that way.
_MAX_VECTORIZED_DIM = 30
# The least precision of the preconditioner: a bit below that of the prior, which is 1.
_MIN_PRECISION = 0.3
_FIRST_STEP_SIZE = 0.3
# The optimum for trajectories of fixed length in many dimensions (Beskos et al. 2013). NumPyro's
# dual averaging is cautious in a short warm-up, and more of the proposals are accepted.
_TARGET_ACCEPT_PROB = 0.65
# Leapfrog steps of a trajectory. They vary so that no trajectory comes back to where it began every
# time.
_MIN_LEAPFROGS, _MAX_LEAPFROGS = 3, 11
_GRID = np.linspace(-4.0, 4.0, 161)
_DIAGONAL_COMPONENTS = 512
# tau is the logistic function of a normal with this standard deviation: anything from nothing to
# as much as a coordinate's own. One number for all pairs: those whose curvature the releases
# determine inform the prior of the others.
_TAU_LOGIT_SCALE = 1.5
# A coordinate's information that it shares with others, which a diagonal H does not see, counts as
# so much additional variance of g: half of the information of a coordinate is shared a priori.
_SHARED_INFORMATION = 1.0


class Components(NamedTuple):
    """Gaussians of equal weight, the posterior of theta - r given each sampled H.

    Attributes:
        loc: Means.
        factor: Cholesky factors of the covariances, or standard deviations for a diagonal H.
        variance_without_noise: Variance of each coordinate had g and H been released exactly.
        curvature: Mean of H, or of its diagonal.
        r_hat: Largest ratio, over the coordinates of theta, of total to within-chain spread: 1 if
            the sampler has mixed.
    """

    loc: Float[np.ndarray, "components d"]
    factor: Float[np.ndarray, "components d d"] | Float[np.ndarray, "components d"]
    variance_without_noise: Float[np.ndarray, " d"]
    curvature: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]
    r_hat: float


class SamplerConfig(NamedTuple):
    """Numbers of chains, and of warm-up iterations and draws in each of them."""

    num_chains: int
    num_warmup: int
    num_samples: int


def default_sampler_config(dim: int) -> SamplerConfig:
    """Numbers that take seconds, whatever the dimension."""
    if dim <= 30:
        return SamplerConfig(8, 150, 125)
    return SamplerConfig(4, 80, 80)


def posterior_components(
    stats: RegressionStats, *, seed: int = 0, config: SamplerConfig | None = None
) -> Components:
    """Compute the posterior of theta - r as a mixture; a function of its arguments alone."""
    with jax.enable_x64(True):
        if stats.xx.ndim == 1:
            return _diagonal_components(stats, np.random.default_rng(seed))
        config = default_sampler_config(len(stats.noise)) if config is None else config
        return _full_components(stats, jax.random.key(seed), config)


def num_coordinates(dim: int) -> int:
    """Number of coordinates of H: tau, the diagonal, and the entries below it."""
    return 1 + dim * (dim + 1) // 2


def curvature_matrix(flat: Array, stats: RegressionStats) -> Float[Array, "d d"]:
    """Build H from coordinates that are independent standard normals a priori."""
    dim = stats.noise.shape[0]
    tau_logit, diagonal, off_diagonal = flat[0], flat[1 : dim + 1], flat[dim + 1 :]
    # A row's entries below the diagonal have a sum of squares of about tau^2, its diagonal has 1.
    tau = jax.nn.sigmoid(_TAU_LOGIT_SCALE * tau_logit)
    share = tau / np.sqrt(np.maximum(1, np.arange(dim)))
    # Gathered from the flat vector; what is not below the diagonal is its last entry, a zero.
    places = np.full((dim, dim), off_diagonal.size)
    places[np.tril_indices(dim, -1)] = np.arange(off_diagonal.size)
    below = jnp.append(off_diagonal, 0.0)[places] * share[:, None]
    unit = jnp.eye(dim) + below
    unit = unit / jnp.linalg.norm(unit, axis=1, keepdims=True)
    factor = jnp.exp(0.5 * (stats.log_centre + LOG_SPREAD * diagonal))[:, None] * unit
    return factor @ factor.T


def log_density(flat: Array, stats: RegressionStats) -> Array:
    """Log-density of H's coordinates given the releases, up to a constant, without theta and g."""
    h = curvature_matrix(flat, stats)
    noise = stats.noise[:, None]
    within = -0.5 * jnp.sum((h @ stats.xx) * h / noise) - jnp.sum(h * stats.xg.T / noise)
    mean, precision, between = _intercept(h, stats)
    variance_of_g = stats.sampling_share * h + jnp.diag(1 / precision)
    spread = (h * stats.prior_variance) @ h + variance_of_g
    inverse, log_det = inverse_and_log_det(spread)
    gap = mean - h @ stats.prior_loc
    about_g = -0.5 * gap @ inverse @ gap - 0.5 * log_det
    total = within + between + about_g - 0.5 * flat @ flat
    return jnp.where(jnp.isfinite(total), total, -1e30)


def _intercept(h: Array, stats: RegressionStats) -> tuple[Array, Array, Array]:
    """The regression's intercept g given its slope H: mean and precision over windows, and the
    log-likelihood of the windows' scatter about the mean."""
    intercepts = stats.g + stats.x @ h
    precision = stats.weight.sum(axis=(1, 2))
    mean = jnp.einsum("jvw,wj->j", stats.weight, intercepts) / precision
    gap = intercepts - mean
    return mean, precision, -0.5 * jnp.einsum("jvw,vj,wj->", stats.weight, gap, gap)


@jit_once
def _theta_given_curvature(
    flats: Float[Array, "m k"], stats: RegressionStats
) -> tuple[Array, Array, Array, Array]:
    """Mean and Cholesky factor of theta - r for each H; and, over all of them, the mean variances
    had g been known exactly, and the mean of H."""
    prior_precision = jnp.diag(1 / stats.prior_variance)

    def one(flat: Array) -> tuple[Array, Array, Array, Array]:
        h = curvature_matrix(flat, stats)
        mean, precision, _ = _intercept(h, stats)
        precision_of_g, _ = inverse_and_log_det(stats.sampling_share * h + jnp.diag(1 / precision))
        covariance, _ = inverse_and_log_det(h @ precision_of_g @ h + prior_precision)
        loc = covariance @ (stats.prior_loc / stats.prior_variance + h @ precision_of_g @ mean)
        exact = jnp.diagonal(inverse_and_log_det(h + prior_precision)[0])
        return loc, jnp.linalg.cholesky(covariance), exact, h

    loc, factor, exact, h = jax.lax.map(one, flats)
    return loc, factor, exact.mean(axis=0), h.mean(axis=0)


def _full_components(stats: RegressionStats, key: Array, config: SamplerConfig) -> Components:
    stats = jax.tree.map(jnp.asarray, stats)
    mode = _find_mode(stats)
    chains = _sample(mode, _preconditioner(mode, stats), stats, key, config)
    flats = chains.reshape(-1, mode.size)
    loc, factor, exact, h = (np.asarray(part) for part in _theta_given_curvature(flats, stats))
    by_chain = loc.reshape(config.num_chains, config.num_samples, -1)
    within = np.square(factor).sum(axis=2).mean(axis=0) + by_chain.var(axis=1).mean(axis=0)
    r_hat = float(np.sqrt(1 + np.max(by_chain.mean(axis=1).var(axis=0) / within)))
    return Components(loc, factor, exact, h, r_hat)


_value_and_grad = jit_once(jax.value_and_grad(lambda flat, stats: -log_density(flat, stats)))


def _find_mode(stats: RegressionStats) -> Array:
    dim = len(stats.noise)
    found = optimize.minimize(
        lambda flat: tuple(np.asarray(part) for part in _value_and_grad(flat, stats)),
        np.zeros(num_coordinates(dim)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 200},
    )
    return jnp.asarray(found.x)


def _preconditioner(mode: Array, stats: RegressionStats) -> Array:
    """A matrix (or a vector of scales) that makes the density round near its mode."""
    if mode.size <= _MAX_DENSE_PRECONDITIONER:
        values, vectors = np.linalg.eigh(np.asarray(_hessian(mode, stats)))
        return jnp.asarray(vectors / np.sqrt(np.maximum(values, _MIN_PRECISION)))
    diagonal = _hessian_diagonal(mode, stats)
    return 1 / jnp.sqrt(jnp.maximum(diagonal, _MIN_PRECISION))


@jit_once
def _hessian(mode: Array, stats: RegressionStats) -> Array:
    return jax.hessian(lambda flat: -log_density(flat, stats))(mode)


@jit_once
def _hessian_diagonal(mode: Array, stats: RegressionStats) -> Array:
    """Hutchinson's estimate of the Hessian's diagonal, from products with random signs."""

    def gradient(flat: Array) -> Array:
        return jax.grad(lambda f: -log_density(f, stats))(flat)

    def one(key: Array) -> Array:
        signs = jax.random.rademacher(key, mode.shape, mode.dtype)
        return signs * jax.jvp(gradient, (mode,), (signs,))[1]

    return jax.lax.map(one, jax.random.split(jax.random.key(0), _HUTCHINSON_DRAWS)).mean(axis=0)


@partial(jit_quickly, static_argnames="config")
def _sample(
    mode: Array, root: Array, stats: RegressionStats, key: Array, config: SamplerConfig
) -> Float[Array, "chains samples k"]:
    """Draw coordinates of H by NumPyro's Hamiltonian Monte Carlo.

    The kernel alone, in one program: `numpyro.infer.MCMC` compiles several, optimises them for
    longer than they run, and has no trajectories of random length.
    """

    def coordinates(whitened: Array) -> Array:
        return mode + (root @ whitened if root.ndim == 2 else root * whitened)

    key_lengths, key_chains = jax.random.split(key)
    num_iterations = config.num_warmup + config.num_samples
    # The same in all chains, which wait for each other.
    lengths = jax.random.randint(key_lengths, (num_iterations,), _MIN_LEAPFROGS, _MAX_LEAPFROGS + 1)

    def run_chain(key: Array) -> Array:
        key_start, key_kernel = jax.random.split(key)
        init, step = hmc(lambda place: -log_density(coordinates(place), stats), algo="HMC")
        state = init(
            0.5 * jax.random.normal(key_start, mode.shape),
            config.num_warmup,
            step_size=_FIRST_STEP_SIZE,
            inverse_mass_matrix=jnp.ones(mode.size),
            adapt_mass_matrix=False,
            target_accept_prob=_TARGET_ACCEPT_PROB,
            rng_key=key_kernel,
        )

        def iterate(state: Any, length: Array) -> tuple[Any, Array]:
            # NumPyro takes the least number of steps that covers a trajectory.
            trajectory = (length - 0.5) * state.adapt_state.step_size
            state = step(state._replace(trajectory_length=trajectory))
            return state, coordinates(state.z)

        return jax.lax.scan(iterate, state, lengths)[1][config.num_warmup :]

    keys = jax.random.split(key_chains, config.num_chains)
    if len(stats.noise) <= _MAX_VECTORIZED_DIM:
        return jax.vmap(run_chain)(keys)
    return jax.lax.map(run_chain, keys)


def _diagonal_components(stats: RegressionStats, rng: np.random.Generator) -> Components:
    """Every coordinate by itself: a grid over its log-curvature, all else in closed form."""
    h = np.exp(stats.log_centre + LOG_SPREAD * _GRID[:, None])  # [grid, d]
    within = -(0.5 * h**2 * stats.xx + h * stats.xg) / stats.noise
    intercepts = stats.g[None] + stats.x[None] * h[:, None]  # [grid, windows, d]
    precision = stats.weight.sum(axis=(1, 2))
    mean = np.einsum("jvw,kwj->kj", stats.weight, intercepts) / precision
    gap = intercepts - mean[:, None]
    between = -0.5 * np.einsum("jvw,kvj,kwj->kj", stats.weight, gap, gap, optimize=True)
    variance_of_g = h * (stats.sampling_share + _SHARED_INFORMATION) + 1 / precision
    spread = h**2 * stats.prior_variance + variance_of_g
    about_g = -0.5 * (mean - h * stats.prior_loc) ** 2 / spread - 0.5 * np.log(spread)
    log_weight = within + between + about_g - 0.5 * _GRID[:, None] ** 2
    weight = np.exp(log_weight - log_weight.max(axis=0))
    cumulative = np.cumsum(weight / weight.sum(axis=0), axis=0)
    variance = 1 / (1 / stats.prior_variance + h**2 / variance_of_g)
    loc = variance * (stats.prior_loc / stats.prior_variance + h * mean / variance_of_g)
    exact = 1 / (1 / stats.prior_variance + h / (1 + _SHARED_INFORMATION))

    dim = len(stats.noise)
    # Evenly spread ranks in random order: each coordinate's marginal is hit as well as it can be.
    ranks = (np.arange(_DIAGONAL_COMPONENTS) + 0.5) / _DIAGONAL_COMPONENTS
    ranks = rng.permuted(np.tile(ranks[:, None], (1, dim)), axis=0)
    chosen = np.stack(
        [np.searchsorted(cumulative[:, j], ranks[:, j] * cumulative[-1, j]) for j in range(dim)], 1
    )
    columns = np.arange(dim)
    return Components(
        loc[chosen, columns],
        np.sqrt(variance)[chosen, columns],
        exact[chosen, columns].mean(axis=0),
        h[chosen, columns].mean(axis=0),
        1.0,
    )
