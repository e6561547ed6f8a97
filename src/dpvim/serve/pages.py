"""The pages: from a session to HTML, and from forms to a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpvim.ledger.cost import spelled
from dpvim.serve.forms import fields_of
from dpvim.serve.session import PLAIN_ERRORS, Session
from dpvim.synthesis.fitting import resolve_delta
from dpvim.synthesis.twin import CLOSEST, DATA

STEPS = {
    "/schema": "What is known",
    "/budget": "Budget",
    "/plan": "Plan",
    "/fit": "Fit",
    "/done": "Twin",
}
"""Places, in the order in which they are come to."""


class Redirect(Exception):  # noqa: N818 -- no error
    """The answer is at another place."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class Page(NamedTuple):
    """An answer, which may be the last one."""

    text: str
    is_last: bool = False


class Pages:
    """Pages of a session.

    Args:
        session: The way of a table to its twin.
        form_token: Goes into every form.
    """

    def __init__(self, session: Session, form_token: str) -> None:
        self.session, self._form_token = session, form_token
        self._environment = Environment(
            loader=PackageLoader("dpvim", "serve/templates"),
            autoescape=True,  # names and levels are anybody's
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._shown: dict[str, Callable[..., str]] = {
            "/schema": self._schema,
            "/budget": self._budget,
            "/plan": self._plan,
            "/fit": self._fit,
            "/done": self._done,
        }
        self._taken: dict[str, Callable[[dict[str, str]], Page]] = {
            "/schema": self._take_schema,
            "/budget": self._take_budget,
            "/plan": self._take_plan,
            "/fit": self._take_fit,
            "/close": self._take_close,
        }

    def style(self) -> str:
        """The style sheet."""
        file = resources.files("dpvim") / "serve" / "templates" / "style.css"
        return file.read_text(encoding="utf-8")

    def way_in(self) -> str:
        """A page that leads to the first one, and shows nothing."""
        return self._environment.get_template("way_in.html").render()

    def report(self) -> str:
        """The twin's report."""
        path = self.session.report
        if path is None:
            raise Redirect("/")
        return path.read_text(encoding="utf-8")

    def get(self, place: str) -> str | None:
        """The page at a place; None if there is none. Leads to an earlier one if that comes first.

        Raises:
            Redirect: To the page that comes first.
        """
        if place == "/":
            raise Redirect(self._furthest())
        if place not in self._shown:
            return None
        places = list(STEPS)
        if places.index(place) > places.index(self._furthest()):
            raise Redirect(self._furthest())
        return self._shown[place]()

    def post(self, place: str, form: dict[str, str]) -> Page | None:
        """The answer to a form; None if there is no such form.

        Raises:
            Redirect: To the next page, if all is well.
        """
        return self._taken[place](form) if place in self._taken else None

    def _furthest(self) -> str:
        session, job = self.session, self.session.job
        if job is not None:
            return "/done" if job.twin is not None else "/fit"
        if not session.is_reviewed:
            return "/schema"
        if session.ledger is None:
            return "/budget"
        return "/plan" if session.choice is None else "/fit"

    # -- what is shown ----------------------------------------------------------------------------

    def _schema(self, errors: Mapping[int, str] | None = None, error: str | None = None) -> str:
        session = self.session
        columns = [
            {
                **fields_of(entry),
                "number": number,
                "include": session.included[number],
                "comment": session.comments.get(entry["name"], ""),
                "error": (errors or {}).get(number),
            }
            for number, entry in enumerate(session.entries)
        ]
        return self._render(
            "schema.html",
            "/schema",
            columns=columns,
            left_out=session.left_out,
            is_draft=bool(session.comments),
            path=session.schema_path,
            error=error,
        )

    def _budget(self, error: str | None = None) -> str:
        ledger = self.session.ledger
        facts: dict[str, Any] = {}
        if ledger is not None:
            facts = {
                "name": ledger.name,
                "budget": spelled(ledger.epsilon, ledger.delta),
                "spent": spelled(ledger.spent(), ledger.delta),
                "left": f"{int(ledger.left() * 1e4) / 1e4:.4g}",
                "releases": ledger.releases,
            }
        return self._render(
            "budget.html",
            "/budget",
            ledger=facts,
            path=self.session.ledger_path,
            delta=f"{resolve_delta(None, self.session.num_rows):.3g}",
            error=error,
        )

    def _plan(self, error: str | None = None) -> str:
        ledger = self.session.ledger
        assert ledger is not None
        return self._render(
            "plan.html",
            "/plan",
            names=self.session.schema.names,
            left=f"{int(ledger.left() * 1e4) / 1e4:.4g}",
            delta=ledger.delta,
            error=error,
        )

    def _fit(self, error: str | None = None) -> str:
        session, job = self.session, self.session.job
        running = job is not None and not job.is_over
        if job is not None and job.error is not None:
            error = error or job.error
        return self._render(
            "fit.html",
            "/fit",
            choice=session.choice,
            ledger=session.ledger,
            output=session.output,
            job=job if running else None,
            refresh=2 if running else None,
            is_saved=session.output.exists(),
            error=error,
        )

    def _done(self) -> str:
        session, job = self.session, self.session.job
        assert job is not None
        assert job.twin is not None
        return self._render(
            "done.html",
            "/done",
            statement=str(job.twin.privacy),
            output=session.output.resolve(),
            data=DATA,
            closest=f"{CLOSEST}.csv",
        )

    def _render(self, template: str, place: str, *, refresh: int | None = None, **more: Any) -> str:
        furthest = list(STEPS).index(self._furthest())
        content = {
            "steps": [
                (where, name, i <= furthest) for i, (where, name) in enumerate(STEPS.items())
            ],
            "place": place,
            "table": self.session.table.name,
            "num_rows": self.session.num_rows,
            "form_token": self._form_token,
            "refresh": refresh,
        }
        return self._environment.get_template(template).render(**content, **more)

    # -- what is typed ----------------------------------------------------------------------------

    def _take_schema(self, form: dict[str, str]) -> Page:
        columns: list[dict[str, str]] = [{} for _ in self.session.entries]
        for name, value in form.items():
            key, _, number = name.rpartition(".")
            if number.isdecimal() and int(number) < len(columns):
                columns[int(number)][key] = value
        try:
            errors = self.session.review(columns)
        except PLAIN_ERRORS as error:
            return Page(self._schema(error=str(error)))
        if errors:
            return Page(self._schema(errors))
        if not self.session.is_reviewed:
            names = ", ".join(self.session.schema.unreviewed)
            return Page(self._schema(error=f"Saved. Still to be reviewed: {names}."))
        raise Redirect("/budget")

    def _take_budget(self, form: dict[str, str]) -> Page:
        try:
            delta = form.get("delta", "").strip()
            self.session.declare_budget(
                form.get("name", ""),
                _number("epsilon", form.get("epsilon", "")),
                _number("delta", delta) if delta else None,
            )
        except PLAIN_ERRORS as error:
            return Page(self._budget(error=str(error)))
        raise Redirect("/plan")

    def _take_plan(self, form: dict[str, str]) -> Page:
        if self.session.ledger is None:
            raise Redirect("/")
        try:
            epsilon = _number("epsilon", form.get("epsilon", ""))
            self.session.look_at(epsilon, form.get("target") or None)
        except PLAIN_ERRORS as error:
            return Page(self._plan(error=str(error)))
        raise Redirect("/fit")

    def _take_fit(self, form: dict[str, str]) -> Page:
        try:
            self.session.begin()
        except PLAIN_ERRORS:
            raise Redirect("/") from None
        raise Redirect("/fit")

    def _take_close(self, form: dict[str, str]) -> Page:
        job = self.session.job
        if job is not None and not job.is_over:  # it would be lost, and is paid for
            raise Redirect("/fit")
        return Page(self._render("closed.html", "/close"), is_last=True)


def _number(name: str, text: str) -> float:
    try:
        return float(text.strip())
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text.strip()[:40]!r}.") from None
