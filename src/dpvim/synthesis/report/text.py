"""Sentences of a report that depend on the twin: guarantee, uses, fit, columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

import pandas as pd

from dpvim.models.mixture import Mixture
from dpvim.posterior.posterior import Posterior
from dpvim.privacy.statement import COUNTS, NoPrivacy, PrivacyStatement
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.schema import AnyColumn, Date, Levelled, Real
from dpvim.synthesis.twin import Twin
from dpvim.types import Relation, Unit

_MAX_LEVELS = 12
# A guarantee that allows larger ratios than this is hardly one.
_WEAK_RATIO = 25.0
# Sums of absolute errors that exceed their mean by more standard deviations are no chance, also not
# the largest of many.
_CLEAR = 3.0
# Of rows that are drawn again because of a constraint, a share that a reader has to know of.
_MUCH_BROKEN = 0.1
_REGRESSION_NAMES = {"logistic": "logistic", "poisson": "Poisson", "linear": "linear"}
_NEIGHBOUR = {
    Unit.RECORD: {
        Relation.ZERO_OUT: "with that person's record replaced by nothing",
        Relation.ADD_OR_REMOVE: "without that person's record",
        Relation.REPLACE_ONE: "with any other record in the place of that person's",
    },
    Unit.PERSON: {
        Relation.ZERO_OUT: "with all rows of that person replaced by nothing",
        Relation.ADD_OR_REMOVE: "without all rows of that person",
        Relation.REPLACE_ONE: "with any other rows in the place of all rows of that person",
    },
}
_PUBLIC_ROWS = {
    Relation.ZERO_OUT: "The number of {units} is public; the guarantee does not hide it.",
    Relation.ADD_OR_REMOVE: "The number of {units} is protected; only a bound on it is public.",
    Relation.REPLACE_ONE: "The number of {units} is public; the guarantee does not hide it.",
}
_ABOUT = {
    Unit.RECORD: (
        "It is about single records. What holds for the whole population, or for a large group, "
        "can be learnt from the twin; that is what it is for."
    ),
    Unit.PERSON: (
        "It is about single persons, each with all of their rows; one row of each, chosen at "
        "random, was used. What holds for the whole population, or for a large group, can be "
        "learnt from the twin; that is what it is for."
    ),
}


@dataclass(frozen=True)
class Guarantee:
    """A privacy guarantee in sentences.

    Attributes:
        short: One line.
        sentences: What it means.
        assumptions: What it rests on.
        full: The statement as it is printed elsewhere.
    """

    short: str
    sentences: tuple[str, ...]
    assumptions: tuple[str, ...]
    full: str


def describe_guarantee(privacy: PrivacyStatement | NoPrivacy) -> Guarantee:
    """Explain the guarantee to a person whose record is in the table."""
    full = str(privacy)
    if isinstance(privacy, NoPrivacy):
        short = "NOT PRIVATE: no guarantee"
        return Guarantee(short, ("The model was fitted without clipping or noise.",), (), full)
    epsilon, delta = _round_up(privacy.epsilon), _round_up(privacy.delta, 2)
    counted = privacy.mechanism == COUNTS
    if not privacy.private:
        seeded = "The noise" if counted else "The batches and the noise"
        sentences = (
            f"{seeded} came from a given seed: whoever knows it can take the noise away. The "
            "numbers below would hold with random numbers that nobody knows.",
            f"The plan was for epsilon = {epsilon}, delta = {delta}.",
        )
        return Guarantee("NOT PRIVATE: for tests only", sentences, privacy.assumptions, full)
    ratio = math.exp(min(privacy.epsilon, 700.0))
    factor = _round_up(ratio)
    correct = _round_up(100 * _attack_accuracy(privacy.epsilon, privacy.delta))
    unit = privacy.unit
    neighbour = _NEIGHBOUR[unit][privacy.relation]
    seen = "the noisy counts that it was made from" if counted else "the posterior"
    meaning: tuple[str, ...] = (
        f"Take any person, and anything that somebody might see in the twin, in {seen} or "
        f"in tables drawn from them. Its probability is at most {factor} times what it would "
        f"be {neighbour}, plus {delta}; and the other way round. That is epsilon = {epsilon} and "
        f"delta = {delta}: the factor is e to the epsilon.",
        f"Put differently: let a coin decide between the table as it is and the table {neighbour}. "
        f"Whoever sees the twin and guesses which of the two it was, knowing all other records, is "
        f"right in at most {correct} of 100 cases. "
        "Without looking it would be 50.",
        _PUBLIC_ROWS[privacy.relation].format(units="rows" if unit is Unit.RECORD else "persons"),
        *_what_was_counted(privacy),
        "It holds for everything that is made from the twin, also for tables drawn later, and "
        "cannot be used up by looking at them.",
        _ABOUT[unit],
    )
    if ratio > _WEAK_RATIO:
        meaning += (f"A factor of {factor} is large: this guarantee is a weak one.",)
    short = f"({epsilon}, {delta})-differential privacy for one {unit.value}"
    return Guarantee(short, meaning, privacy.assumptions, full)


def _what_was_counted(privacy: PrivacyStatement) -> tuple[str, ...]:
    if privacy.mechanism != COUNTS:
        return ()
    return (
        f"All that was taken from the table are {privacy.released}: Gaussian noise was added to "
        "every count, and everything in the twin is made from these, without another look at the "
        "table. The guarantee is for all counts together.",
    )


def good_for(twin: Twin) -> list[str]:
    """List the analyses that the model contains."""
    uses = ["The distribution of each column, within the spread that the pictures show."]
    if isinstance(twin.fit, MarginalFit):
        uses += _uses_of_counts(twin.fit)
    elif isinstance(twin.model, Mixture):
        uses += _uses_of_mixture(twin.model)
    else:
        uses.append("What the model expresses, which was the maker's own: ask them.")
    uses.append(
        "Writing and testing a program before it runs on the original, and teaching: names, types, "
        "levels and bounds are those of the original."
    )
    return uses


def _uses_of_counts(fit: MarginalFit) -> list[str]:
    uses = [
        "How two columns go together: the model is fitted to noisy counts of all pairs of columns "
        "at once.",
        "Regressions of any column on others, and means, shares and differences between groups, "
        "pooled over the twin's tables as below: these intervals know of the noise.",
        "Looking at it, and training what predicts: closest.csv (in Python Twin.closest()) is the "
        "one table that is closest to the fit. It is for these two only.",
    ]
    if fit.target is not None:
        uses.insert(
            2,
            f"Above all what concerns {fit.target!r}: its pairs were counted with less noise.",
        )
    return uses


def _uses_of_mixture(model: Mixture) -> list[str]:
    uses = [
        f"How columns go together, as far as {model.num_components} groups of records can "
        "express it: within a group the model has the columns independent of each other."
    ]
    if model.response is not None:
        name, kind = model.response
        uses.append(
            f"The {_REGRESSION_NAMES[kind]} regression of {name!r} on all other columns: a "
            "coefficient for each number and for each level but the first."
        )
    return uses


def not_good_for(twin: Twin) -> list[str]:
    """List the uses that the twin does not support."""
    limits = [
        "Single records. No row stands for a person, and a row that equals a person's is chance.",
        "Rare subgroups. The noise hides what a few records say, and a group that is small within "
        "the whole table may be missing, too large or like the others.",
        "Tests, intervals or p-values from one table as if it were real. They know nothing of the "
        "model's uncertainty: pool several tables, as below.",
        "Values beyond the declared bounds, and levels that were not declared. They were mapped "
        "before the model saw them.",
    ]
    if isinstance(twin.fit, MarginalFit):
        limits += _limits_of_counts(twin.fit)
    elif isinstance(twin.model, Mixture):
        limits += _limits_of_mixture(twin.model)
    limits.append("Questions on columns that are not in the list, or on ties between records.")
    return limits


def describe_broken(share: float) -> str:
    """Say what a constraint did to the rows of the model, and whether that is much."""
    text = f"the model by itself would break it in {percent(share)} of its rows"
    if share > _MUCH_BROKEN:
        text += (
            "; that is much, and to leave these out bends the distributions of the columns in it"
        )
    return text


def _limits_of_counts(fit: MarginalFit) -> list[str]:
    few = math.ceil(2 * _noise(fit))
    return [
        f"Levels, and combinations of levels of two columns, that no more than about {few:,} "
        "records have. The noise of a count is as large: they may be missing or too frequent.",
        "Relations of three and more columns (interactions) beyond what pairs of columns imply. No "
        "three columns were counted together.",
        "Sharp relations: one column computed from another, combinations that cannot be. Noise and "
        "groups of values blur them, so a few rows will break such rules, unless they are declared "
        "as constraints.",
        "Close relations of levels without an order, with each other or with numbers. They may "
        "come out too loose, and intervals, which know of noise and sampling, do not know of that.",
        "Any interval or p-value from closest.csv or Twin.closest(). That table knows nothing of "
        "the noise, and its rows are more even than a sample.",
    ]


def _limits_of_mixture(model: Mixture) -> list[str]:
    limits = []
    if model.response is not None:
        limits.append(
            f"Interactions and curved effects in the regression of {model.response.name!r}. "
            "The model has none, so the twin has none, whatever the original has."
        )
    limits.append(
        "Relations of three and more columns, and sharp ones of two (one column computed from "
        "another, impossible combinations) that are not declared as constraints. The groups of the "
        "model blur them."
    )
    return limits


def describe_noise(fit: MarginalFit) -> str:
    """The noise of a count against the number of rows."""
    rows, noise = fit.releases.num_rows, _noise(fit)
    estimated = fit.privacy.relation is Relation.ADD_OR_REMOVE
    pairs = [each.counts.size for each in fit.releases.noisy if len(each.columns) == 2]
    text = (
        f"The noise moves at least 95 of 100 counts{' of pairs' * bool(pairs)} by no more than "
        f"{2 * noise:,.1f} records, which is {percent(2 * noise / rows)} of {rows:,.0f} rows"
        f"{' (their number was estimated from the counts)' * estimated}."
    )
    if not pairs:
        return text
    held = rows * len(pairs) / sum(pairs)
    text += f" A cell of a pair holds {held:,.1f} records on average, "
    if held < noise:
        return text + (
            "less than the noise: single cells say little, and the model lives on what many of "
            "them say together."
        )
    return text + "more than the noise: frequent combinations stand out cell by cell."


def describe_unexplained(fit: MarginalFit, unexplained: pd.Series) -> tuple[bool, str]:
    """Say whether all that the fit cannot explain is within the noise, and what follows."""
    if unexplained.empty:
        return True, "The table has one column, so there is no pair to explain."
    chance = _by_chance(fit)
    beyond = sum(share > chance[pair] for pair, share in unexplained.items())
    mean, worst = 100 * unexplained.mean(), 100 * unexplained.iloc[0]
    size = f"{mean:.2f} % of the records on average over {len(unexplained):,} pairs"
    if not beyond:
        return True, (
            f"The model puts {size} into the wrong cells, as far as can be told. All of it is "
            "within the noise: no pair is off by more than chance would make of a right model. "
            "What is smaller than the noise does not show here."
        )
    return False, (
        f"The model puts {size} into the wrong cells, {worst:.2f} % in the worst one. In "
        f"{beyond:,} of the pairs this is more than the noise. There the tables are off by more "
        "than their spread shows, and intervals for what depends on these pairs may be too "
        "narrow. A twin with more components may have less of it."
    )


def _by_chance(fit: MarginalFit) -> dict[tuple[str, ...], float]:
    """By pair of columns, the unexplained share that noise and sampling may make of a right model.

    That share is half of a sum of absolute errors, less its mean. The errors are about normal and
    independent, so the sum's variance is (1 - 2/pi) times that of the errors, noise and sampling.
    """
    rows, names = fit.releases.num_rows, fit.schema.names
    return {
        tuple(names[column] for column in each.columns): _CLEAR
        * math.sqrt((1 - 2 / math.pi) * (each.counts.size * each.variance + rows))
        / (2 * rows)
        for each in fit.releases.noisy
        if len(each.columns) == 2
    }


def percent(share: float) -> str:
    """A share that may be small, with two digits.

    >>> percent(0.000123), percent(0.0456), percent(1.234)
    ('0.012 %', '4.6 %', '123 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


def _noise(fit: MarginalFit) -> float:
    """Standard deviation of the noise of a pair's count, or of a column's if there are no pairs."""
    noisy = fit.releases.noisy
    most = max(len(each.columns) for each in noisy)
    return math.sqrt(max(each.variance for each in noisy if len(each.columns) == most))


def describe_convergence(posterior: Posterior, most: int = 12) -> tuple[bool, str]:
    """Test of convergence: passed or not, and what that means for intervals."""
    left, total = posterior.not_converged, posterior.loc.size
    if not left:
        return True, (
            f"All {total:,} parameters have settled: the end of the run is long enough to tell how "
            "far the noise moved them, and that is part of the spread between tables."
        )
    shown = ", ".join(left[:most]) + (f" and {len(left) - most:,} more" * (len(left) > most))
    return False, (
        f"{len(left):,} of {total:,} parameters have not settled: the run was too short, or still "
        "on its way, to tell how far noise has moved them. The tables may be off by more than "
        "their spread shows, and intervals for what depends on these parameters may be too "
        f"narrow. Not settled: {shown}."
    )


def describe_values(column: AnyColumn) -> str:
    """Levels or bounds of a column, in a line."""
    gaps = "; may be missing" if column.nullable else ""
    if isinstance(column, Levelled):
        shown = ", ".join(map(str, column.levels[:_MAX_LEVELS]))
        rest = len(column.levels) - _MAX_LEVELS
        grouped = column.prefix is not None or column.groups is not None
        kind = "groups of values: " * grouped
        return kind + shown + (f" and {rest} more" if rest > 0 else "") + gaps
    if isinstance(column, Date):
        return f"{column.lower} to {column.upper}, by the {column.resolution}{gaps}"
    lower, upper = column.bounds
    scale = ", logarithmic" if isinstance(column, Real) and column.scale == "log" else ""
    return f"{lower:,.12g} to {upper:,.12g}{scale}{gaps}"


def describe_outside(column: AnyColumn) -> str:
    """Rule for values that are not declared, in a word."""
    if column.outside == "clamp":
        return "nearest bound"
    return "missing" if column.outside == "missing" else str(column.outside)


def _attack_accuracy(epsilon: float, delta: float) -> float:
    """Largest probability of telling two neighbours apart, each with probability one half.

    The hockey-stick bound in both directions gives (e^epsilon + delta) / (e^epsilon + 1).
    """
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def _round_up(number: float, digits: int = 3) -> str:
    """A number of so many digits, never smaller than it is.

    >>> _round_up(0.99985), _round_up(2.7183), _round_up(1234.5), _round_up(0.3)
    ('1', '2.72', '1,240', '0.3')
    >>> _round_up(4.951e-6, 2)
    '5e-06'
    """
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(number)))
    return f"{float(rounded):,.0f}" if rounded >= 1000 else f"{float(rounded):g}"


def describe_rows(twin: Twin) -> tuple[str, str]:
    """Public number of rows, or of persons, of the original, or the bound on it; its name first."""
    name, number = "Rows of the original", f"{twin.num_rows:,}"
    privacy = twin.privacy
    if isinstance(privacy, PrivacyStatement):
        if privacy.unit is Unit.PERSON:
            name = "Persons in the original"
        if privacy.relation is Relation.ADD_OR_REMOVE:
            number = f"at most {number}"
    return name, f"{number} (public)"


def describe_model(twin: Twin) -> str:
    """Kind and size of the model that the twin was drawn from."""
    if isinstance(twin.fit, MarginalFit):
        counts = "pairs of columns" if len(twin.schema.columns) > 1 else "its column"
        return (
            f"a latent trait model of {twin.fit.num_traits} traits, fitted to noisy counts of "
            f"{counts}"
        )
    size = f"{twin.fit.family.dim:,} parameters"
    if not isinstance(twin.model, Mixture):
        return f"the maker's own, {size}"
    text = f"a mixture of {twin.model.num_components} components, {size}"
    if twin.model.response is None:
        return text
    name, kind = twin.model.response
    return f"{text}, with a {_REGRESSION_NAMES[kind]} regression of {name} on the others"
