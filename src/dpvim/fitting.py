"""`fit`: a private posterior in one call; `fit_many`: many of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from dpvim import _validate, cells
from dpvim._compile import single_precision
from dpvim._progress import show_progress
from dpvim.bridge.data import ModelInput, check_model
from dpvim.bridge.model import bridge
from dpvim.bridge.persons import GROUP_BY, given_rows, read_inputs, rows_of
from dpvim.cells import THREADS, Cluster, Sweep
from dpvim.inference.loop import runs_per_program
from dpvim.inference.monitor import UNMONITORED, RunMonitor, monitoring
from dpvim.jobs import begin, check_alike, refuse_what_cannot_be_shared
from dpvim.ledger.book import Job
from dpvim.ledger.payment import Account, Tally, book_once, paid
from dpvim.options import Budget, FitOptions, RunLength, take
from dpvim.prepared import PreparedFit, RunResult
from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams, fresh_key
from dpvim.privacy.steps import StepCounter, origin_of
from dpvim.rendezvous import meet, refuse_several_processes, several_processes
from dpvim.result import Fit, Session
from dpvim.resumable import kept
from dpvim.strategy import Request, choose
from dpvim.svi import warn_of_seed
from dpvim.types import Origin

Model = Callable[..., Any]


def fit(model: Model, *data: Any, **options: Any) -> Fit:
    r"""Fit a NumPyro model to records under (epsilon, delta)-differential privacy.

    Args:
        model: Written for the whole data set, as for NUTS. Its observed sites must be independent
            over records given the latents.
        data, keyword_data: What the model takes: arrays with a row for each record, in dicts,
            lists and tuples as you like. Python numbers and texts given as arguments of their own
            are public constants; anything else that is public is declared: `dpvim.public(value)`.
        group_by, max_rows_per_person: For data with several rows a person: for each row the id of
            its person, and the most rows of one that are to be used. Persons instead of rows are
            then sampled, clipped and protected: whatever is said of records below holds for them.
            Of a person with more rows so many are chosen at random. The number is public: choose
            it without looking at the data.
        epsilon, delta: The budget. Or give `noise_multiplier`, and epsilon is reported. More is not
            needed: the run follows its releases (docs/defaults.md) unless an option below says how
            to optimise or to clip. `dpvim.plan` shows what will be done.
        variant: ``whitened``, ``aligned``, ``vanilla``, ``natural``, ``preconditioned``,
            ``aligned_natural``. With options of an optimiser the default is ``aligned``.
        family: ``mean_field``, ``full_rank``, ``block_diagonal`` (full-rank within a site),
            ``low_rank``, ``flow`` (needs flowjax); `dpvim.family` for one with options; or
            NumPyro's AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal.
        clip_norm: Largest norm C of one record's gradient; must not be taken from the data. Given,
            longer ones are shortened, a bias that no interval of the aligned variant shows.
        sampling_prob: Probability q that a record is in a batch. Default: about 2^19 / d records,
            all of them if that is half of the data.
        num_steps, num_epochs: Length of the run; an epoch is 1/q steps. Default: 4096 steps or
            more, by the number of parameters; with an optimiser 10 000.
        num_examples: Public number of records. Needed with ``relation="add_or_remove"``.
        relation: Which data sets are neighbours; see `dpvim.Relation`.
        optimizer: An optax optimiser; Adam with `learning_rate` (1e-3) where one is needed.
        init_scale: Standard deviations that the approximation starts with; a guide brings its own.
        init_params: Initial values by site name; others start near the middle of their support.
        scale_transform: ``softplus`` or ``exp``.
        probe_width: How much wider than the approximation gradients are taken in the first three
            quarters of the run, at least 1. It costs no privacy and makes the posterior from the
            releases narrower (docs/honest-posterior.md). ``"auto"``: a quarter of the root of
            records a parameter, 1 to 8; 1 for blocks of more than 128, and for variants that
            cannot probe elsewhere.
        trace_every: Steps between snapshots. Default: about 2000 snapshots.
        ledger: A `dpvim.Ledger`, or its file: the fit is booked there before its first step, with
            `purpose` (default: the model's name), and refused if the data's budget does not pay
            for it. A fit that is stopped costs the steps it took. Not with a seed.
        seed: For tests and experiments: fixes all randomness, and with it undoes the privacy.
        progress: Show a progress bar. Default: if standard error is a terminal.
        checkpoint: A folder for the run's progress. After a crash the same call goes on from there
            and ends with the same fit, bit for bit; its budget is spent once. The folder holds
            secrets until the run ends (docs/checkpoints.md).

    Under an initialised `jax.distributed` of several processes each calls this with the rows that
    it has, and all get the fit to the rows of all (docs/processes.md).

    Returns:
        A `Fit` with ``.posterior``, ``.trace``, ``.privacy`` and ``.plan``. If Ctrl-C stopped the
        run it holds what was released until then, at the price of the steps taken.

    Raises:
        ValueError, TypeError: Before any budget is spent, for input that cannot be used; a
            `FileError` for a checkpoint that cannot be used.
        BudgetExceededError: The ledger does not pay for it. Says what it would pay for.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> x = np.random.default_rng(0).normal(2.0, 1.0, 3000)
    >>> result = fit(model, x, epsilon=1.0, delta=1e-5)
    >>> bool(abs(result.posterior.mean["mean"] - 2) < 1)
    True
    >>> result.privacy.epsilon <= 1
    True
    """
    return fit_on(None, model, *data, **options)


def fit_on(ray: Cluster | None, model: Model, *data: Any, **options: Any) -> Fit:
    """`fit`, with its steps taken by a worker if there are any."""
    call = Request(take(Budget, options), take(FitOptions, options))
    if several_processes():
        return _fit_shard(model, data, options, call)
    return _fit_all(model, data, options, [call], ray)[0]


def fit_nonprivate(model: Model, *data: Any, **options: Any) -> Fit:
    """Fit by the same optimisation without clip and noise: a baseline, NOT PRIVATE.

    The arguments are those of `fit`, without the ones that are a matter of privacy; gradients are
    taken where the approximation is (``probe_width=1``) unless told.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> x = np.random.default_rng(0).normal(2.0, 1.0, 3000)
    >>> baseline = fit_nonprivate(model, x, num_steps=500, learning_rate=0.05)
    >>> baseline.privacy.private
    False
    """
    if options.get("ledger") is not None:
        raise ValueError(
            "ledger: expected none, got one. A fit without noise has no price that could be booked."
        )
    _refuse_checkpoint("fit_nonprivate", options)
    refuse_several_processes("fit_nonprivate")
    options = {"probe_width": 1.0, **options}
    call = Request(take(RunLength, options), take(FitOptions, options))
    return _fit_all(model, data, options, [call])[0]


def fit_many(
    model: Model,
    *data: Any,
    each: Sequence[Mapping[str, Any]],
    delta: float,
    on: str = THREADS,
    **options: Any,
) -> list[Fit]:
    """Many fits of one model to the same records: for experiments, on all cores.

    Fits with the same noise run as one compiled program, small ones several at a time.

    Args:
        model, data: As in `fit`.
        each: What is particular to each fit: any of ``epsilon``, ``noise_multiplier``, ``seed``
            and ``init_params``. ``[{"epsilon": e, "seed": s} for e in (1, 4) for s in range(10)]``
            asks for twenty fits.
        delta: As in `fit`.
        on: ``threads`` of this process, or ``ray``: workers of a Ray cluster (docs/sweeps.md).
        options: What all fits share: the other arguments of `fit`, and data given by keyword.

    Returns:
        A `Fit` for each, in order. If Ctrl-C stopped them they hold what was released until then;
        on Ray they are given up, at their full price.

    Each fit's statement is about that fit alone. With a ledger all fits are booked at once, or none
    of them is; without one, whoever publishes several has to find what they cost together.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> x = np.random.default_rng(0).normal(2.0, 1.0, 3000)
    >>> both = [{"epsilon": 1.0}, {"epsilon": 4.0}]
    >>> fits = fit_many(model, x, each=both, delta=1e-5, clip_norm=1.0, num_steps=100)
    >>> [round(each.privacy.epsilon, 2) for each in fits]
    [1.0, 4.0]
    """
    _validate.an_instance("each", each, (list, tuple), "a list of dicts of options")
    if not each:
        raise ValueError("each: expected at least one fit, got an empty list.")
    _refuse_checkpoint("fit_many", options)
    refuse_several_processes("fit_many")
    calls = []
    for own in each:
        _validate.an_instance("each", own, Mapping, "a list of dicts of options")
        for name in own:
            _validate.one_of("each", name, _PARTICULAR)
            if name in options:
                raise ValueError(f"{name}: expected in `each` or for all fits, got both.")
        keyword_data = {"delta": delta, **options, **own}
        calls.append(Request(take(Budget, keyword_data), take(FitOptions, keyword_data)))
    with cells.opened(on) as ray:
        return _fit_all(model, data, keyword_data, calls, ray)


def _refuse_checkpoint(name: str, options: Mapping[str, Any]) -> None:
    if options.get("checkpoint") is not None:
        raise ValueError(
            f"checkpoint: expected with dpvim.fit, got it with {name}. Call dpvim.fit for each, "
            "with a folder of its own."
        )


_PARTICULAR = ("epsilon", "noise_multiplier", "seed", "init_params")


def _show_options(function: Any, *kinds: Any) -> None:
    """Let `help` and editors see the options that a function takes by keyword."""
    inspected = inspect.Parameter
    shown = [
        inspected("model", inspected.POSITIONAL_ONLY, annotation="Callable[..., Any]"),
        inspected("data", inspected.VAR_POSITIONAL, annotation="Any"),
    ]
    shown.append(inspected(GROUP_BY, inspected.KEYWORD_ONLY, default=None, annotation="Any"))
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        required = field.default is dataclasses.MISSING
        default = inspected.empty if required else field.default
        shown.append(
            inspected(field.name, inspected.KEYWORD_ONLY, default=default, annotation=field.type)
        )
    shown.append(inspected("keyword_data", inspected.VAR_KEYWORD, annotation="Any"))
    function.__signature__ = inspect.Signature(shown, return_annotation="Fit")


_show_options(fit, Budget, FitOptions)
_show_options(fit_nonprivate, RunLength, FitOptions)


@single_precision
def _fit_all(
    model: Model,
    data: tuple[Any, ...],
    keyword_data: dict[str, Any],
    calls: list[Request],
    ray: Cluster | None = None,
) -> list[Fit]:
    """Check everything, make the plans, take the steps.

    The calls share everything but seeds, initial values and noise.
    """
    check_model(model, data, [name for name in keyword_data if name != GROUP_BY])
    seeds = [call.options.seed for call in calls]
    most_rows = calls[0].length.max_rows_per_person
    read = functools.partial(read_inputs, data, keyword_data, max_rows_per_person=most_rows)
    inputs = read(streams=SecretStreams(None if None in seeds else seeds[0]))
    bridged = bridge(model, inputs)
    chosen = choose(calls, bridged, inputs.num_rows)
    plans = [strategy.plan for strategy in chosen]
    account = _account(model, calls[0])
    if account is not None and most_rows is not None:  # all rows, before any were chosen
        rows = rows_of(data, keyword_data).records
        account = account._replace(ledger=account.ledger.about(rows))
    found: dict[int, Fit] = {}
    progress = show_progress(chosen[0].options.progress)
    with monitoring(sum(plan.num_steps for plan in plans), progress=progress) as monitor:
        todo: list[Callable[[], list[RunResult]]] = []
        groups: list[Group] = []
        owners: list[tuple[int, PreparedFit]] = []
        jobs: list[Job] = []
        tallies: list[Tally] = []
        for plan in dict.fromkeys(plans):
            members = [i for i, other in enumerate(plans) if other == plan]
            options = [chosen[i].options for i in members]
            _warn_once_of_seeds(plan, options)
            prior = chosen[members[0]].prior
            prepared = PreparedFit(model, plan, options[0], inputs, bridged, prior)
            if options[0].checkpoint is not None:  # there is one call, and it pays for itself
                given = inputs.records if most_rows is None else given_rows(data, keyword_data)
                kept_run = functools.partial(
                    _run_kept, prepared, calls[0].delta, inputs, read, given, monitor, account
                )
                todo.append(kept_run)
            else:
                tallies.append(Tally())
                if isinstance(plan, PrivacyPlan):
                    jobs.append(Job(plan, len(members)))
                watched = monitor._replace(begin=tallies[-1].add)
                todo += programs(prepared, options, inputs, watched)
                if ray is not None:
                    own = groups_of(prepared, options, ray.num_processors)
                    groups += [Group(plan, prior, each) for each in own]
            owners += [(i, prepared) for i in members]
        # All that can be wrong with the input is known: from here on it may cost something.
        seeded = any(call.options.seed is not None for call in calls)
        paying = account if jobs else None
        sweep = None if ray is None else _sweep(ray, model, inputs, groups)
        with paid(paying, jobs, tallies, data=inputs.records, seeded=seeded):
            if sweep is None:
                results = in_parallel(todo)
            else:
                for tally, job in zip(tallies, jobs, strict=True):
                    tally.add(job.runs * job.plan.num_steps)  # workers do not tell their steps
                results = _results(sweep, groups, monitor)
    for (i, prepared), result in zip(owners, results, strict=True):
        found[i] = _as_fit(prepared, calls[i], result, account)
    return [found[i] for i in range(len(calls))]


@single_precision
def _fit_shard(
    model: Model, data: tuple[Any, ...], keyword_data: dict[str, Any], call: Request
) -> Fit:
    """A fit of one process of several, whose records are a shard of the data.

    All processes do the same work on the same releases and end with the same fit. Process 0 pays,
    adds the noise, and shows the progress.
    """
    refuse_what_cannot_be_shared(call.length, call.options, keyword_data)
    check_model(model, data, list(keyword_data))
    with meet() as channel:
        job = begin(channel, data, keyword_data, call.options.seed)
        bridged = bridge(model, job.inputs)
        (chosen,) = choose([call], bridged, job.inputs.num_rows)
        plan, options = chosen.plan, chosen.options
        assert isinstance(plan, PrivacyPlan)
        if channel.leads:
            _warn_once_of_seeds(plan, [options])
        setup = (model, plan, options, job.inputs, bridged, chosen.prior)
        check_alike(channel, PreparedFit(*setup), options, call.delta, job)
        prepared = PreparedFit(*setup, sharing=job.sharing)
        account, tally = _account(model, call) if channel.leads else None, Tally()
        progress = channel.leads and show_progress(options.progress)
        with (
            monitoring(plan.num_steps, progress=progress) as monitor,
            paid(account, [Job(plan)], [tally], data=job.data, seeded=options.seed is not None),
        ):
            channel.share()  # nobody begins before it is paid for
            (result,) = prepared.run(
                [prepared.init(job.start, origin_of(plan, options.seed), options.init_params)],
                job.inputs.records,
                streams=[job.streams],
                num_steps=plan.num_steps,
                trace_every=prepared.trace_every(options.trace_every, plan.num_steps),
                monitor=monitor._replace(begin=tally.add),
                steerings=[prepared.steering(options.init_params)],
            )
            channel.most(0)  # all have the last release
    return _as_fit(prepared, call, result, account)


def _account(model: Model, call: Request) -> Account | None:
    """The ledger that all calls are booked in, if any."""
    if not isinstance(call.length, Budget):
        return None
    return call.length.account(f"fit of {getattr(model, '__name__', type(model).__name__)}")


def _warn_once_of_seeds(plan: Plan, options: list[FitOptions]) -> None:
    seed = next((each.seed for each in options if each.seed is not None), None)
    warn_of_seed(plan, seed, stacklevel=6)


def programs(
    prepared: PreparedFit, options: list[FitOptions], inputs: ModelInput, monitor: RunMonitor
) -> list[Callable[[], list[RunResult]]]:
    """All of the plan's steps for each of several runs, in calls that may be made in parallel.

    Every call takes some of the runs, as one vectorised program, and together they take all of
    them in order.
    """
    groups = groups_of(prepared, options, os.cpu_count() or 1)
    return [_program(prepared, own, inputs, monitor) for own in groups]


def groups_of(
    prepared: PreparedFit, options: list[FitOptions], num_processors: int
) -> list[list[FitOptions]]:
    """Runs that are one vectorised program each."""
    most = runs_per_program(prepared.engine)
    # At least one for each core, of about the same size: two sizes are compiled at most.
    number = min(len(options), max(num_processors, -(-len(options) // most)))
    members = np.array_split(np.arange(len(options)), number)
    return [[options[i] for i in own] for own in members]


def _program(
    prepared: PreparedFit, own: list[FitOptions], inputs: ModelInput, monitor: RunMonitor
) -> Callable[[], list[RunResult]]:
    num_steps = prepared.plan.num_steps
    return functools.partial(
        prepared.run,
        [_initial_state(prepared, each) for each in own],
        inputs.records,
        streams=[SecretStreams(each.seed) for each in own],
        num_steps=num_steps,
        trace_every=prepared.trace_every(own[0].trace_every, num_steps),
        monitor=monitor,
        steerings=[prepared.steering(each.init_params) for each in own],
    )


class Group(NamedTuple):
    """Runs of one plan that are one program, as they are sent to a worker."""

    plan: Plan
    prior: Any
    options: list[FitOptions]


def _sweep(ray: Cluster, model: Model, inputs: ModelInput, groups: list[Group]) -> Sweep:
    if inputs.on_disk:
        raise ValueError(
            "on: expected 'threads' for arrays on the disk, which workers elsewhere do not have, "
            "got 'ray'. Leave it out, or load the arrays."
        )
    sent = inputs._replace(records=[np.asarray(leaf) for leaf in inputs.records])
    return ray.sweep(_run_apart, (model, sent), groups)


@single_precision
def _run_apart(shared: tuple[Model, ModelInput], group: Group) -> list[RunResult]:
    """All steps of some runs, in a worker: its noise is drawn there, and stays there."""
    model, inputs = shared
    prepared = PreparedFit(model, group.plan, group.options[0], inputs, prior=group.prior)
    return _program(prepared, group.options, inputs, UNMONITORED)()


def _results(sweep: Sweep, groups: list[Group], monitor: RunMonitor) -> list[RunResult]:
    """Of all groups, in order."""
    found = {}
    for number, results in sweep.results(monitor.stopped):
        found[number] = results
        monitor.advance(groups[number].plan.num_steps * len(results))
    return [result for number in range(len(groups)) for result in found[number]]


def _run_kept(
    prepared: PreparedFit,
    delta: float | None,
    inputs: ModelInput,
    read: Callable[..., ModelInput],
    given: Any,
    monitor: RunMonitor,
    account: Account | None,
) -> list[RunResult]:
    """All of the plan's steps, or those that are left to take, with a checkpoint.

    Whoever continues the run finds its booking under the checkpoint's id. It is settled when the
    run is whole: until then it may go on.

    Args:
        read: Reads `inputs` again, with other coins.
        given: What they are made from.
    """
    options, plan = prepared.options, prepared.plan
    num_steps = plan.num_steps
    with kept(prepared, options, inputs, given, delta=delta) as keeper:
        if plan.max_rows_per_person is not None:
            # The run's own coins: with the same noise, the rows of a person must be the same.
            inputs = read(streams=keeper.streams)
        booking = None
        if account is not None:
            assert isinstance(plan, PrivacyPlan)
            seeded = options.seed is not None
            booking = book_once(
                account, Job(plan), id=keeper.id, data=inputs.records, seeded=seeded
            )
        origin = origin_of(plan, options.seed)
        results = prepared.run(
            [prepared.init(keeper.start, origin, options.init_params)],
            inputs.records,
            streams=[keeper.streams],
            num_steps=num_steps,
            trace_every=prepared.trace_every(options.trace_every, num_steps),
            monitor=monitor,
            steerings=[prepared.steering(options.init_params)],
            keeper=keeper,
        )
        if booking is not None and not results[0].interrupted:
            booking.settle_or_warn(num_steps)
        return results


def _initial_state(prepared: PreparedFit, options: FitOptions) -> Any:
    key = fresh_key() if options.seed is None else jax.random.key(options.seed)
    return prepared.init(key, origin_of(prepared.plan, options.seed), options.init_params)


def in_parallel(calls: list[Callable[[], list[RunResult]]]) -> list[RunResult]:
    """The results of all calls, in order."""
    if len(calls) == 1:
        return calls[0]()
    with ThreadPoolExecutor(os.cpu_count(), "dpvim-fit") as cores:
        parts = [cores.submit(call) for call in calls]
        return [result for part in parts for result in part.result()]


def _as_fit(
    prepared: PreparedFit, call: Request, result: RunResult, account: Account | None
) -> Fit:
    seed, step = call.options.seed, int(result.state.step)
    counter = StepCounter(prepared.plan, origin_of(prepared.plan, seed), taken=step)
    privacy = counter.statement(
        delta=call.delta,
        step=step,
        origin=Origin(int(result.state.origin)),
        released=prepared.released,
    )
    return Fit(
        prepared.plan,
        privacy,
        result.trace,
        prepared.space,
        prepared.family,
        releases=result.releases,
        several_modes=prepared.bridged.several_modes,
        is_mixture=prepared.bridged.is_mixture,
        blocks=prepared.bridged.problem.blocks,
        session=Session(
            prepared,
            counter,
            seed,
            result.state,
            result.steering,
            account,
            call.options.checkpoint,
        ),
    )
