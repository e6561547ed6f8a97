"""Running a NumPyro model on given rows and latent values, and reading off its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from dpvim.bridge.handler_stack import numpyro_lock
from dpvim.types import ModelError, Record, Scalar

Model = Callable[..., Any]
_WRAPPERS = (dist.ExpandedDistribution, dist.MaskedDistribution, dist.Independent)


class SiteDeclaration(NamedTuple):
    """A site as the model declares it, before anything is computed; latents have a support.

    Attributes:
        kind: Name of the distribution's class.
        is_mixture: True for NumPyro's mixtures of distributions.
    """

    is_param: bool
    is_latent: bool
    kind: str
    shape: tuple[int, ...]
    support: Any
    is_mixture: bool

    @classmethod
    def from_trace(cls, site: dict[str, Any]) -> SiteDeclaration:
        is_param = site["type"] == "param"
        is_latent = not (is_param or site["is_observed"])
        support = site["fn"].support if is_latent else None
        kind, inner = type(site["fn"]).__name__, site["fn"]
        while isinstance(inner, _WRAPPERS):
            inner = inner.base_dist
        is_mixture = "Mixture" in type(inner).__name__
        return cls(is_param, is_latent, kind, jnp.shape(site["value"]), support, is_mixture)


class ModelRunner:
    """Runs a model on rows and latent values that it is given. Keeps no data.

    Args:
        model: A NumPyro model.
        call: Calls a model with these rows as its data; see `ModelInput.call`.
    """

    def __init__(self, model: Model, call: Callable[[Model, Record], Any]) -> None:
        self._model = model
        self._call = call

    def declarations(
        self, data: Record, *, num_rows: int, shift: Scalar | float = 0.0
    ) -> dict[str, SiteDeclaration]:
        """The sites of the model with latents at arbitrary values; `shift` moves them.

        To be traced, not run: a model that is run operation by operation takes seconds to compile.
        """
        seeded = handlers.seed(self._model, rng_seed=0)
        placed = handlers.substitute(seeded, substitute_fn=_arbitrary_values(shift))
        sites = self._trace(placed, data, _RowPlates(num_rows))
        return {
            name: SiteDeclaration.from_trace(site)
            for name, site in sites.items()
            if site["type"] in ("sample", "param")
        }

    def prior_draw(self, data: Record, key: Array) -> dict[str, Any]:
        """The sites of the model with latents drawn from their priors."""
        return self._trace(handlers.seed(self._model, rng_seed=key), data, _RowPlates(1))

    def log_probs(
        self, values: dict[str, Array], data: Record, *, num_rows: int
    ) -> dict[str, Scalar]:
        """Log-probability of every sample site, without the scale of subsampled plates."""
        plates = _RowPlates(num_rows)
        model = handlers.seed(handlers.substitute(self._model, data=values), rng_seed=0)
        sites = self._trace(model, data, plates)
        return {
            name: jnp.sum(_log_prob(name, site)) * plates.user_scale(site)
            for name, site in sites.items()
            if site["type"] == "sample"
        }

    def replicates(
        self, values: dict[str, Array], names: Sequence[str], data: Record, key: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values of observed sites, and others drawn from their distributions in their place.

        A site whose distribution depends on what was observed at others is drawn given that.
        """
        model = handlers.seed(handlers.substitute(self._model, data=values), rng_seed=0)
        sites = self._trace(model, data, _RowPlates(1))
        keys = jax.random.split(key, len(names))
        drawn = {
            name: sites[name]["fn"].sample(each) for name, each in zip(names, keys, strict=True)
        }
        return {name: sites[name]["value"] for name in names}, drawn

    def _trace(self, model: Model, data: Record, plates: _RowPlates) -> dict[str, Any]:
        with numpyro_lock, numpyro.validation_enabled(False), handlers.trace() as sites, plates:
            self._call(model, data)
        return sites


def _log_prob(name: str, site: dict[str, Any]) -> Array:
    try:
        return site["fn"].log_prob(site["value"])
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"site {name!r}: expected values that its distribution ({type(site['fn']).__name__}) "
            f"has a density for, got some of shape {jnp.shape(site['value'])} ({error}). Do the "
            "shapes of the data go with the model?"
        ) from error


def _arbitrary_values(shift: Scalar | float) -> Callable[[dict[str, Any]], ArrayLike | None]:
    """Values in the supports of latents, moved by `shift` in a direction of their own each.

    They are not drawn from the priors, which takes seconds to compile.
    """
    rng = np.random.default_rng(7)

    def value(site: dict[str, Any]) -> ArrayLike | None:
        latent = site["type"] == "sample" and not site["is_observed"]
        if not latent or site["fn"].support.is_discrete:
            return None
        transform = biject_to(site["fn"].support)
        shape = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        raw, direction = rng.normal(scale=0.5, size=(2, *transform.inverse_shape(shape)))
        return transform(raw.astype(np.float32) + shift * direction.astype(np.float32))

    return value


class _RowPlates(numpyro.primitives.Messenger):
    """Turns off a plate's own subsampling: dpvim draws the batches.

    A plate ``(N, subsample_size=rows)`` or ``(rows, subsample_size=anything)`` is over the rows at
    hand. Other plates are left alone.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._sizes: dict[str, int] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        self._sizes[msg["name"]] = size
        if subsample_size is not None and self._num_rows in (size, subsample_size):
            msg["args"] = (size, self._num_rows)
            msg["value"] = jnp.arange(self._num_rows)

    def user_scale(self, site: dict[str, Any]) -> Any:
        """The scale that the user put on a site, without that of subsampled plates."""
        scale = 1.0 if site["scale"] is None else site["scale"]
        for frame in site["cond_indep_stack"]:
            scale = scale * frame.size / self._sizes.get(frame.name, frame.size)
        return scale
