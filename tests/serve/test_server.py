"""The page's server: whom it answers, what it says, and that it fits once."""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.parse

import pytest
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.ledger.book import Ledger
from dpvim.serve.server import PageServer
from dpvim.serve.session import Session
from dpvim.synthesis.tables import write_table

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def table(tmp_path, patients):
    path = tmp_path / "patients.csv"
    write_table(patients.rename(columns={"sex": HOSTILE}), path)
    return path


@pytest.fixture
def session(tmp_path, table):
    return Session(
        table,
        schema_path=tmp_path / "patients.toml",
        ledger_path=tmp_path / "patients.ledger",
        output=tmp_path / "twin",
    )


@pytest.fixture
def server(session):
    with PageServer(session) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server, place, *, form=None, cookie=True, host=None, **headers):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers["Host"] = f"127.0.0.1:{server.port}" if host is None else host
    if cookie:
        headers["Cookie"] = f"{server.cookie_name}={server.secrets.cookie}"
    body = None
    if form is not None:
        body = urllib.parse.urlencode(form)
        headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
    connection.request("GET" if form is None else "POST", place, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def send(server, place, form=(), **more):
    return ask(server, place, form={**dict(form), "form_token": server.secrets.form}, **more)


def reviewed(session):
    """What a holder who knows all columns sends."""
    form = {}
    for number, entry in enumerate(session.entries):
        form |= {f"include.{number}": "on", f"reviewed.{number}": "on"}
        form[f"kind.{number}"] = entry["kind"]
        if "levels" in entry:
            form[f"levels.{number}"] = "\n".join(map(str, entry["levels"]))
        else:
            form[f"lower.{number}"] = entry.get("lower", 0)
            form[f"upper.{number}"] = entry["upper"]
        if entry.get("nullable"):
            form[f"nullable.{number}"] = "on"
    return form


BUDGET = {"name": "patients", "epsilon": "3", "delta": "1e-4"}


def come_to_the_fit(server, session):
    assert send(server, "/schema", reviewed(session))[1]["Location"] == "/budget"
    assert send(server, "/budget", BUDGET)[1]["Location"] == "/plan"
    assert send(server, "/plan", {"epsilon": "1"})[1]["Location"] == "/fit"


def test_the_way_in_is_the_token(server):
    status, headers, text = ask(server, server.url.partition(str(server.port))[2], cookie=False)
    assert status == 200
    assert headers["Set-Cookie"] == (
        f"{server.cookie_name}={server.secrets.cookie}; HttpOnly; SameSite=Strict; Path=/"
    )
    assert HOSTILE not in text
    assert "patients" not in text
    assert ask(server, "/?token=wrong", cookie=False)[0] == 403
    assert ask(server, "/?token=", cookie=False)[0] == 403
    assert server.server_address[0] == "127.0.0.1"
    assert len(set(server.secrets)) == 3


@pytest.mark.parametrize("place", ["/", "/schema", "/plan", "/report", "/style.css", "/nothing"])
def test_without_the_cookie_there_is_nothing(server, place):
    for cookie in ("", f"{server.cookie_name}=wrong", "a=b; =;", f"dpvim={server.secrets.cookie}"):
        status, _, text = ask(server, place, cookie=False, Cookie=cookie)
        assert status == 403
        assert "patients" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", ""])
def test_names_that_were_rebound_are_refused(server, host):
    status, _, text = ask(server, "/schema", host=host.format(port=server.port))
    assert status == 421
    assert "patients" not in text
    token = server.url.partition(str(server.port))[2]
    refused = ask(server, token, host=host.format(port=server.port), cookie=False)
    assert (refused[0], refused[1]["Set-Cookie"]) == (421, None)


def test_forms_of_others_are_refused(server, session):
    form = {**BUDGET, "form_token": server.secrets.form}
    refused = [
        ask(server, "/budget", form=BUDGET),
        ask(server, "/budget", form={**BUDGET, "form_token": "wrong"}),
        ask(server, "/budget", form=form, cookie=False),
        ask(server, "/budget", form=form, Origin="https://evil.example"),
        ask(server, "/budget", form=form, Origin="null"),
        ask(server, "/budget", form=form, Sec_Fetch_Site="cross-site"),
    ]
    assert [status for status, _, _ in refused] == [403] * 6
    assert ask(server, "/budget", form=form, Content_Type="text/plain")[0] == 400
    assert session.ledger is None
    own = f"http://127.0.0.1:{server.port}"
    allowed = ask(server, "/budget", form=form, Origin=own, Sec_Fetch_Site="same-origin")
    assert allowed[0] == 303
    assert session.ledger is not None


def test_large_forms_are_not_read(server):
    # Whoever says that so much will come is refused before it does.
    assert send(server, "/budget", BUDGET, Content_Length=str(2**21))[0] == 413


def test_the_page_is_strict_and_loads_nothing_from_elsewhere(server):
    status, headers, text = ask(server, "/schema")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    for rule in ("default-src 'none'", "form-action 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    places = re.findall(r'(?:src|href|action|url)="?=?([^"\s>]+)', text)
    assert places
    assert all(place.startswith("/") and not place.startswith("//") for place in places)
    # Names of columns are texts.
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "style=" not in text


def test_it_says_what_bounds_are(server):
    text = ask(server, "/schema")[2]
    assert "must be public knowledge" in text
    assert "must not come from the data" in text
    assert "without noise" in text


def test_a_review_that_makes_no_schema_changes_nothing(server, session):
    before = (list(session.entries), list(session.included))
    names = [entry["name"] for entry in session.entries]
    nothing = {k: v for k, v in reviewed(session).items() if not k.startswith("include")}
    assert "expected at least one that is part" in send(server, "/schema", nothing)[2]
    formula = {**reviewed(session), f"levels.{names.index(HOSTILE)}": "=1+1\nm"}
    assert "formula" in send(server, "/schema", formula)[2]
    assert (session.entries, session.included) == before
    assert not session.schema_path.exists()
    assert ask(server, "/")[1]["Location"] == "/schema"


def test_steps_come_in_order(server, session):
    for place in ("/", "/budget", "/plan", "/fit", "/done"):
        assert ask(server, place)[1]["Location"] == "/schema"
    assert send(server, "/fit")[1]["Location"] == "/"
    assert send(server, "/plan", {"epsilon": "1"})[1]["Location"] == "/"
    form = reviewed(session)
    del form["reviewed.0"]
    status, _, text = send(server, "/schema", form)
    assert status == 200
    assert f"Still to be reviewed: {session.entries[0]['name']}" in text
    assert ask(server, "/")[1]["Location"] == "/schema"
    number = next(i for i, e in enumerate(session.entries) if e["name"] == "age")
    text = send(server, "/schema", {**reviewed(session), f"upper.{number}": "old"})[2]
    assert "expected a whole number, got &#39;old&#39;" in text
    assert session.schema.unreviewed == ["age"]
    come_to_the_fit(server, session)
    assert ask(server, "/")[1]["Location"] == "/fit"
    text = ask(server, "/fit")[2]
    assert "Spend epsilon 1" in text
    assert Ledger(session.ledger_path).releases == ()
    # The budget does not pay for more than it has.
    assert "of which" in send(server, "/plan", {"epsilon": "9"})[2]
    assert session.choice is None


def test_many_clicks_fit_once(server, session, monkeypatch):
    made, go_on = [], threading.Event()

    def make(self, *args):
        made.append(args)
        go_on.wait(30)
        raise OSError("no space left on device")

    monkeypatch.setattr(Session, "_make", make)
    come_to_the_fit(server, session)
    clicks = [threading.Thread(target=send, args=(server, "/fit")) for _ in range(8)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert len(made) == 1
    # While it runs nothing else can be chosen.
    assert "cannot change any more" in send(server, "/schema", reviewed(session))[2]
    assert "cannot change any more" in send(server, "/plan", {"epsilon": "1"})[2]
    assert 'http-equiv="refresh"' in ask(server, "/fit")[2]
    assert send(server, "/close")[1]["Location"] == "/fit"
    session.job.hear("fitting", 2, 4)
    assert re.search(r"fitting: 2 of 4, about \d+ seconds left", ask(server, "/fit")[2])
    go_on.set()
    end = time.monotonic() + 30
    while not session.job.is_over and time.monotonic() < end:
        time.sleep(0.01)
    assert "no space left on device" in ask(server, "/fit")[2]
    assert "No fit was made" in ask(server, "/fit")[2]
    # What failed is not begun again by a click that came late.
    assert send(server, "/fit")[1]["Location"] == "/"
    assert len(made) == 1


def test_a_closed_server_answers_no_more(session):
    with PageServer(session) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        last = send(server, "/close")[2]
        assert "You can close this window" in last
        assert "href=" not in last  # nobody would answer
        thread.join(30)
        assert not thread.is_alive()


def test_an_output_that_exists_is_refused_at_once(tmp_path, table):
    (tmp_path / "patients-twin").mkdir()
    result = CliRunner().invoke(app, ["serve", str(table), "--no-browser"])
    assert result.exit_code == 2
    assert "exists already" in result.stderr
