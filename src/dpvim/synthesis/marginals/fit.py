"""A twin's fit to noisy counts: the release, the model, tables drawn from it, and its file."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Int

from dpvim import archives
from dpvim._progress import ProgressBar, show_progress
from dpvim.checkpoints import Checkpoint
from dpvim.ledger.book import Job
from dpvim.ledger.payment import Account, Tally, book_once, paid
from dpvim.privacy.counts import CountMechanism, InPieces, NoisyMarginal, SourceOfCounts
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.statement import COUNTS, NoPrivacy, PrivacyStatement
from dpvim.serialization import (
    plan_from_json,
    plan_to_json,
    privacy_from_json,
    privacy_to_json,
)
from dpvim.svi import warn_of_seed
from dpvim.synthesis.encoding import EncodedTable
from dpvim.synthesis.marginals.grids import Grid, Groups, grid_of
from dpvim.synthesis.marginals.kept import KeptRounds
from dpvim.synthesis.marginals.mixture import Mixture, draw_cells, expected_counts
from dpvim.synthesis.marginals.pair_counts import unexplained_shares
from dpvim.synthesis.marginals.release import Design, Releases, codes_of, design, release
from dpvim.synthesis.marginals.tilting import tilt
from dpvim.synthesis.marginals.traits import (
    MOST_LOG_ODDS,
    NUM_FITS,
    FittedTraits,
    Loadings,
    draw_loadings,
    fit_traits,
    mixture_of,
    prior_factor,
)
from dpvim.synthesis.schema import Schema
from dpvim.types import NotPrivateError

FORMAT, VERSION = "dpvim counts", 2
_FITS = ("best", "wide")
# Points of a file are not more than this: they are memory.
_MOST_POINTS = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class MarginalFit:
    """A latent trait model, fitted to noisy counts. Everything in it is public.

    Attributes:
        schema: The table's columns.
        releases: The counts.
        traits: The fits to them.
        privacy: The guarantee.
        target: The column whose pairs were counted with less noise, if any.
        intervals: Into how many parts the range of numbers with many values was cut.
    """

    schema: Schema
    releases: Releases
    traits: FittedTraits
    privacy: PrivacyStatement
    target: str | None
    intervals: int

    @property
    def num_components(self) -> int:
        """Of the mixture that the traits' points make."""
        return self.traits.num_points

    @property
    def num_traits(self) -> int:
        return len(self.traits.best.slopes)

    def _prior_factor(self) -> np.ndarray:
        return prior_factor(self.releases.counts, self.releases.in_order)

    def _mixture(self, loadings: Loadings) -> Mixture:
        sizes = self.releases.counts.sizes
        return mixture_of(loadings, self.num_components, sizes, self.traits.couples)

    @property
    def unexplained(self) -> pd.Series:
        """For each pair of columns, what share of the records the fit cannot place; by names."""
        counts = self.releases.counts
        _, expected = expected_counts(self._mixture(self.traits.best), counts.num_rows)
        shares = unexplained_shares(counts, expected)
        names = self.schema.names
        named = {tuple(names[c] for c in pair): share for pair, share in shares.items()}
        return pd.Series(named, dtype=float).sort_values(ascending=False)

    def draws(
        self, count: int, seeds: np.random.SeedSequence
    ) -> Iterator[Callable[[int], EncodedTable]]:
        """Draws of the posterior, each as a function that draws rows from it."""
        counts, factor = self.releases.counts, self._prior_factor()
        scores = self.releases.scores
        of_fits, of_rows = zip(*(each.spawn(2) for each in seeds.spawn(count)), strict=True)
        draw = functools.partial(draw_loadings, counts, factor, self.traits)
        with ThreadPoolExecutor(os.cpu_count(), "dpvim-draws") as cores:
            try:
                for drawn, each in zip(cores.map(draw, of_fits), of_rows, strict=True):
                    rng = np.random.default_rng(each)
                    groups = self.releases.redraw_groups(rng)
                    rows = tilt(self._mixture(drawn.loadings), drawn.counts, scores, rng)
                    yield self._rows_of(rows.draw, groups, rng, evenly=False)
            finally:  # whoever asked may want no more
                cores.shutdown(cancel_futures=True)

    def closest(self, seeds: np.random.SeedSequence) -> Callable[[int], EncodedTable]:
        """Rows that are as close to the fit as so many rows can be."""
        best, rng = self._mixture(self.traits.best), np.random.default_rng(seeds)
        cells = functools.partial(draw_cells, best, evenly=True)
        return self._rows_of(cells, self.releases.groups, rng, evenly=True)

    def _rows_of(
        self,
        draw: Callable[[int, np.random.Generator], np.ndarray],
        all_groups: tuple[Groups, ...],
        rng: np.random.Generator,
        *,
        evenly: bool,
    ) -> Callable[[int], EncodedTable]:
        def rows(num_rows: int) -> EncodedTable:
            return self.values_of(draw(num_rows, rng), all_groups, rng, evenly=evenly)

        return rows

    def values_of(
        self,
        cells: Int[np.ndarray, "rows columns"],
        all_groups: tuple[Groups, ...],
        rng: np.random.Generator,
        *,
        evenly: bool,
    ) -> EncodedTable:
        """Records in these groups of cells: values are drawn within them."""
        table = EncodedTable({}, {})
        for column, grid, groups, own in zip(
            self.schema.columns, self.releases.grids, all_groups, cells.T, strict=True
        ):
            values, missing = grid.values(groups.draw(own, rng, evenly=evenly), rng)
            table.values[column.name] = values
            if missing is not None:
                table.missing[column.name] = missing
        return table

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path, *, not_for_release: bool = False) -> None:
        """Write the fit to a file: what was released, and the mixture that was made of it."""
        if not self.privacy.private and not not_for_release:
            raise NotPrivateError(
                "this fit has no privacy guarantee (its noise came from a given seed). To save it "
                "all the same, say not_for_release=True."
            )
        noisy = self.releases.noisy
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "plan": plan_to_json(self.privacy.plan),
            "privacy": privacy_to_json(self.privacy),
            "num_rows": self.releases.num_rows,
            "target": self.target,
            "intervals": self.intervals,
            "points": self.traits.num_points,
            "couples": [list(each) for each in self.traits.couples],
            "columns": [list(each.columns) for each in noisy],
            "variances": [each.variance for each in noisy],
        }
        arrays = {f"counts.{i}": each.counts for i, each in enumerate(noisy)}
        for i, groups in enumerate(self.releases.groups):
            arrays |= {f"groups.{i}": groups.of_cell, f"shares.{i}": groups.probs}
        for kind in _FITS:
            loadings = getattr(self.traits, kind)
            arrays |= {f"{kind}.base": loadings.base, f"{kind}.slopes": loadings.slopes}
            arrays |= {f"{kind}.together.{i}": each for i, each in enumerate(loadings.together)}
        arrays["scales"] = self.traits.scales
        archives.write(path, meta, arrays)

    @classmethod
    def load(cls, path: str | Path, schema: Schema) -> Self:
        """Read a fit of a table with this schema, or say what is wrong with the file."""
        with archives.opened(path) as archive:
            archive.check_version(FORMAT, VERSION)
            meta = archive.meta
            plan = plan_from_json(meta["plan"])
            privacy = privacy_from_json(meta["privacy"], plan)
            if isinstance(privacy, NoPrivacy):
                raise ValueError("counts without noise")
            grids = tuple(grid_of(column, meta["intervals"]) for column in schema.columns)
            noisy = [
                NoisyMarginal(
                    tuple(columns), archive.arrays([f"counts.{i}"])[f"counts.{i}"], variance
                )
                for i, (columns, variance) in enumerate(
                    zip(meta["columns"], meta["variances"], strict=True)
                )
            ]
            groups = tuple(
                Groups(*archive.arrays([f"groups.{i}", f"shares.{i}"]).values())
                for i in range(len(grids))
            )
            # Files of version 1 have no couples.
            couples = tuple((first, second) for first, second in meta.get("couples", []))
            loadings = {}
            for kind in _FITS:
                base, slopes = archive.arrays([f"{kind}.base", f"{kind}.slopes"]).values()
                named = [f"{kind}.together.{i}" for i in range(len(couples))]
                loadings[kind] = Loadings(base, slopes, tuple(archive.arrays(named).values()))
            releases = Releases(grids, groups, tuple(noisy), float(meta["num_rows"]))
            scales = archive.arrays(["scales"])["scales"]
            traits = FittedTraits(meta["points"], scales, couples, **loadings)
            _check(releases, traits, schema, meta["target"])
            return cls(schema, releases, traits, privacy, meta["target"], meta["intervals"])


