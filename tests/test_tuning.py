"""The best of several candidates within one budget."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import dpvim
from dpvim import tuning
from dpvim.privacy import accounting
from dpvim.privacy.accounting.selection import epsilon_of_selection

pytestmark = pytest.mark.filterwarnings(
    "ignore::dpvim.ConvergenceWarning", "ignore::dpvim.PrivacyWarning"
)
BUDGET = {"epsilon": 8.0, "delta": 1e-5}
FIT = {"num_steps": 200, "learning_rate": 0.05, "clip_norm": 4.0}


def model_with(scale, kind):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, scale))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", kind(a), obs=y)

    return model


def poisson(a):
    return dist.Poisson(jnp.exp(a))


def normal(a):
    return dist.Normal(jnp.exp(a), 0.1)


CANDIDATES = {"poisson": model_with(1.0, poisson), "normal": model_with(1.0, normal)}
MANY = CANDIDATES | {f"poisson {i}": model_with(0.5 + i, poisson) for i in range(8)}
RNG = np.random.default_rng(0)
DATA = np.zeros(1000, np.float32), RNG.poisson(3.0, 1000).astype(np.float32)


@pytest.mark.parametrize("method", ["split", "repeat"])
def test_the_better_model_is_chosen(method, monkeypatch):
    # How many are drawn has a test of its own.
    monkeypatch.setattr(tuning.Repeats, "draw", lambda self, rng: 4)
    found = dpvim.tune(
        CANDIDATES, *DATA, **BUDGET, **FIT, method=method, chance=0.95, seed=1, progress=False
    )
    assert found.name == "poisson"
    assert found.plan.method == method
    assert (found.scores is None) == (method == "repeat")
    assert found.fit.privacy.epsilon == found.score.privacy.epsilon == found.epsilon <= 8.0
    assert found.fit.posterior.privacy["epsilon"] == found.epsilon
    assert "poisson" in str(found)


def test_the_chosen_fit_claims_the_price_of_all_also_from_a_file(tmp_path):
    found = dpvim.tune(CANDIDATES, *DATA, **BUDGET, **FIT, method="split", progress=False)
    alone = found.plan.fit_plan.epsilon(1e-5)
    assert alone < 0.9 * found.epsilon
    found.fit.save(tmp_path / "fit.npz")
    assert dpvim.load(tmp_path / "fit.npz").privacy.epsilon == found.epsilon
    assert "best of several" in str(found.fit.privacy)


@pytest.mark.parametrize("candidates", [CANDIDATES, MANY], ids=len)
def test_the_plan_costs_what_it_says(candidates):
    plan = dpvim.plan_tuning(candidates, *DATA, **BUDGET, **FIT)
    trial = [plan.fit_plan.dp_event, plan.score_plan.dp_event]
    facts = {"delta": 1e-5, "relation": plan.fit_plan.relation}
    if len(candidates) == 2:
        assert plan.method == "split"
        cost = accounting.epsilon_of(trial * 2, **facts)
    else:
        assert plan.method == "repeat"
        assert plan.repeats.chance_of(1 / len(candidates)) >= 0.79
        cost = epsilon_of_selection(trial, plan.repeats, **facts)
    assert plan.epsilon == pytest.approx(cost)
    assert 7.8 < cost <= 8.0
    assert plan.noise_by_method[plan.method] == min(plan.noise_by_method.values())
    assert "Plan of a choice" in str(plan)


def test_trials_have_one_plan_whatever_they_try(monkeypatch):
    """Noise, sampling and length of a trial must not tell the candidate."""
    seen = []
    own_fit = tuning.fit

    def spy(model, *data, **options):
        seen.append({k: options[k] for k in ("noise_multiplier", "sampling_prob", "num_steps")})
        return own_fit(model, *data, **options)

    monkeypatch.setattr(tuning, "fit", spy)
    candidates = CANDIDATES | {"slower": (CANDIDATES["poisson"], {"learning_rate": 0.01})}
    shared = {k: v for k, v in FIT.items() if k != "learning_rate"}
    dpvim.tune(candidates, *DATA, **BUDGET, **shared, method="split", progress=False)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_the_number_of_trials_is_that_of_the_distribution(monkeypatch):
    """As many as are drawn are run, and a candidate is drawn for each."""
    ran = []
    monkeypatch.setattr(tuning.Repeats, "draw", lambda self, rng: 7)

    def run(self, number, name):
        ran.append(name)
        return tuning.Trial(name, object(), None if name == "normal" else _Scored(number))

    monkeypatch.setattr(tuning.Trials, "run", run)
    found = dpvim.tune(CANDIDATES, *DATA, **BUDGET, **FIT, method="repeat", seed=3)
    assert len(ran) == 7
    assert set(ran) == set(CANDIDATES)
    assert found.name == "poisson"


class _Scored:
    def __init__(self, mean):
        self.mean = mean


def test_a_trial_that_diverges_is_the_worst_and_says_nothing(monkeypatch):
    def diverge(*args, **kwargs):
        raise np.linalg.LinAlgError("no")

    monkeypatch.setattr(tuning, "score_records", diverge)
    with pytest.raises(dpvim.DivergedError, match="all others"):
        dpvim.tune(CANDIDATES, *DATA, **BUDGET, **FIT, method="split", progress=False)


@pytest.mark.parametrize(
    ("candidates", "more", "match"),
    [
        ({"one": CANDIDATES["poisson"]}, {}, "at least two"),
        (CANDIDATES | {"no": 3}, {}, "expected a model"),
        (CANDIDATES | {"x": (CANDIDATES["poisson"], {"num_steps": 9})}, {}, "same for all"),
        (CANDIDATES | {"x": (CANDIDATES["poisson"], {"checkpoint": "a"})}, {}, "same for all"),
        (CANDIDATES, {"noise_multiplier": 1.0}, "noise_multiplier"),
        (CANDIDATES, {"method": "guess"}, "method"),
        (CANDIDATES, {"chance": 1.5}, "chance"),
    ],
)
def test_bad_choices_are_refused(candidates, more, match):
    with pytest.raises((ValueError, TypeError), match=match):
        dpvim.tune(candidates, *DATA, **BUDGET, **FIT, **more)


def test_nothing_tells_how_many_trials_there_were(monkeypatch, recwarn):
    """Not even a warning that is shown once a trial."""
    monkeypatch.setattr(tuning.Repeats, "draw", lambda self, rng: 3)

    def warn(*args, **options):
        for kind in (UserWarning, dpvim.PrivacyWarning, RuntimeWarning):
            tuning.warnings.warn("told", kind, stacklevel=1)
        raise ValueError("told")

    monkeypatch.setattr(tuning, "fit", warn)
    with pytest.raises(dpvim.DivergedError):
        dpvim.tune(CANDIDATES, *DATA, **BUDGET, **FIT, method="repeat", seed=3)
    assert not [each for each in recwarn if "told" in str(each.message)]


def test_sampled_batches_can_be_repeated_at_a_large_epsilon():
    data = tuple(np.tile(each, 20) for each in DATA)
    plan = dpvim.plan_tuning(
        MANY, *data, epsilon=6.0, delta=1e-6, **FIT, sampling_prob=0.02, method="repeat"
    )
    assert 5.8 < plan.epsilon <= 6.0


def test_lengths_may_be_given_in_epochs():
    options = {k: v for k, v in FIT.items() if k != "num_steps"} | {"num_epochs": 100}
    found = dpvim.tune(CANDIDATES, *DATA, **BUDGET, **options, method="split", progress=False)
    assert found.plan.fit_plan.num_steps == 100
