"""`Posterior`, the public result: draws, densities, moments and intervals by site name."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim import _html, _validate
from dpvim._compile import single_precision
from dpvim._extras import require
from dpvim.bridge.handler_stack import numpyro_lock
from dpvim.bridge.latent_space import LatentSpace
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.posterior.reparametrised import ReparametrisedPosterior
from dpvim.privacy.randomness import fresh_key

if TYPE_CHECKING:
    import pandas as pd

    from dpvim.posterior.drawn import DrawnPosterior
    from dpvim.posterior.from_releases import GaussianMixture
    from dpvim.posterior.joint import JointPosterior

# Means and intervals of transformed sites come from this many draws with a fixed key, so that
# they are the same each time they are asked for.
_DRAWS = 20_000


@dataclasses.dataclass(frozen=True, repr=False)
class Posterior:
    """A distribution over the unconstrained latent, transformed to the model's sites.

    Attributes:
        latent_dist: A distribution from the trace, or a mixture or draws from the releases; the
            part of its spread that is DP noise, and the windows behind it.
        space: The model's sites.
        snapshot_steps: Steps between snapshots, to convert windows to steps.
        privacy: The privacy statement, as plain values.
        method: Source of the posterior: the ``releases``, the ``trace``, or the ``last`` iterate;
            or ``releases and trace``, if blocks of the latent differ in it.
        reason: Reason for this method.
        remarks: Reasons to doubt it that its distribution does not know of.
        methods: The source by coordinate of the latent, if blocks differ.

    >>> import dpvim, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> fit = dpvim.fit(model, np.full(2000, 2.0), epsilon=1.0, delta=1e-5)
    >>> draws = fit.posterior.sample(100)["mean"]
    >>> low, high = fit.posterior.interval(0.9)["mean"]
    >>> draws.shape, bool(low < high)
    ((100,), True)
    >>> fit.posterior.summary().columns.tolist()[:4]
    ['mean', 'sd', '5%', '95%']
    """

    latent_dist: (
        GaussianPosterior
        | ReparametrisedPosterior
        | GaussianMixture
        | DrawnPosterior
        | JointPosterior
    )
    space: LatentSpace
    snapshot_steps: int
    privacy: Mapping[str, Any]
    method: str = "trace"
    reason: str = "asked for"
    remarks: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None

    # -- the latent ----------------------------------------------------------------------------

    @property
    def loc(self) -> Float[np.ndarray, " d"]:
        """Mean of the unconstrained latent."""
        return self.latent_dist.loc

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations of the unconstrained latent."""
        return self.latent_dist.scale

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance of the unconstrained latent."""
        return self.latent_dist.covariance

    @property
    def dp_scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviation that the noise of the run adds to each coordinate."""
        return self.latent_dist.dp_scale

    @property
    def not_converged(self) -> list[str]:
        """Coordinates that failed their convergence test, by site and index: of the trace, or of
        the quadratic approximation of the log-likelihood."""
        converged = self.latent_dist.windows.converged & (not self.remarks)
        labels = self.space.raw_labels()
        return [label for label, passed in zip(labels, converged, strict=True) if not passed]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to doubt all of it, and what to do, a sentence each; of a steered run."""
        return (*self.remarks, *getattr(self.latent_dist, "doubts", ()))

    @property
    def clipped(self) -> float | None:
        """Share of the records whose gradients were longer than the clip norm in the last part of
        the run, as it was released; None if they were not counted."""
        return getattr(self.latent_dist, "clipped", None)

    # -- the sites -----------------------------------------------------------------------------

    @single_precision
    def sample(self, n: int, *, seed: int | None = None) -> dict[str, np.ndarray]:
        """`n` draws of every site, on its own scale: arrays of shape [n, ...] by site name."""
        n, seed = _validate.positive_int("n", n), _validate.seed("seed", seed)
        key = fresh_key() if seed is None else jax.random.key(seed)
        latents = jnp.asarray(self.latent_dist.draw(key, n), jnp.float32)
        sites = jax.vmap(self.space.constrain)(latents)
        return {name: np.asarray(value) for name, value in sites.items()}

    @single_precision
    def log_prob(self, values: Mapping[str, Any]) -> np.ndarray:
        """Log-density at values of all sites: one number, or one for each of a batch of values.

        The density is that of the sites on their own scales, as NumPyro counts it: that of the
        raw values less the log-Jacobian of the transform.
        """
        _validate.an_instance("values", values, Mapping, "a dict of values by the names of sites")
        sites = self.space.sites
        missing = {site.name for site in sites} ^ set(values)
        if missing:
            differing = ", ".join(sorted(map(str, missing)))
            raise ValueError(f"values: expected every site once, differing in {differing}.")
        batched = np.ndim(values[sites[0].name]) > len(sites[0].shape)

        def one(values: dict[str, Array]) -> tuple[Array, Array]:
            latent = self.space.unconstrain(values)
            return latent, self.space.log_det(latent)

        arrays = {name: jnp.asarray(value) for name, value in values.items()}
        latent, log_det = (jax.vmap(one) if batched else one)(arrays)
        log_density = self.latent_dist.log_density(np.asarray(latent, float))
        return np.asarray(log_density - np.asarray(log_det))

    @property
    def mean(self) -> dict[str, np.ndarray]:
        """Posterior means by site name."""
        return self._by_site(self.loc, lambda draws: draws.mean(axis=0))

    @property
    def std(self) -> dict[str, np.ndarray]:
        """Posterior standard deviations by site name."""
        return self._by_site(self.scale, lambda draws: draws.std(axis=0))

    def interval(self, probability: float = 0.9) -> dict[str, np.ndarray]:
        """Central intervals by site name: lower and upper end along the last axis."""
        probability = _validate.open_unit("probability", probability)
        tails = np.array([(1 - probability) / 2, (1 + probability) / 2])
        return self._by_site(
            self.latent_dist.quantiles(tails),
            lambda draws: np.moveaxis(np.quantile(draws, tails, axis=0), 0, -1),
        )

    def summary(self, probability: float = 0.9) -> pd.DataFrame:
        """A row for each entry of each site.

        Columns: mean, standard deviation, central interval, the share of the variance that is DP
        noise, the window (in steps) that it was estimated from, whether that converged, and the
        method. The reason for the method is in the table's ``attrs``.
        """
        import pandas as pd

        probability = _validate.open_unit("probability", probability)
        mean, std, interval = self.mean, self.std, self.interval(probability)
        tail = (1 - probability) / 2
        low, high = (f"{100 * t:g}%" for t in (tail, 1 - tail))
        tables = []
        for site, diagnostic in zip(self.space.sites, self._site_diagnostics(), strict=True):
            ends = interval[site.name].reshape(-1, 2)
            table = pd.DataFrame(
                {
                    "mean": mean[site.name].ravel(),
                    "sd": std[site.name].ravel(),
                    low: ends[:, 0],
                    high: ends[:, 1],
                    "dp_share": diagnostic.dp_share,
                    "window": diagnostic.window,
                    "converged": diagnostic.converged,
                    "method": diagnostic.method,
                },
                index=site.labels(),
            )
            tables.append(table)
        summary = pd.concat(tables)
        summary.attrs |= {"method": self.method, "reason": self.reason}
        if self.clipped is not None:
            summary.attrs |= {"clipped": self.clipped, "doubts": list(self.doubts)}
        return summary

    def predict(
        self,
        model: Callable[..., Any],
        *data: Any,
        num_samples: int = 1000,
        seed: int | None = None,
        **keyword_data: Any,
    ) -> dict[str, np.ndarray]:
        """Draws of the model's other sites given new covariates, by NumPyro's Predictive.

        Leave the observations out (or None), and they are predicted.
        """
        from numpyro.infer import Predictive

        _validate.seed("seed", seed)
        key = fresh_key() if seed is None else jax.random.key(seed)
        draws = self.sample(num_samples, seed=seed)
        with numpyro_lock:
            predicted = Predictive(model, posterior_samples=draws)(key, *data, **keyword_data)
        return {name: np.asarray(value) for name, value in predicted.items()}

    def to_arviz(self, num_samples: int = 4000, *, seed: int | None = None) -> Any:
        """Draws as an ArviZ InferenceData, with the privacy statement in its attributes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version
            arviz = require("arviz", extra="arviz")
        draws = {name: v[None] for name, v in self.sample(num_samples, seed=seed).items()}
        facts = {k: v for k, v in self.privacy.items() if isinstance(v, str | int | float)}
        facts = {k: int(v) if isinstance(v, bool) else v for k, v in facts.items()}
        return arviz.from_dict(posterior=draws, posterior_attrs=facts, attrs=facts)

    def __repr__(self) -> str:
        from dpvim.posterior.from_releases.hedge import HALF_PRIOR

        names = ", ".join(site.name for site in self.space.sites)
        left = len(self.not_converged)
        doubt = f", {left} of {self.loc.size} coordinates not converged" if left else ""
        if any(HALF_PRIOR in text for text in self.doubts):
            doubt += ", half of it the prior"
        if self.clipped is not None:
            doubt += f", {self.clipped:.1%} of the records clipped"
        source = f"from the {self.method} ({self.reason})"
        return f"<Posterior of {names} {source}: d={self.loc.size}{doubt}>"

    def _repr_html_(self) -> str:
        summary = self.summary()
        low, high = summary.columns[2:4]
        rows = [
            (
                name,
                *(f"{row[key]:.4g}" for key in ("mean", "sd", low, high)),
                f"{row['dp_share']:.0%}",
                "" if row["converged"] else "not converged",
            )
            for name, row in summary.iterrows()
        ]
        is_private = bool(self.privacy.get("private"))
        parts = [_html.paragraph(f"from the {self.method}: {self.reason}")]
        if not is_private:
            parts.append(_html.paragraph("NOT PRIVATE: do not publish it.", is_bad=True))
        if self.clipped is not None:
            parts.append(_html.paragraph(f"{self.clipped:.1%} of the records clipped"))
        parts += [_html.paragraph(text, is_bad=True) for text in self.doubts]
        parts.append(_html.table(["", "mean", "sd", low, high, "DP noise", ""], rows))
        title = f"Posterior of {self.loc.size} parameters"
        return _html.card(title, *parts, is_bad=bool(self.doubts) or not is_private)

    # -- private -------------------------------------------------------------------------------

    @functools.cached_property
    def _draws(self) -> dict[str, np.ndarray]:
        return self.sample(_DRAWS, seed=0)

    def _by_site(
        self, exact: np.ndarray, by_draws: Callable[[np.ndarray], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """A statistic by site name: from `exact`, which has a row for each coordinate, if the site
        has no transform, else from draws."""
        return {
            site.name: part.reshape(site.shape + exact.shape[1:])
            if site.is_identity
            else by_draws(self._draws[site.name])
            for site, part in zip(self.space.sites, self._split_by_site(exact), strict=True)
        }

    def _split_by_site(self, values: np.ndarray) -> list[np.ndarray]:
        """Split an array with a row for each coordinate of the latent into the sites' parts."""
        return np.split(values, np.cumsum([site.raw_size for site in self.space.sites])[:-1])

    @single_precision
    def _site_diagnostics(self) -> list[_SiteDiagnostics]:
        """DP share, window and convergence of each entry of each site, by the delta method."""
        windows = self.latent_dist.windows
        methods = self.methods or (self.method,) * self.loc.size
        every = (*(self.loc, self.scale, self.dp_scale), *windows, methods)
        parts = [self._split_by_site(np.asarray(values)) for values in every]
        diagnostics = []
        for site, loc, scale, dp_scale, lengths, converged, method in zip(
            self.space.sites, *parts, strict=True
        ):
            jacobian = np.eye(loc.size) if site.is_identity else np.asarray(site.jacobian(loc))
            used = np.abs(jacobian) > 0
            total = jacobian**2 @ scale**2
            share = np.divide(jacobian**2 @ dp_scale**2, total, where=total > 0, out=total * 0)
            shortest = np.where(used, lengths, np.iinfo(np.int64).max).min(axis=1)
            diagnostics.append(
                _SiteDiagnostics(
                    share,
                    (shortest - 1) * self.snapshot_steps,
                    (converged | ~used).all(axis=1) & (not self.remarks),
                    method[used.argmax(axis=1)],
                )
            )
        return diagnostics


@dataclasses.dataclass(frozen=True)
class _SiteDiagnostics:
    dp_share: np.ndarray
    window: np.ndarray
    converged: np.ndarray
    method: np.ndarray
