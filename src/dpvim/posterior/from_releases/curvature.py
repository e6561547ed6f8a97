r"""The model behind an honest posterior: optimum, curvature and what was released of them.

.. math::

    \theta \sim N(\mu_0, \Sigma_0), \qquad
    H = S A A' S, \quad \log S_j^2 \sim N, \; A \text{ unit lower rows}, \qquad
    g \mid \theta, H \sim N(H (\theta - r), H), \qquad
    \text{releases} \mid g, H.

How far the rows of A are from those of the identity is tau, one number for all, which is learnt as
well. The third line is the likelihood of a quadratic: its maximum is the true parameter plus
:math:`N(0, H^{-1})`, and g, the gradient at r, is H times the maximum's distance from r. Given H
all the rest is Gaussian and is integrated out in closed form, so only H is sampled: by Hamiltonian
Monte Carlo, preconditioned with the curvature of its own log-density at the mode. The posterior of
theta is then a mixture of Gaussians, one for each H.

Where only diagonals were kept H is diagonal, its coordinates are independent, and the posterior of
each is a sum over a grid.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize

from dpvim._compile import jit_once, jit_quickly
from dpvim.posterior.from_releases.linalg import inverse_and_log_det
from dpvim.posterior.from_releases.regression import LOG_SPREAD, Evidence

# Above this many numbers in H the preconditioner is diagonal.
_LARGEST_DENSE = 1200
_PROBES = 64
_LARGEST_TOGETHER = 30
# The least precision of the preconditioner: a bit below that of the prior, which is 1.
_SOFTEST = 0.3
_ACCEPTANCE = 0.8
_GRID = np.linspace(-4.0, 4.0, 161)
_DIAGONAL_COMPONENTS = 512
# tau is the logistic function of a normal with this standard deviation: anything from nothing to
# as much as a coordinate's own. One number for all pairs: those whose curvature the releases tell
# speak for those they do not.
_SHARING_SPREAD = 1.5
# A coordinate's information that it shares with others, which a diagonal H does not see, counts as
# so much additional variance of g: half of the information of a coordinate is shared a priori.
_NEGLECTED = 1.0


class Components(NamedTuple):
    """Gaussians of equal weight, the posterior of theta - r given each sampled H.

    Attributes:
        loc: Means.
        factor: Cholesky factors of the covariances, or standard deviations for a diagonal H.
        spread_without_noise: Variance of each coordinate had g and H been released exactly.
        curvature: Mean of H, or of its diagonal.
        r_hat: Largest ratio, over the coordinates of theta, of total to within-chain spread: 1 if
            the sampler has mixed.
    """

    loc: Float[np.ndarray, "components d"]
    factor: Float[np.ndarray, "components d d"] | Float[np.ndarray, "components d"]
    spread_without_noise: Float[np.ndarray, " d"]
    curvature: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]
    r_hat: float


class Effort(NamedTuple):
    """How long the sampler runs."""

    chains: int
    warm_up: int
    draws: int


def default_effort(dim: int) -> Effort:
    """Seconds, whatever the dimension."""
    if dim <= 30:
        return Effort(8, 150, 125)
    return Effort(4, 80, 80)


def posterior_components(
    evidence: Evidence, *, seed: int = 0, effort: Effort | None = None
) -> Components:
    """The posterior of theta - r as a mixture; the same each time it is asked for."""
    with jax.enable_x64(True):
        if evidence.xx.ndim == 1:
            return _diagonal_components(evidence, np.random.default_rng(seed))
        effort = default_effort(len(evidence.noise)) if effort is None else effort
        return _full_components(evidence, jax.random.key(seed), effort)


def num_coordinates(dim: int) -> int:
    """How many numbers H is made of: tau, the diagonal, and what is below it."""
    return 1 + dim * (dim + 1) // 2


def curvature_of(flat: Array, evidence: Evidence) -> Float[Array, "d d"]:
    """H from coordinates that are independent standard normals a priori."""
    dim = evidence.noise.shape[0]
    sharing, diagonal, off_diagonal = flat[0], flat[1 : dim + 1], flat[dim + 1 :]
    # A row's entries below the diagonal have a sum of squares of about tau^2, its diagonal has 1.
    tau = jax.nn.sigmoid(_SHARING_SPREAD * sharing)
    share = tau / np.sqrt(np.maximum(1, np.arange(dim)))
    # Looked up from the flat vector; what is not below the diagonal is its last entry, a zero.
    places = np.full((dim, dim), off_diagonal.size)
    places[np.tril_indices(dim, -1)] = np.arange(off_diagonal.size)
    below = jnp.append(off_diagonal, 0.0)[places] * share[:, None]
    unit = jnp.eye(dim) + below
    unit = unit / jnp.linalg.norm(unit, axis=1, keepdims=True)
    factor = jnp.exp(0.5 * (evidence.log_centre + LOG_SPREAD * diagonal))[:, None] * unit
    return factor @ factor.T


def log_density(flat: Array, evidence: Evidence) -> Array:
    """Log-density of H's coordinates given the releases, up to a constant; theta and g are out."""
    h = curvature_of(flat, evidence)
    noise = evidence.noise[:, None]
    within = -0.5 * jnp.sum((h @ evidence.xx) * h / noise) - jnp.sum(h * evidence.xg.T / noise)
    mean, precision, between = _level(h, evidence)
    of_g = evidence.sampling_share * h + jnp.diag(1 / precision)
    spread = (h * evidence.prior_variance) @ h + of_g
    inverse, log_det = inverse_and_log_det(spread)
    gap = mean - h @ evidence.prior_loc
    about_g = -0.5 * gap @ inverse @ gap - 0.5 * log_det
    total = within + between + about_g - 0.5 * flat @ flat
    return jnp.where(jnp.isfinite(total), total, -1e30)


