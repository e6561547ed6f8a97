"""Faults in counts: in the mechanism, and in the release that a twin makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
from planting import Fault, patch

from dpvim.privacy import counts
from dpvim.privacy.counts import Cells, CountMechanism, Marginal, NoisyMarginal
from dpvim.synthesis.marginals import release as twin_release

# -- sensitivity ----------------------------------------------------------------------------------


def _in_two_cells() -> Any:
    """A record counts in its cell and in the next one."""

    def make(old: Any) -> Any:
        def faulty(*args: Any) -> Any:
            return [total + np.roll(total, 1) for total in old(*args)]

        return faulty

    return patch(counts, "count_cells", make)


def _outside_is_everywhere() -> Any:
    """A code of no cell is counted in all cells of its column, as one that may be any."""

    def make(old: Any) -> Any:
        def faulty(pieces: Any, cells: Cells, marginals: Any) -> Any:
            pieces = list(pieces)
            found = old(pieces, cells, marginals)
            sizes = [len(of_code) for of_code in cells.of_code]
            for piece in pieces:
                outside = (piece < 0) | (piece >= sizes)
                for total, marginal in zip(found, marginals, strict=True):
                    total += int(outside[:, marginal.columns].any(axis=1).sum())
            return found

        return faulty

    return patch(counts, "count_cells", make)


def _records_that_are_errors() -> Any:
    def make(old: Any) -> Any:
        def faulty(pieces: Any, cells: Cells, marginals: Any) -> Any:
            pieces = list(pieces)
            for piece in pieces:
                if np.any(piece >= [len(of_code) for of_code in cells.of_code]):
                    raise IndexError("a code of no cell")
            return old(pieces, cells, marginals)

        return faulty

    return patch(counts, "count_cells", make)


# -- noise ----------------------------------------------------------------------------------------


def _weights_left_out() -> Any:
    """Noise as if each marginal were released alone: too small by the root of their number."""

    def make(old: Any) -> Any:
        def faulty(marginals: Any, **options: Any) -> list[float]:
            return [math.sqrt(len(marginals)) * weight for weight in old(marginals, **options)]

        return faulty

    return patch(counts, "record_weights", make)


def _rounds_forget_their_share() -> Any:
    """Noise as if each round were the only one."""
    return patch(
        counts, "record_weights", lambda old: lambda m, *, share, norm: old(m, share=1.0, norm=norm)
    )


def _noise_used_twice() -> Any:
    """Every second marginal has the noise of the one before, in its own units."""
    kept: dict[tuple[int, ...], np.ndarray] = {}

    def make(old: Any) -> Any:
        def faulty(generator: Any, stddev: float, shape: tuple[int, ...]) -> np.ndarray:
            if shape in kept:
                return np.rint(kept.pop(shape) * stddev)
            noise = old(generator, stddev, shape)
            kept[shape] = noise / stddev
            return noise

        return faulty

    return patch(counts, "rounded_gaussian", make)


def _not_rounded() -> Any:
    def make(old: Any) -> Any:
        def faulty(
            self: CountMechanism, marginal: Marginal, exact: np.ndarray, weight: float
        ) -> NoisyMarginal:
            stddev = self.plan.noise_stddev / weight
            noise = self._generator.standard_normal(exact.shape) * stddev
            return NoisyMarginal(marginal.columns, exact + noise, stddev**2 + 1 / 12)

        return faulty

    return patch(CountMechanism, "_noisy", make)


def _one_marginal_exact() -> Any:
    """The marginals of one column are taken for public."""

    def make(old: Any) -> Any:
        def faulty(
            self: CountMechanism, marginal: Marginal, exact: np.ndarray, weight: float
        ) -> NoisyMarginal:
            noisy = old(self, marginal, exact, weight)
            return noisy._replace(counts=exact) if marginal.columns == (0,) else noisy

        return faulty

    return patch(CountMechanism, "_noisy", make)


def _endless_noise() -> Any:
    """Noise that overflows its integers is the same number for all counts."""
    return mock.patch.object(counts, "LARGEST_STDDEV", math.inf)


# -- budget ---------------------------------------------------------------------------------------


def _shares_not_added_up() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: CountMechanism, share: float) -> None:
            self._spent = Fraction()
            old(self, share)

        return faulty

    return patch(CountMechanism, "_spend", make)


@contextmanager
def _whole_budget_in_each_round() -> Iterator[None]:
    """A twin spends all on columns, and all once more on pairs."""

    def make(old: Any) -> Any:
        def faulty(*args: Any, **options: Any) -> Any:
            return _replaced(old(*args, **options), shares=(1.0, 1.0))

        return faulty

    with _shares_not_added_up(), patch(twin_release, "design", make):
        yield


def _replaced(wanted: twin_release.Design, **fields: Any) -> twin_release.Design:
    return twin_release.Design(**{**vars(wanted), **fields})


def _refund_after_an_error() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: CountMechanism, *args: Any, **options: Any) -> Any:
            before = self._spent
            try:
                return old(self, *args, **options)
            except OSError:
                self._spent = before
                raise

        return faulty

    return patch(CountMechanism, "release", make)


# -- the release of a twin ------------------------------------------------------------------------


def _groups_of_exact_counts() -> Any:
    """Cells are put together by what the table holds, and not by what was released of it."""

    def make(old: Any) -> Any:
        def faulty(mechanism: CountMechanism, wanted: twin_release.Design) -> Any:
            fine = Cells(tuple(np.arange(grid.num_cells) for grid in wanted.grids))
            singles = [Marginal((column,)) for column in wanted.grouped]
            exact = iter(mechanism._source.count(fine, singles))

            def make_grouping(grouping: Any) -> Any:
                return lambda grid, noisy, variance, **options: grouping(
                    grid, next(exact), 1e-6, **options
                )

            with patch(twin_release, "group_cells", make_grouping):
                return old(mechanism, wanted)

        return faulty

    return patch(twin_release, "release", make)


def _records_counted() -> Any:
    """The number of records is that of the table, also where it is private."""
    return patch(
        twin_release,
        "_num_rows",
        lambda old: lambda mechanism, noisy: float(sum(map(len, mechanism._source.pieces()))),
    )


def _cells_from_the_range() -> Any:
    """Numbers are put between the smallest and the largest that the table holds."""

    def make(old: Any) -> Any:
        def faulty(table: Any, schema: Any, grids: Any) -> np.ndarray:
            codes = old(table, schema, grids)
            return codes - codes.min(axis=0)

        return faulty

    return patch(twin_release, "codes_of", make)


COUNT_FAULTS = [
    Fault("record in two cells", _in_two_cells, "counts"),
    Fault("codes of no cell counted in all", _outside_is_everywhere, "counts"),
    Fault("codes of no cell are an error", _records_that_are_errors, "counts"),
    Fault("weights left out of the noise", _weights_left_out, "counts"),
    Fault("noise without the round's share", _rounds_forget_their_share, "counts"),
    Fault("noise of one marginal used for another", _noise_used_twice, "counts"),
    Fault("counts with fractions", _not_rounded, "counts"),
    Fault("one marginal exact", _one_marginal_exact, "counts"),
    Fault("noise beyond its integers", _endless_noise, "counts"),
    Fault("shares not added up", _shares_not_added_up, "counts"),
    Fault("whole budget in each round", _whole_budget_in_each_round, "counts"),
    Fault("share given back after an error", _refund_after_an_error, "counts"),
    Fault("groups of exact counts", _groups_of_exact_counts, "counts"),
    Fault("private number of records reported", _records_counted, "counts"),
    Fault("cells from the table's range", _cells_from_the_range, "counts"),
]
