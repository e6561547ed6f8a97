"""Faults in the ways to a clipped sum: autodiff, look-ups, regressions, the mixture, batches."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from planting import Fault, everywhere, patch

from dpvim.bridge import gather_gradients
from dpvim.bridge import model as bridge
from dpvim.inference import variants
from dpvim.models import mixture_sum, regression
from dpvim.models.level_tables import LevelTables
from dpvim.models.mixture_response import ResponseTerm
from dpvim.models.regression import Regression
from dpvim.models.stick_breaking import StickBreaking
from dpvim.privacy import batches, clipping

# -- autodiff and look-ups ------------------------------------------------------------------------


@contextmanager
def _jacobian_after_the_clip() -> Iterator[None]:
    """Rows are clipped at the values of the sites, and the sum is carried to the latent."""
    seen: dict[str, Any] = {}

    def make_gradients(old: Any) -> Any:
        def faulty(log_prob: Any, space: Any, latent: Any, batch: Any) -> Any:
            if any(site.raw_shape != site.shape for site in space.sites):
                seen.clear()
                return old(log_prob, space, latent, batch)
            seen.update(space=space, latent=latent)
            by_site = jax.vmap(jax.grad(log_prob), (None, 0))(space.constrain(latent), batch)
            rows = [by_site[s.name].reshape(len(by_site[s.name]), -1) for s in space.sites]
            return jnp.concatenate(rows, axis=1)

        return faulty

    def make_sum(old: Any) -> Any:
        def faulty(*args: Any) -> Any:
            total = old(*args)
            if not seen:
                return total
            space, latent = seen.pop("space"), seen.pop("latent")
            if space.dim != len(total):  # seen when another model was set up
                return total

            def values(latent: Any) -> Any:
                return space.pack(space.constrain(latent))

            slopes = jax.jvp(values, (latent,), (jnp.ones_like(latent),))[1]
            with jax.enable_x64(True):
                return total * slopes.astype(jnp.float64)

        return faulty

    with (
        patch(bridge, "gradients_by_record", make_gradients),
        patch(clipping, "clipped_sum", make_sum),
    ):
        yield


def _clip_before_the_weights() -> Any:
    """The norm of the latent's gradient is clipped where that of what is released should be."""

    def make(old: Any) -> Any:
        return lambda gradients, weights, *rest: old(gradients, None, *rest)

    return patch(clipping, "clipped_sum", make)


def _of_batch(change: Callable[[Any], Any]) -> Any:
    """Gradients of a batch in which something was done to whole columns."""

    def make(old: Any) -> Any:
        def faulty(log_prob: Any, space: Any, latent: Any, batch: Any) -> Any:
            return old(log_prob, space, latent, jax.tree.map(change, batch))

        return faulty

    return patch(bridge, "gradients_by_record", make)


def _less_the_mean(column: Any) -> Any:
    """Records are centred by the batch they are in."""
    return column - column.mean(axis=0) if jnp.issubdtype(column.dtype, jnp.floating) else column


def _of_the_neighbour(column: Any) -> Any:
    return jnp.roll(column, 1) if jnp.issubdtype(column.dtype, jnp.integer) else column


def _slopes_of_the_next_level() -> Any:
    def make(old: Any) -> Any:
        return lambda self, gradient, slopes, where: old(self, gradient, slopes, where + 1)

    return patch(gather_gradients._Gather, "pull_back", make)


def _slopes_outside_of_the_table() -> Any:
    """A place outside has the slopes of the nearest one inside."""

    def make(old: Any) -> Any:
        def faulty(self: Any, table: Any, where: Any, numbers: Any, sizes: Any) -> Any:
            params = self.params | {"mode": jax.lax.GatherScatterMode.CLIP}
            return old(self._replace(params=params), table, where, numbers, sizes)

        return faulty

    return patch(gather_gradients._Gather, "_gather", make)


# -- regressions ----------------------------------------------------------------------------------


def _norm_without_the_intercept() -> Any:
    """Its feature is one, and so is its square."""

    def make(old: Any) -> Any:
        def faulty(self: Any, *args: Any) -> Any:
            batch = old(self, *args)
            return batch._replace(squares=batch.squares - self.intercept)

        return faulty

    return patch(Regression, "batch_of", make)


def _norm_without_the_noise_scale() -> Any:
    class Forgetful(types.ModuleType):
        hypot = staticmethod(lambda a, b: a)

        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

    return mock.patch.object(regression, "jnp", Forgetful("numpy"))


def _norms_of_covariates_kept() -> Any:
    """Those that were computed once for all steps, though the weights change."""

    def make(old: Any) -> Any:
        def faulty(self: Any, space: Any, latent: Any, weights: Any, batch: Any, *rest: Any) -> Any:
            with mock.patch.object(regression, "_squared_norms", return_value=batch.squares):
                return old(self, space, latent, weights, batch, *rest)

        return faulty

    return patch(Regression, "_clipped_sum", make)