def _level(h: Array, evidence: Evidence) -> tuple[Array, Array, Array]:
    """g as the windows tell it given H: mean, precision, and how well the windows agree."""
    level = evidence.g + evidence.x @ h
    precision = evidence.weight.sum(axis=(1, 2))
    mean = jnp.einsum("jvw,wj->j", evidence.weight, level) / precision
    gap = level - mean
    return mean, precision, -0.5 * jnp.einsum("jvw,vj,wj->", evidence.weight, gap, gap)


@jit_once
def _theta_given(
    flats: Float[Array, "m k"], evidence: Evidence
) -> tuple[Array, Array, Array, Array]:
    """For each H: mean and Cholesky factor of theta - r. And over all of them: mean variances had g
    been known exactly, and the mean of H."""
    prior_precision = jnp.diag(1 / evidence.prior_variance)

    def one(flat: Array) -> tuple[Array, Array, Array, Array]:
        h = curvature_of(flat, evidence)
        mean, precision, _ = _level(h, evidence)
        of_g, _ = inverse_and_log_det(evidence.sampling_share * h + jnp.diag(1 / precision))
        covariance, _ = inverse_and_log_det(h @ of_g @ h + prior_precision)
        loc = covariance @ (evidence.prior_loc / evidence.prior_variance + h @ of_g @ mean)
        exact = jnp.diagonal(inverse_and_log_det(h + prior_precision)[0])
        return loc, jnp.linalg.cholesky(covariance), exact, h

    loc, factor, exact, h = jax.lax.map(one, flats)
    return loc, factor, exact.mean(axis=0), h.mean(axis=0)


def _full_components(evidence: Evidence, key: Array, effort: Effort) -> Components:
    evidence = jax.tree.map(jnp.asarray, evidence)
    mode = _find_mode(evidence)
    chains = _sample(mode, _preconditioner(mode, evidence), evidence, key, effort)
    flat = chains.reshape(-1, chains.shape[-1])
    loc, factor, exact, h = (np.asarray(part) for part in _theta_given(flat, evidence))
    by_chain = loc.reshape(*chains.shape[:2], -1)
    within = np.square(factor).sum(axis=2).mean(axis=0) + by_chain.var(axis=0).mean(axis=0)
    r_hat = float(np.sqrt(1 + np.max(by_chain.mean(axis=0).var(axis=0) / within)))
    return Components(loc, factor, exact, h, r_hat)


_value_and_grad = jit_once(jax.value_and_grad(lambda flat, e: -log_density(flat, e)))


def _find_mode(evidence: Evidence) -> Array:
    dim = len(evidence.noise)
    found = optimize.minimize(
        lambda flat: tuple(np.asarray(part) for part in _value_and_grad(flat, evidence)),
        np.zeros(num_coordinates(dim)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 200},
    )
    return jnp.asarray(found.x)


def _preconditioner(mode: Array, evidence: Evidence) -> Array:
    """A matrix (or a vector of scales) that makes the density round near its mode."""
    if mode.size <= _LARGEST_DENSE:
        values, vectors = np.linalg.eigh(np.asarray(_hessian(mode, evidence)))
        return jnp.asarray(vectors / np.sqrt(np.maximum(values, _SOFTEST)))
    diagonal = _hessian_diagonal(mode, evidence)
    return 1 / jnp.sqrt(jnp.maximum(diagonal, _SOFTEST))


@jit_once
def _hessian(mode: Array, evidence: Evidence) -> Array:
    return jax.hessian(lambda flat: -log_density(flat, evidence))(mode)


@jit_once
def _hessian_diagonal(mode: Array, evidence: Evidence) -> Array:
    """Its diagonal from products with random signs."""

    def gradient(flat: Array) -> Array:
        return jax.grad(lambda f: -log_density(f, evidence))(flat)

    def one(key: Array) -> Array:
        signs = jax.random.rademacher(key, mode.shape, mode.dtype)
        return signs * jax.jvp(gradient, (mode,), (signs,))[1]

    return jax.lax.map(one, jax.random.split(jax.random.key(0), _PROBES)).mean(axis=0)