class CountableTable(Protocol):
    """A table that counts by itself, such as one in a database."""

    def counted(self, schema: Schema, grids: Sequence[Grid]) -> SourceOfCounts:
        """The table in the fine cells of its columns; refuses columns of other types."""
        ...


Tables: TypeAlias = Callable[[], Iterable[EncodedTable]]
"""Gives a table's pieces, from the start at every call."""


def fit_marginals(
    tables: Tables | CountableTable,
    schema: Schema,
    plan: PrivacyPlan,
    *,
    delta: float,
    target: str | None = None,
    components: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    account: Account | None = None,
    checkpoint: Checkpoint | None = None,
    after_release: Callable[[], object] = lambda: None,
) -> MarginalFit:
    """Release counts of a table, and fit a model to them.

    Args:
        tables: The table's pieces, from the start at every call; or a table that counts by itself.
        schema: Its columns.
        plan: Calibrated; see `counts_plan`.
        delta: Of the guarantee.
        target: A column whose pairs matter more than others.
        components: Number of points of the traits; by default by the number of cells.
        seed: For tests only: the result has no privacy guarantee.
        progress: Show a progress bar; None asks the terminal.
        account: What the release is booked in before it is made, if anything; it knows the data.
        checkpoint: Keeps the counts of every round; what is fitted to them is fitted again.
        after_release: Called when the table is not needed any more.
    """
    if plan.max_rows_per_person not in (None, 1):
        raise ValueError(
            f"max_rows_per_person: expected 1, got {plan.max_rows_per_person}: a person stands in "
            "one cell of each marginal."
        )
    warn_of_seed(plan, seed, stacklevel=5)
    wanted = design(schema, plan, target=target)

    source = _source_of_counts(tables, schema, wanted)
    seeded = seed is not None
    if checkpoint is None:
        mechanism = CountMechanism(plan, SecretStreams(seed), source)
        releases = _paid_release(mechanism, wanted, account, seeded=seeded)
    else:
        mechanism = CountMechanism(plan, checkpoint.streams(seed), source)
        releases = _kept_release(mechanism, wanted, account, checkpoint, seeded=seeded)
    after_release()
    privacy = PrivacyStatement.of(
        plan,
        delta=delta,
        steps_done=1,
        released=describe_release(wanted, releases),
        for_testing=seed is not None,
        mechanism=COUNTS,
    )
    # What the counts are fitted from protects nothing.
    entropy = checkpoint.start if checkpoint is not None and seed is None else seed
    start = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    show = show_progress(progress)
    with ProgressBar(NUM_FITS, show=show, label="fitting", unit="fits") as bar:
        counts = releases.counts
        traits = fit_traits(
            counts,
            prior_factor(counts, releases.in_order),
            seed=start,
            num_points=components,
            after_fit=functools.partial(bar.advance, 1),
        )
    return MarginalFit(schema, releases, traits, privacy, target, wanted.intervals)


