r"""The posterior of a steered run with the model's own prior.

The closed form of `steered` has independent Gaussians for a prior. With p the model's density of
the unconstrained latent and :math:`\tilde p` that of the Gaussians, the posterior is

.. math:: \pi(\theta) \propto \tilde\pi(\theta) \, p(\theta) / \tilde p(\theta),

with :math:`\tilde\pi` the closed form: the likelihood of the releases is its ratio to
:math:`\tilde p`. Where the weights :math:`p / \tilde p` hardly differ over the closed form, it
stays as it is, and nothing is sampled. Where they do the prior is something else than independent
Gaussians, mostly a hierarchy, and the posterior is sampled by Hamiltonian Monte Carlo. So groups
are pooled, and what only the prior knows (mean and spread of a population) is learnt from what is
in the likelihood.

All of it is a function of releases and of the model's prior: no data, no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim._compile import jit_once, jit_quickly, single_precision
from dpvim.inference.steering import SteeredReleases
from dpvim.posterior.convergence import Windows
from dpvim.posterior.drawn import DrawnPosterior
from dpvim.posterior.from_releases import GaussianMixture
from dpvim.posterior.from_releases.hedge import hedged
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_releases.steered import ClosedForm, closed_form
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Latent, LogPrior, Scalar

# Weights with a larger effective share leave the closed form as it is: they move it by at most a
# quarter of a standard deviation. Shares of hierarchies are far below, those of other models above.
_SHARE_OF_GAUSSIAN = 0.95
_WEIGHED_DRAWS = 2000
# Components of the mixture that the sampler sees: fewer where each of them costs more.
_MOST_COMPONENTS, _LEAST_COMPONENTS, _COMPONENT_ENTRIES = 64, 16, 2**18
_CHAINS, _WARMUP, _SAMPLES = 4, 500, 1000
# Leapfrog steps of a trajectory; they vary so that none comes back to its beginning every time.
_MIN_LEAPFROGS, _MAX_LEAPFROGS = 4, 20
_TARGET_ACCEPT_PROB = 0.9
# Doubts: of chains that disagree, that hardly move, or that meet places too narrow for them.
_MAX_R_HAT, _LEAST_EFFECTIVE, _MAX_DIVERGING = 1.05, 100, 0.01
SAMPLER_DOUBT = (
    "the posterior with the model's prior was sampled badly: the prior has places that are too "
    "narrow, such as a spread of groups close to zero. Give spreads a prior that keeps away from "
    "zero, or take more records or a larger epsilon."
)


class PriorDraws(NamedTuple):
    """Draws of the posterior with the model's own prior.

    Attributes:
        latents: The draws.
        r_hat: The largest ratio of total to within-chain spread.
        effective: The least effective number of draws.
        diverging: Share of the draws whose trajectories diverged.
    """

    latents: Float[np.ndarray, "n d"]
    r_hat: Float[np.ndarray, ""]
    effective: Float[np.ndarray, ""]
    diverging: Float[np.ndarray, ""]

    @property
    def are_good(self) -> bool:
        """True if the sampler had no trouble."""
        mixed = self.r_hat <= _MAX_R_HAT and self.effective >= _LEAST_EFFECTIVE
        return bool(mixed and self.diverging <= _MAX_DIVERGING)


def posterior_from_windows(
    releases: SteeredReleases,
    plan: PrivacyPlan,
    prior: GaussianPrior,
    *,
    log_prior: LogPrior | None = None,
    draws: PriorDraws | None = None,
    snapshot_steps: int = 1,
    is_mixture: bool = False,
) -> tuple[GaussianMixture | DrawnPosterior, PriorDraws | None]:
    """Infer the posterior from the windows of a steered run, with the model's prior.

    Args:
        releases: The windows; all narrow ones must be there.
        plan: The plan of the run.
        prior: Gaussians that stand for the model's prior.
        log_prior: The log-density of the model's prior. Without it, and without draws, the
            Gaussians are taken for it.
        draws: Draws of this posterior that were made before.
        snapshot_steps: Steps between snapshots of the trace, the unit of windows.
        is_mixture: Whether the model's likelihood is a mixture.

    Returns:
        The posterior, and its draws if the closed form would not do.
    """
    closed = closed_form(
        releases, plan, prior, snapshot_steps=snapshot_steps, is_mixture=is_mixture
    )
    if draws is None and log_prior is not None:
        draws = draws_with_prior(closed.mixture, prior, log_prior)
    found = closed.mixture if draws is None else _drawn(closed, draws)
    is_grave = closed.is_gravely_doubted or not (draws is None or draws.are_good)
    return (hedged(found, prior) if is_grave else found), draws


@single_precision
def draws_with_prior(
    mixture: GaussianMixture, prior: GaussianPrior, log_prior: LogPrior, *, seed: int = 0
) -> PriorDraws | None:
    """Draw from the posterior that has `log_prior` where `mixture` has `prior`.

    Args:
        mixture: The posterior with the Gaussians.
        prior: The Gaussians.
        log_prior: The log-density that they stand for.
        seed: The same each time.

    Returns:
        The draws; None if `mixture` would hardly change.
    """
    programs = _compiled(log_prior)

    def log_weights_of(drawn: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        exact = np.asarray(programs.log_priors(np.asarray(drawn, np.float32)), float)
        logs = exact + 0.5 * np.square((drawn - prior.loc) / prior.scale).sum(axis=1)
        return np.where(np.isfinite(logs), logs, -np.inf)

    # In NumPy: most models end here, and compile nothing but their prior.
    components = len(mixture.locs)
    size = (components, -(-_WEIGHED_DRAWS // components), mixture.loc.size)
    eta = np.random.default_rng(seed).normal(size=size)
    evenly = mixture.locs[:, None] + eta @ mixture.factors.swapaxes(1, 2)
    log_weights = log_weights_of(evenly.reshape(-1, mixture.loc.size))
    weights = np.exp(log_weights - log_weights.max())
    if weights.sum() ** 2 > _SHARE_OF_GAUSSIAN * len(weights) * np.square(weights).sum():
        return None
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

    key_weigh, key_sample = jax.random.split(jax.random.key(seed))
    drawn = mixture.draw(key_weigh, _WEIGHED_DRAWS)
    log_weights = log_weights_of(drawn)
    # Chains start at draws that the weights choose.
    ranks = log_weights + np.random.default_rng(seed).gumbel(size=len(drawn))
    away = drawn[np.argsort(-ranks)[:_CHAINS]] - mixture.loc
    root = np.linalg.cholesky(mixture.covariance)
    starts = jnp.asarray(np.linalg.solve(root, away.T).T, jnp.float32)
    keys = jax.random.split(key_sample, _CHAINS)
    found = programs.sample(keys, starts, _Target.of(mixture, prior))
    whitened, diverging = (np.asarray(part, float) for part in found)
    with np.errstate(invalid="ignore", divide="ignore"):  # of chains that do not move
        r_hat = np.max(split_gelman_rubin(whitened))
        effective = np.min(effective_sample_size(whitened))
    latents = mixture.loc + whitened.reshape(-1, len(root)) @ root.T
    return PriorDraws(
        latents,
        np.array(np.nan_to_num(r_hat, nan=1e6, posinf=1e6), float),
        np.array(np.nan_to_num(effective, nan=0.0, posinf=0.0), float),
        np.array(diverging.mean()),
    )


class _Target(NamedTuple):
    """The closed form and the Gaussians that are its prior, in units of the former's covariance.

    Attributes:
        loc, root: Mean of the closed form, and the Cholesky factor of its covariance.
        roots, locs: Of each component: the root of its precision, and that root times its mean.
        log_dets: Log-determinants of these roots.
        prior_root, prior_loc: The same of the prior.
    """

    loc: Float[Array, " d"]
    root: Float[Array, "d d"]
    roots: Float[Array, "m d d"]
    locs: Float[Array, "m d"]
    log_dets: Float[Array, " m"]
    prior_root: Float[Array, "d d"]
    prior_loc: Float[Array, " d"]

    @classmethod
    def of(cls, mixture: GaussianMixture, prior: GaussianPrior) -> _Target:
        loc, root = mixture.loc, np.linalg.cholesky(mixture.covariance)
        most = _COMPONENT_ENTRIES // loc.size**2
        chosen = slice(int(np.clip(most, _LEAST_COMPONENTS, _MOST_COMPONENTS)))
        roots = np.linalg.solve(mixture.factors[chosen], root)
        locs = np.linalg.solve(mixture.factors[chosen], (mixture.locs[chosen] - loc)[..., None])
        parts = (
            *(loc, root, roots, locs[..., 0], np.linalg.slogdet(roots)[1]),
            *(root / prior.scale[:, None], (prior.loc - loc) / prior.scale),
        )
        return cls(*(jnp.asarray(part, jnp.float32) for part in parts))

    def log_likelihood(self, whitened: Latent) -> Scalar:
        """The log-likelihood of the releases, up to a constant."""
        # One product for all components: a batch of small ones is several times slower.
        moved = (self.roots.reshape(-1, whitened.size) @ whitened).reshape(self.locs.shape)
        squares = jnp.square(moved - self.locs).sum(axis=1)
        closed = jax.nn.logsumexp(self.log_dets - 0.5 * squares)
        return closed + 0.5 * jnp.square(self.prior_root @ whitened - self.prior_loc).sum()

    def latent(self, whitened: Latent) -> Latent:
        return self.loc + self.root @ whitened


class _Programs(NamedTuple):
    log_priors: Callable[..., Any]
    sample: Callable[..., Any]


@functools.lru_cache(maxsize=4)
def _compiled(log_prior: LogPrior) -> _Programs:
    """Programs for a prior: fits of one model share them."""

    def run_chain(key: Array, start: Array, target: _Target, lengths: Array) -> tuple[Array, Array]:
        from numpyro.infer.hmc import hmc

        init, step = hmc(
            lambda place: -(target.log_likelihood(place) + log_prior(target.latent(place))),
            algo="HMC",
        )
        state = init(
            start,
            _WARMUP,
            dense_mass=True,
            target_accept_prob=_TARGET_ACCEPT_PROB,
            rng_key=key,
        )

        def iterate(state: Any, length: Array) -> tuple[Any, tuple[Array, Array]]:
            # NumPyro takes the least number of steps that covers a trajectory.
            trajectory = (length - 0.5) * state.adapt_state.step_size
            state = step(state._replace(trajectory_length=trajectory))
            return state, (state.z, state.diverging)

        places, diverging = jax.lax.scan(iterate, state, lengths)[1]
        return places[_WARMUP:], diverging[_WARMUP:]

    def sample(keys: Array, starts: Array, target: _Target) -> tuple[Array, Array]:
        """Draws and divergences by chain; the kernel alone, in one program, as in `curvature`."""
        # The same lengths in all chains, which wait for each other.
        lengths = jax.random.randint(
            keys[0], (_WARMUP + _SAMPLES,), _MIN_LEAPFROGS, _MAX_LEAPFROGS + 1
        )
        return jax.vmap(run_chain, in_axes=(0, 0, None, None))(keys, starts, target, lengths)

    return _Programs(jit_once(jax.vmap(log_prior)), jit_quickly(sample))


def _drawn(closed: ClosedForm, draws: PriorDraws) -> DrawnPosterior:
    mixture = closed.mixture
    doubts = mixture.doubts + (SAMPLER_DOUBT,) * (not draws.are_good)
    found = DrawnPosterior(
        draws.latents,
        np.zeros(mixture.loc.size),
        Windows(mixture.windows.lengths, np.full(mixture.loc.size, not doubts)),
        mixture.p_values,
        doubts,
        mixture.clipped,
    )
    return found._replace(dp_scale=_dp_scale(closed, found.covariance))


def _dp_scale(closed: ClosedForm, covariance: Float[np.ndarray, "d d"]) -> np.ndarray:
    """Standard deviation that the noise adds, as if all of it were Gaussian.

    The noise takes the same precision away whatever the prior is.
    """
    before = np.linalg.cholesky(closed.mixture.covariance)
    lost = before.T @ np.linalg.solve(closed.without_noise, before) - np.eye(len(before))
    values, vectors = np.linalg.eigh(lost)
    lost_root = (vectors * np.sqrt(np.maximum(values, 0))).T @ np.linalg.inv(before)
    root = np.linalg.cholesky(covariance)
    in_units = lost_root @ root
    without_noise = root @ np.linalg.solve(np.eye(len(root)) + in_units.T @ in_units, root.T)
    added = covariance - without_noise
    return np.sqrt(np.maximum(0.0, np.diagonal(added)))