class _Chain(NamedTuple):
    place: Array
    log_density: Array
    gradient: Array
    log_step: Array
    settled_log_step: Array


@partial(jit_quickly, static_argnames="effort")
def _sample(mode: Array, root: Array, evidence: Evidence, key: Array, effort: Effort) -> Array:
    """Draws [draws, chains, coordinates of H] by Hamiltonian Monte Carlo."""

    def out(place: Array) -> Array:
        return mode + (place @ root.T if root.ndim == 2 else place * root)

    one_density = jax.value_and_grad(lambda place: log_density(out(place), evidence))
    # Factorisations of large matrices are faster one after the other.
    in_turn = len(evidence.noise) > _LARGEST_TOGETHER
    density = partial(jax.lax.map, one_density) if in_turn else jax.vmap(one_density)

    def leap(number: int, moving: tuple[Array, ...]) -> tuple[Array, ...]:
        place, momentum, value, gradient, step = moving
        momentum = momentum + 0.5 * step * gradient
        place = place + step * momentum
        value, gradient = density(place)
        return place, momentum + 0.5 * step * gradient, value, gradient, step

    def move(chain: _Chain, number_and_key: tuple[Array, Array]) -> tuple[_Chain, Array]:
        number, key = number_and_key
        warming = number < effort.warm_up
        key_momentum, key_length, key_accept = jax.random.split(key, 3)
        step = jnp.exp(jnp.where(warming, chain.log_step, chain.settled_log_step))
        momentum = jax.random.normal(key_momentum, chain.place.shape)
        start = (chain.place, momentum, chain.log_density, chain.gradient, step)
        # Lengths vary so that no trajectory comes back to where it began every time.
        length = jax.random.randint(key_length, (), 3, 12)
        place, end, value, gradient, _ = jax.lax.fori_loop(0, length, leap, start)
        energy_gain = value - chain.log_density + 0.5 * (momentum**2 - end**2).sum(axis=1)
        accept = jnp.exp(jnp.minimum(0.0, jnp.where(jnp.isnan(energy_gain), -jnp.inf, energy_gain)))
        taken = jax.random.uniform(key_accept, accept.shape) < accept
        log_step = chain.log_step + jnp.where(
            warming, 2 * (accept.mean() - _ACCEPTANCE) / jnp.sqrt(number + 4.0), 0.0
        )
        averaged = number - effort.warm_up // 2  # the first half of the warm-up finds the range
        settled = jnp.where(
            averaged < 1,
            log_step,
            chain.settled_log_step + (log_step - chain.settled_log_step) / (averaged + 1),
        )
        after = _Chain(
            jnp.where(taken[:, None], place, chain.place),
            jnp.where(taken, value, chain.log_density),
            jnp.where(taken[:, None], gradient, chain.gradient),
            log_step,
            jnp.where(warming, settled, chain.settled_log_step),
        )
        return after, out(after.place)

    key_start, key_moves = jax.random.split(key)
    place = 0.5 * jax.random.normal(key_start, (effort.chains, mode.size))
    first_step = jnp.log(jnp.asarray(0.3))
    value, gradient = density(place)
    chain = _Chain(place, value, gradient, first_step, first_step)
    total = effort.warm_up + effort.draws
    moves = (jnp.arange(total), jax.random.split(key_moves, total))
    return jax.lax.scan(move, chain, moves)[1][effort.warm_up :]


def _diagonal_components(evidence: Evidence, rng: np.random.Generator) -> Components:
    """Every coordinate by itself: a grid over its log-curvature, all else in closed form."""
    h = np.exp(evidence.log_centre + LOG_SPREAD * _GRID[:, None])  # [grid, d]
    within = -(0.5 * h**2 * evidence.xx + h * evidence.xg) / evidence.noise
    level = evidence.g[None] + evidence.x[None] * h[:, None]  # [grid, windows, d]
    precision = evidence.weight.sum(axis=(1, 2))
    mean = np.einsum("jvw,kwj->kj", evidence.weight, level) / precision
    gap = level - mean[:, None]
    between = -0.5 * np.einsum("jvw,kvj,kwj->kj", evidence.weight, gap, gap, optimize=True)
    of_g = h * (evidence.sampling_share + _NEGLECTED) + 1 / precision
    spread = h**2 * evidence.prior_variance + of_g
    about_g = -0.5 * (mean - h * evidence.prior_loc) ** 2 / spread - 0.5 * np.log(spread)
    log_weight = within + between + about_g - 0.5 * _GRID[:, None] ** 2
    weight = np.exp(log_weight - log_weight.max(axis=0))
    cumulative = np.cumsum(weight / weight.sum(axis=0), axis=0)
    variance = 1 / (1 / evidence.prior_variance + h**2 / of_g)
    loc = variance * (evidence.prior_loc / evidence.prior_variance + h * mean / of_g)
    exact = 1 / (1 / evidence.prior_variance + h / (1 + _NEGLECTED))

    dim = len(evidence.noise)
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