def _source_of_counts(
    tables: Tables | CountableTable, schema: Schema, wanted: Design
) -> SourceOfCounts:
    if callable(tables):
        return InPieces(lambda: (codes_of(table, schema, wanted.grids) for table in tables()))
    return tables.counted(schema, wanted.grids)


def _paid_release(
    mechanism: CountMechanism, wanted: Design, account: Account | None, *, seeded: bool
) -> Releases:
    """`release`, booked before; a release that looked at the table in any round is paid for."""
    tally, job = Tally(), Job(mechanism.plan)
    with paid(account, [job], [tally], data=None, seeded=seeded, mechanism=COUNTS):
        try:
            return release(mechanism, wanted)
        finally:
            tally.add(int(mechanism.share_spent > 0))


def _kept_release(
    mechanism: CountMechanism,
    wanted: Design,
    account: Account | None,
    checkpoint: Checkpoint,
    *,
    seeded: bool,
) -> Releases:
    """`release` with a checkpoint, booked under its id by the first process that comes here."""
    booking = None
    if account is not None:
        job = Job(mechanism.plan)
        booking = book_once(
            account, job, id=checkpoint.id, data=None, seeded=seeded, mechanism=COUNTS
        )
    rounds = KeptRounds(mechanism, checkpoint)
    releases = release(rounds, wanted)
    rounds.finish()
    if booking is not None:
        booking.settle_or_warn(1)
    return releases


