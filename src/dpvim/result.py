"""`Fit`, the result: posterior, trace, privacy statement, files, plots, and how to resume."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from jaxtyping import Array
from numpyro.infer.autoguide import AutoGuide

from dpvim import _html, _validate, serialization
from dpvim._compile import single_precision
from dpvim._extras import require
from dpvim._progress import show_progress
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.persons import read_inputs
from dpvim.inference.blocks import Blocks
from dpvim.inference.engine import State
from dpvim.inference.families import Family
from dpvim.inference.release_sums import LARGEST_FULL_DIM, ReleaseSums
from dpvim.inference.steering import SteeredReleases, Steering
from dpvim.inference.trace import Trace
from dpvim.ledger.payment import Account
from dpvim.posterior.doubts import warn_of_doubts
from dpvim.posterior.from_trace import (
    EstimateName,
    GaussianPosterior,
    NoiseAwareness,
    WindowRule,
    posterior_from_trace,
)
from dpvim.posterior.posterior import Posterior
from dpvim.prepared import PreparedFit, numpyro_params
from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement, round_up
from dpvim.privacy.steps import StepCounter
from dpvim.serialization import SavedFit
from dpvim.types import NotPrivateError, Origin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpvim.posterior.from_releases.exact_prior import PriorDraws
    from dpvim.posterior.from_releases.regression import GaussianPrior


# The trace of a steered run.
_PROBES_ARE_NO_WALK = (
    "the iterates of a run that follows its releases are where it looked; their spread does not "
    "tell how far the noise has moved them. Use fit.posterior; resume a run that was interrupted."
)
Method: TypeAlias = Literal["releases", "trace", "last"]
_METHODS = ("releases", "trace", "last")


@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model. Every part of a private fit is a DP output or public; it holds no data.

    Attributes:
        plan: What the run did to the data.
        privacy: What was released, under which guarantee.
        trace: Snapshots of the variational parameters, the initial value first.
        space: The latent sites of the model.
        family: The variational family.
        releases: Sums of the released gradients and their points; None if the variant releases
            something else, and for files of older versions.
        saved_prior: A Gaussian that stands for the model's prior, in a fit that was loaded.
        several_modes: Sites that the model declares to have several modes.
        is_mixture: Whether an observed site of the model is a mixture of distributions.
        saved_draws: Draws of the posterior with the model's own prior, in a fit that was loaded.
        blocks: Blocks of the latent, which share no term of the likelihood; None if unknown.
        session: What took the steps, to go on with; None for a fit that was loaded. It knows the
            shapes of the data, so it is for the data holder; `save` leaves it out.

    >>> import dpvim, numpyro, numpyro.distributions as dist, tempfile
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> fit = dpvim.fit(model, np.full(2000, 2.0), epsilon=1.0, delta=1e-5)
    >>> fit.posterior.method
    'releases'
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fit.save(f"{folder}/fit.npz")
    ...     again = load(f"{folder}/fit.npz")  # without data and model
    >>> bool(again.posterior.mean["mean"] == fit.posterior.mean["mean"])
    True
    """

    plan: Plan
    privacy: PrivacyStatement | NoPrivacy
    trace: Trace
    space: LatentSpace
    family: Family
    releases: ReleaseSums | SteeredReleases | None = None
    saved_prior: GaussianPrior | None = None
    several_modes: tuple[str, ...] = ()
    is_mixture: bool = False
    saved_draws: PriorDraws | None = None
    blocks: Blocks | None = None
    session: Session | None = None

    @functools.cached_property
    def posterior(self) -> Posterior:
        """The posterior of the parameters, including the uncertainty that the DP noise adds.

        Inferred from the releases where these can tell: of runs that follow them
        (docs/defaults.md), and of private runs of the aligned variant (docs/honest-posterior.md)
        that are not too short and have proper priors. Parameters that share no term of the
        likelihood are inferred apart, in blocks; blocks with more than 128 parameters, or of sites
        that the model declares to have several modes, have the average of the trace, and so has a
        fit that is no such run. ``posterior.method`` and ``posterior.reason`` say which, and why;
        ``posterior.summary()`` says it of each parameter.

        Parameters whose intervals are doubtful are announced with a `ConvergenceWarning`;
        `posterior.not_converged` and `posterior.summary()` name them.
        """
        found = self._from_trace if self._why_not_releases else self._by_block
        warn_of_doubts(found, stacklevel=4)
        return found

    @functools.cached_property
    def averaged(self) -> Posterior:
        """The average of the converged part of the trace: ``posterior_from("trace")``."""
        found = self._from_trace
        warn_of_doubts(found, stacklevel=4)
        return found

    @single_precision
    def posterior_from(
        self,
        method: Method,
        *,
        noise_aware: NoiseAwareness | Literal["matching"] = "matching",
        window: WindowRule = "auto",
    ) -> Posterior:
        """The posterior by a method of your choice, from the same run, at no cost.

        Args:
            method: ``"releases"``: inferred from the released gradients, whatever the trace did
                (docs/honest-posterior.md). ``"trace"``: the average of the converged part of the
                trace. ``"last"``: the last iterate.
            noise_aware: For trace and last: what is added to the variance for the noise of the
                run, that of an ``"iterate"``, that of the window's ``"average"``, or None for
                nothing. By default what matches the method.
            window: For trace and last: ``"auto"``, ``"slope"`` (the paper's), ``"rhat"``, or a
                number of snapshots.
        """
        _validate.one_of("method", method, _METHODS)
        if method != "releases":
            return self._from_iterates(method, noise_aware, window)
        if (noise_aware, window) != ("matching", "auto"):
            raise ValueError(
                "method='releases' does not look at the trace: leave out noise_aware= and window=."
            )
        found = self._from_releases
        warn_of_doubts(found, stacklevel=4)
        return found

    def posterior_at(
        self,
        estimate: EstimateName = "average",
        *,
        noise_aware: NoiseAwareness | Literal["matching", "releases"] = "matching",
        window: WindowRule = "auto",
    ) -> Posterior:
        """`posterior_from` under the names it used to have."""
        if noise_aware == "releases":
            if (estimate, window) != ("average", "auto"):
                raise ValueError(
                    "noise_aware='releases' does not look at the trace: leave out estimate= and "
                    "window=."
                )
            return self.posterior_from("releases")
        _validate.one_of("estimate", estimate, ("average", "last"))
        method: Method = "last" if estimate == "last" else "trace"
        return self.posterior_from(method, noise_aware=noise_aware, window=window)

    def _from_iterates(
        self,
        method: Method,
        noise_aware: NoiseAwareness | Literal["matching"],
        window: WindowRule,
    ) -> Posterior:
        estimate: EstimateName = "last" if method == "last" else "average"
        if noise_aware == "matching":
            noise_aware = "iterate" if estimate == "last" else "average"
        found = posterior_from_trace(
            self.trace, self.family, estimate=estimate, noise_aware=noise_aware, window=window
        )
        reason = self._why_not_releases or "asked for"
        posterior = self._as_posterior(found, method, reason)
        if isinstance(self.releases, SteeredReleases):
            posterior = dataclasses.replace(posterior, remarks=(_PROBES_ARE_NO_WALK,))
        return posterior

    @functools.cached_property
    def _from_trace(self) -> Posterior:
        return self.posterior_from("trace")

    def _as_posterior(self, found: Any, method: str, reason: str) -> Posterior:
        facts = self.privacy.to_dict()
        return Posterior(found, self.space, self.trace.every, facts, method, reason)

    @functools.cached_property
    @single_precision
    def prior(self) -> GaussianPrior:
        """Independent Gaussians that stand for the model's prior of the unconstrained latent."""
        if self.saved_prior is not None:
            return self.saved_prior
        return self._session("the prior").prepared.gaussian_prior()

    @functools.cached_property
    def _why_not_releases(self) -> str | None:
        """Reason not to infer the posterior from the releases; None if there is none."""
        sums = self.releases
        if not isinstance(self.plan, PrivacyPlan):
            return "the run had no noise"
        if sums is None:
            return "no sums of released gradients were kept; they are for the aligned variant"
        if isinstance(sums, SteeredReleases):
            return None if sums.is_complete else "the run was interrupted"
        why_not = self._why_not_blocks
        if len(why_not) == len(self._blocks.members):
            return next(iter(why_not.values()))
        if self.saved_prior is None and self.session is None:
            return "the file has no prior"
        try:
            _ = self.prior
        except NotImplementedError:
            return "the prior is improper"
        return None

    @property
    def _blocks(self) -> Blocks:
        return self.blocks or Blocks.one(self.space.dim)

    @functools.cached_property
    def _why_not_blocks(self) -> dict[int, str]:
        """Blocks whose posterior is not inferred from the releases, by number, and why."""
        assert isinstance(self.releases, ReleaseSums)
        sites = np.repeat(
            [site.name in self.several_modes for site in self.space.sites],
            [site.raw_size for site in self.space.sites],
        )
        found = {}
        for number, members in enumerate(self._blocks.members):
            sums = self.releases.of_block(number, self._blocks)
            if sites[members].any():
                found[number] = "the model has several modes, and releases tell about one"
            elif not sums.is_full:
                found[number] = f"{len(members)} parameters are more than {LARGEST_FULL_DIM}"
            elif not sums.are_enough:
                found[number] = "the run is too short for its parameters"
        # A family that is no Gaussian has no posterior of some of its coordinates alone.
        if found and not self.family.is_gaussian:
            return dict.fromkeys(range(len(self._blocks.members)), next(iter(found.values())))
        return found

    @functools.cached_property
    @single_precision
    def _by_block(self) -> Posterior:
        """Blocks from the releases where they can tell, and from the trace where not."""
        if not isinstance(self.releases, ReleaseSums) or not self._why_not_blocks:
            return self._from_releases
        from dpvim.posterior.joint import posterior_by_block

        why_not, members = self._why_not_blocks, self._blocks.members
        trace = cast(GaussianPosterior, self._from_trace.latent_dist)
        found = posterior_by_block(
            self.releases,
            self.plan,
            self.prior,
            self._blocks,
            others={number: trace.of(members[number]) for number in why_not},
            snapshot_steps=self.trace.every,
        )
        methods = np.full(self.space.dim, "releases")
        for number in why_not:
            methods[members[number]] = "trace"
        reasons = " and ".join(dict.fromkeys(why_not.values()))
        reason = f"by block: the trace for {(methods == 'trace').sum()} parameters, since {reasons}"
        posterior = self._as_posterior(found, "releases and trace", reason)
        return dataclasses.replace(posterior, methods=tuple(map(str, methods)))

    @functools.cached_property
    @single_precision
    def _from_releases(self) -> Posterior:
        if self.releases is None:
            raise ValueError(
                "method='releases': this fit has no sums of released gradients. They are kept "
                "for variant='aligned', in fits (and files) made with this version."
            )
        from dpvim.posterior.joint import posterior_by_block

        why_not, every = self._why_not_releases, self.trace.every
        if why_not is None and isinstance(self.releases, ReleaseSums):
            why_not = next(iter(self._why_not_blocks.values()), None)
        reason = "identified by them" if why_not is None else f"asked for, although {why_not}"
        if not isinstance(self.releases, SteeredReleases):
            found = posterior_by_block(
                self.releases, self.plan, self.prior, self._blocks, snapshot_steps=every
            )
            return self._as_posterior(found, "releases", reason)
        steered, draws = self._from_windows
        has_prior_alone = not self.releases.basis.any(axis=1).all()
        if draws is None and self.session is None and has_prior_alone:
            reason += ", with independent Gaussians for the prior: the file has no draws"
        return self._as_posterior(steered, "releases", reason)

    @functools.cached_property
    def _from_windows(self) -> tuple[Any, PriorDraws | None]:
        """The posterior of a steered run, and its draws if it has no closed form."""
        from dpvim.posterior.from_releases.exact_prior import posterior_from_windows

        return posterior_from_windows(
            cast(SteeredReleases, self.releases),
            cast(PrivacyPlan, self.plan),
            self.prior,
            log_prior=None if self.session is None else self.session.prepared.log_prior,
            draws=self.saved_draws,
            snapshot_steps=self.trace.every,
            is_mixture=self.is_mixture,
        )

    @property
    def interrupted(self) -> bool:
        """True if the run was stopped before its last step; `resume` takes the others."""
        return int(self.trace.steps[-1]) < self.plan.num_steps

    @property
    @single_precision
    def params(self) -> dict[str, Array]:
        """The last iterate under NumPyro's names, for `Predictive` with `guide`."""
        return numpyro_params(self.family, self.trace.last)

    @property
    def guide(self) -> AutoGuide:
        """NumPyro's automatic guide that `params` belong to."""
        return self._session("the guide").prepared.guide

    def resume(self, *data: Any, progress: bool | None = None, **keyword_data: Any) -> Fit:
        """Take the steps that an interrupted fit left, on the same data, in the same plan.

        A fit with a ledger was settled at the steps that it took; the others are booked anew.
        A fit by persons needs ``group_by=`` again; rows of those who have too many are drawn anew.
        """
        if not self.interrupted:
            return self
        return _continue(self, self._session("resume"), data, keyword_data, progress)

    def save(self, path: str | Path, *, not_for_release: bool = False) -> None:
        """Write the fit to one file: arrays and json, no code, no data.

        Args:
            path: The file.
            not_for_release: A fit without a privacy guarantee (with a given seed, or from
                `fit_nonprivate`) is saved only if this is set, and the file says what it is.
        """
        if not (self.privacy.private or not_for_release):
            raise NotPrivateError(
                f"{path}: this fit has no privacy guarantee "
                f"({_why_not_private(self.privacy)}), and a saved fit is made to be shared. For "
                "a file that stays with you: save(path, not_for_release=True)."
            )
        saved = SavedFit(self.plan, self.privacy, self.trace, self.space, self.family)
        saved = saved._replace(
            several_modes=self.several_modes, is_mixture=self.is_mixture, blocks=self.blocks
        )
        if self.releases is not None:
            with contextlib.suppress(NotImplementedError):  # a prior that cannot be drawn from
                saved = saved._replace(prior=self.prior)
            saved = saved._replace(releases=self.releases)
        if isinstance(self.releases, SteeredReleases) and self.releases.is_complete:
            saved = saved._replace(draws=self._from_windows[1])
        serialization.write(path, saved)

    def plot_trace(self, **options: Any) -> Figure:
        """The parameters as the run went on; see `dpvim.plots.plot_trace`."""
        plots = require("dpvim.plots", extra="plots")
        return plots.plot_trace(self.trace, self._from_trace, self.family, **options)

    def plot_posterior(self, **options: Any) -> Figure:
        """Means and intervals, with and without DP noise; see `dpvim.plots.plot_posterior`."""
        plots = require("dpvim.plots", extra="plots")
        return plots.plot_posterior(self.posterior, **options)

    def plot_convergence(self, **options: Any) -> Figure:
        """Plot the lengths of the windows, in autocorrelation times; see `dpvim.plots`."""
        plots = require("dpvim.plots", extra="plots")
        return plots.plot_convergence(self.trace, self._from_trace, **options)

    def plot_norms(self, **options: Any) -> Figure:
        """Records by the norm of their gradient, as released; see `dpvim.plots.plot_norms`."""
        if not isinstance(self.releases, SteeredReleases):
            raise ValueError(
                "plot_norms: expected a fit with defaults, which counts records by the norm of "
                "their gradient in its releases; this one has no counts."
            )
        plots = require("dpvim.plots", extra="plots")
        return plots.plot_norms(self.releases, cast(PrivacyPlan, self.plan), **options)

    def _session(self, what: str) -> Session:
        if self.session is None:
            raise RuntimeError(f"{what} needs the model, which a loaded fit does not have.")
        return self.session

    def __repr__(self) -> str:
        kind = "Fit" if self.privacy.private else "NOT PRIVATE Fit"
        cost = ""
        if self.privacy.private:
            cost = f"epsilon={round_up(self.privacy.epsilon)} a {self.plan.unit.value}, "
        return f"<{kind}: {cost}{int(self.trace.steps[-1]):,} steps, d={self.family.dim}>"

    def _repr_html_(self) -> str:
        # The posterior may take a while to infer, so that it is not shown unasked.
        done = int(self.trace.steps[-1])
        stopped = f" of {self.plan.num_steps:,}, interrupted" if self.interrupted else ""
        rows = {
            "steps": f"{done:,}{stopped}",
            "parameters": f"{self.family.dim:,}",
            "sites": ", ".join(site.name for site in self.space.sites),
            "family": self.family.name,
        }
        is_private = self.privacy.private
        return _html.card(
            "Fit" if is_private else "NOT PRIVATE Fit",
            _html.facts(rows),
            self.privacy._repr_html_(),
            _html.paragraph("fit.posterior is the answer; fit.plot_posterior() draws it."),
            is_bad=not is_private,
        )