def _squares_that_underflow() -> Any:
    return mock.patch.object(regression, "_squared_norms", lambda rows: jnp.sum(rows**2, axis=1))


def _norm_of_the_score_alone() -> Any:
    return mock.patch.object(regression, "_squared_norms", lambda rows: jnp.ones(len(rows)))


def _infinite_scores_clamped() -> Any:
    return mock.patch.object(regression, "finite_or_nan", clipping.clamp)


def _factors(owner: Any, change: Callable[[Any, Any, Any, float], Any]) -> Any:
    """Factors of a model's own sum that follow another rule."""

    def make(old: Any) -> Any:
        return lambda norms, is_padding, bound: change(old, norms, is_padding, bound)

    return patch(owner, "clip_factors", make)


def _minimum_passes_over_nan(old: Any, norms: Any, is_padding: Any, bound: float) -> Any:
    return jnp.where(jnp.isnan(norms) & ~is_padding, 1.0, old(norms, is_padding, bound))


def _padding_counted(old: Any, norms: Any, is_padding: Any, bound: float) -> Any:
    return old(norms, jnp.zeros_like(is_padding), bound)


# -- the mixture ----------------------------------------------------------------------------------


def _norm_without_levels(is_left_out: Callable[[int], bool]) -> Any:
    """Norms without the part of columns (or coins) with so many levels."""

    def make(old: Any) -> Any:
        def faulty(self: Any, *args: Any) -> Any:
            sizes = np.diff([*self.first, self.num_levels])
            kept = np.repeat([not is_left_out(size) for size in sizes], sizes)
            return old(self, *args) * kept[:, None]

        return faulty

    return patch(StickBreaking, "squared_norms", make)


def _norm_without_features_of_levels() -> Any:
    def make(old: Any) -> Any:
        return lambda self, by_levels, *rest: old(self, 0.0 * by_levels, *rest)

    return patch(ResponseTerm, "norms", make)


def _two_features_in_one_place() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: Any, *args: Any) -> None:
            old(self, *args)
            self._of_numbers[-1] = self._of_numbers[-2]

        return faulty

    return patch(ResponseTerm, "__init__", make)


class _ForgetfulDict(dict[str, Any]):
    """A dictionary that leaves some entries out when it is gone through for the first time."""

    def __init__(self, entries: dict[str, Any], is_left_out: Callable[[str], bool]) -> None:
        super().__init__(entries)
        self._is_left_out: Callable[[str], bool] | None = is_left_out

    def items(self) -> Any:
        is_left_out, self._is_left_out = self._is_left_out, None
        return [(k, v) for k, v in super().items() if not (is_left_out and is_left_out(k))]


def _norm_without_rows(is_left_out: Callable[[str], bool]) -> Any:
    """Norms without the rows of some sites; the sums have them."""

    def make(old: Any) -> Any:
        def faulty(make_rows: Any, is_padding: Any) -> Any:
            resp, rows, response = old(make_rows, is_padding)
            return resp, _ForgetfulDict(rows, is_left_out), response

        return faulty

    return patch(mixture_sum, "materialize", make)


def _numbers_not_clipped() -> Any:
    def make(old: Any) -> Any:
        return lambda factors, rows: old(jnp.sign(factors), rows)

    return patch(mixture_sum, "_sum", make)


def _levels_of_the_neighbour() -> Any:
    def make(old: Any) -> Any:
        return lambda self, numbers, codes: old(self, numbers, [jnp.roll(c, 1) for c in codes])

    return patch(LevelTables, "scatter_sums", make)


def _levels_of_missing_values() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: Any, batch: Any) -> Any:
            none = jax.tree.map(jnp.zeros_like, batch.missing)
            right, wrong = old(self, batch), old(self, batch._replace(missing=none))
            return [
                a if block.is_coin else b
                for a, b, block in zip(right, wrong, self.blocks, strict=True)
            ]

        return faulty

    return patch(LevelTables, "codes", make)


# -- batches and families -------------------------------------------------------------------------


def _nobody_is_padding(name: str) -> Any:
    """Rows that fill up a batch, or the last slice of the data, count."""

    def make(old: Any) -> Any:
        def faulty(*args: Any) -> Any:
            records, is_padding = old(*args)
            return records, jnp.zeros_like(is_padding)

        return faulty

    return patch(batches, name, make)


def _weights_of_the_diagonal() -> Any:
    """The norm of a full-rank release as if the family were a mean-field one."""

    def make(family: Any) -> Any:
        def weights(params: Any, eta: Any) -> Any:
            slopes = family.slopes(params, eta)
            scales = slopes[1] if slopes[1].ndim == 1 else jnp.diagonal(slopes[1])
            return slopes.loc**2 + scales**2

        return variants.vanilla(family)._replace(weights=weights)

    return mock.patch.dict(variants.VARIANTS, {"vanilla": make})


# -- rows that are whitened and counted ------------------------------------------------------------