def describe_release(wanted: Design, releases: Releases) -> str:
    """Put into words what was released."""
    cells = sum(each.counts.size for each in releases.noisy)
    parts = []
    if wanted.shares[0]:
        parts.append(f"of {len(wanted.grouped)} columns")
    if wanted.pairs:
        parts.append(f"of {len(wanted.pairs)} pairs of columns")
    return f"noisy counts {' and '.join(parts)} ({cells:,} cells)"


def _check(releases: Releases, traits: FittedTraits, schema: Schema, target: Any) -> None:
    """Refuse arrays that do not go together."""
    if target is not None and target not in schema.names:
        raise ValueError(f"the target {target!r} is no column")
    for grid, groups in zip(releases.grids, releases.groups, strict=True):
        cells = grid.num_cells
        numbers = np.unique(groups.of_cell)
        if (
            groups.of_cell.shape != (cells,)
            or groups.probs.shape != (cells,)
            or not np.array_equal(numbers, np.arange(len(numbers)))
            or not (np.isfinite(groups.probs).all() and (groups.probs > 0).all())
        ):
            raise ValueError("groups that are none")
    sizes = [groups.size for groups in releases.groups]
    for each in releases.noisy:
        shape = tuple(sizes[column] for column in each.columns)
        fine = tuple(releases.grids[column].num_cells for column in each.columns)
        ok = each.counts.shape in (shape, fine) and each.counts.dtype.kind in "iu"
        if not (ok and each.variance > 0 and math.isfinite(each.variance)):
            raise ValueError("counts that are none")
    _check_traits(traits, sizes)


def _check_traits(traits: FittedTraits, sizes: list[int]) -> None:
    size = sum(sizes)
    number, shape = traits.num_points, np.shape(traits.best.slopes)
    ok = isinstance(number, int) and 0 < number <= _MOST_POINTS and len(shape) == 2
    columns = [column for couple in traits.couples for column in couple]
    ok = ok and all(isinstance(each, int) and 0 <= each < len(sizes) for each in columns)
    ok = ok and len(set(columns)) == len(columns) and all(a < b for a, b in traits.couples)
    wanted = [(sizes[a], sizes[b]) for a, b in traits.couples] if ok else []
    for each in (traits.best, traits.wide):
        ok = ok and each.base.shape == (size,) and each.slopes.shape == (shape[0], size)
        ok = ok and [odds.shape for odds in each.together] == wanted
        ok = ok and all((np.abs(odds) <= MOST_LOG_ODDS).all() for odds in each.together)
        arrays = (each.base, each.slopes, *each.together)
        ok = ok and all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays)
    scales = traits.scales
    if not (ok and scales.shape == (size,) and np.isfinite(scales).all() and (scales > 0).all()):
        raise ValueError("traits that are none")