class Session(NamedTuple):
    """A run that can go on: the prepared model, the count of its steps, and where it stopped.

    `account` is what its steps are booked in, if anything is.
    """

    prepared: PreparedFit
    counter: StepCounter
    seed: int | None
    state: State
    steering: Steering | None = None
    account: Account | None = None
    checkpoint: str | os.PathLike[str] | None = None


def load(path: str | Path) -> Fit:
    """A fit that was saved: posterior, trace and statement, without data or model.

    Raises:
        FileError: For files that are cut short, of another kind, or from a newer dpvim.

    `dpvim.Fit` has an example.
    """
    return Fit(*serialization.read(path))


@single_precision
def _continue(
    fit: Fit,
    session: Session,
    data: tuple[Any, ...],
    keyword_data: dict[str, Any],
    progress: bool | None,
) -> Fit:
    prepared, counter, seed, state, steering, account, checkpoint = session
    if checkpoint is not None:  # with other noise, the same steps would be paid for twice
        raise ValueError(
            f"resume: this run has a checkpoint. Call dpvim.fit as before, with "
            f"checkpoint={os.fspath(checkpoint)!r}: it goes on from there, with the noise that "
            "belongs to its steps."
        )
    if prepared.engine.sharing is not None:
        raise ValueError(
            "resume: expected a run of one process, got one of several, whose connections are "
            "closed. It costs the steps that it took; start another."
        )
    inputs = read_inputs(
        data,
        keyword_data,
        max_rows_per_person=fit.plan.max_rows_per_person,
        streams=SecretStreams(seed, start_step=int(state.step)),
    )
    if inputs.signature != prepared.signature:
        raise ValueError(
            "data: expected the records that the fit began with; these have other shapes, types or "
            "constants."
        )
    result = prepared.run_counted(
        counter,
        seed,
        state,
        inputs.records,
        num_steps=fit.plan.num_steps - int(state.step),
        trace_every=fit.trace.every,
        progress=show_progress(progress),
        steering=steering,
        account=account,
    )
    privacy = counter.statement(
        delta=fit.privacy.delta if isinstance(fit.privacy, PrivacyStatement) else None,
        step=int(result.state.step),
        origin=Origin(int(result.state.origin)),
        released=prepared.released,
    )
    return dataclasses.replace(
        fit,
        privacy=privacy,
        trace=fit.trace.concat(result.trace),
        releases=_with_later(fit.releases, result.releases),
        session=session._replace(state=result.state, steering=result.steering),
    )


def _with_later(before: Any, after: Any) -> Any:
    """The releases of a run and of its continuation; what steers a run has both already."""
    if isinstance(before, ReleaseSums) and isinstance(after, ReleaseSums):
        return before.concat(after)
    return after if isinstance(after, SteeredReleases) else None


def _why_not_private(privacy: PrivacyStatement | NoPrivacy) -> str:
    if isinstance(privacy, NoPrivacy):
        return "it used the data without clipping or noise"
    return "its noise came from a given seed"