def _metric_of_the_batch() -> Any:
    """The metric is brought to the scale of the rows that happen to be there."""

    def make(old: Any) -> Any:
        def faulty(rows: Any, factor: Any) -> Any:
            return old(rows, factor) / jnp.sqrt(1e-6 + jnp.mean(jnp.clip(rows, -9, 9) ** 2))

        return faulty

    return patch(clipping, "_whiten", make)


def _record_in_two_bins() -> Any:
    def make(old: Any) -> Any:
        def faulty(norms: Any, bound: float) -> Any:
            return old(norms, bound) | old(norms / 2, bound)

        return faulty

    return patch(clipping, "_in_bins", make)


def _count_beside_the_norm() -> Any:
    """The gradient has all of the norm, and the count comes on top."""
    return mock.patch.object(clipping, "_GRADIENT_PART", 1.0)


def _bound_of_the_batch() -> Any:
    """Rows are clipped to the mean norm of those that happen to be there."""

    def make(old: Any) -> Any:
        def faulty(norms: Any, is_padding: Any, bound: float) -> Any:
            usable = jnp.isfinite(norms) & ~is_padding
            mean = jnp.sum(jnp.where(usable, norms, 0.0)) / jnp.maximum(1, usable.sum())
            ratio = jnp.where(usable, mean / jnp.where(usable, norms, 1.0), 0.0)
            return jnp.clip(ratio, 0.0, 1.0)

        return faulty

    return everywhere("clip_factors", make)


WHITENED: dict[str, Any] = {"family": "full_rank", "variant": "whitened"}

PATH_FAULTS = [
    Fault("metric taken from the batch", _metric_of_the_batch, "clip", **WHITENED),
    Fault("record in two bins", _record_in_two_bins, "clip", **WHITENED),
    Fault("count beside the norm", _count_beside_the_norm, "clip", **WHITENED),
    Fault("bound taken from the batch", _bound_of_the_batch, "clip", **WHITENED),
    Fault("Jacobian after the clip", _jacobian_after_the_clip, "clip", "autodiff"),
    Fault(
        "clip before the weights", _clip_before_the_weights, "clip", "autodiff", variant="vanilla"
    ),
    Fault("records centred by their batch", lambda: _of_batch(_less_the_mean), "clip", "autodiff"),
    Fault("slopes of the next level", _slopes_of_the_next_level, "clip", "look_ups"),
    Fault("slopes outside of the table", _slopes_outside_of_the_table, "clip", "look_ups"),
    Fault("levels of another record", lambda: _of_batch(_of_the_neighbour), "clip", "look_ups"),
    Fault("norm without the intercept", _norm_without_the_intercept, "clip", "logistic"),
    Fault(
        "minimum that passes over NaN",
        lambda: _factors(regression, _minimum_passes_over_nan),
        "clip",
        "logistic",
    ),
    Fault(
        "padding counted by a regression",
        lambda: _factors(regression, _padding_counted),
        "clip",
        "logistic",
    ),
    Fault("squares that underflow", _squares_that_underflow, "clip", "poisson"),
    Fault("norm of the score alone", _norm_of_the_score_alone, "clip", "poisson"),
    Fault("norm without the noise scale", _norm_without_the_noise_scale, "clip", "linear"),
    Fault("infinite score clamped", _infinite_scores_clamped, "clip", "linear"),
    Fault(
        "norms of covariates without weights",
        _norms_of_covariates_kept,
        "clip",
        "linear",
        variant="vanilla",
    ),
    Fault(
        "norm without levels",
        lambda: _norm_without_levels(lambda size: size > 2),
        "clip",
        "mixture",
    ),
    Fault(
        "norm without missing values",
        lambda: _norm_without_levels(lambda size: size == 2),
        "clip",
        "mixture",
    ),
    Fault(
        "norm without numbers",
        lambda: _norm_without_rows(lambda site: site.startswith(("visits", "claims", "size"))),
        "clip",
        "mixture",
    ),
    Fault(
        "norm without the response's noise",
        lambda: _norm_without_rows(lambda site: site.endswith("noise_scale")),
        "clip",
        "mixture",
    ),
    Fault("norm without features of levels", _norm_without_features_of_levels, "clip", "mixture"),
    Fault("two features in one place", _two_features_in_one_place, "clip", "mixture"),
    Fault("numbers summed without clip", _numbers_not_clipped, "clip", "mixture"),
    Fault("sums by another record's levels", _levels_of_the_neighbour, "clip", "mixture"),
    Fault("missing values have levels", _levels_of_missing_values, "clip", "mixture"),
    Fault("padding of a batch counted", lambda: _nobody_is_padding("select"), "clip"),
    Fault("rows of the last slice counted twice", lambda: _nobody_is_padding("_slice"), "clip"),
    Fault(
        "full-rank weights of the diagonal",
        _weights_of_the_diagonal,
        "clip",
        family="full_rank",
        variant="vanilla",
    ),
]
