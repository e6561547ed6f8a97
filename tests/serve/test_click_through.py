"""From a CSV file to a twin, by clicks in a browser."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from devtools import Browser

from dpvim.cli.serve_command import _way_in
from dpvim.ledger.book import Ledger
from dpvim.serve.server import PageServer
from dpvim.serve.session import Session
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table, write_table
from dpvim.synthesis.twin import Twin

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browser(tmp_path):
    name = os.environ.get("DPVIM_CHROMIUM") or next(filter(shutil.which, NAMES), None)
    if name is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed; see DPVIM_CHROMIUM")
    running = Browser(name, tmp_path / "profile")
    yield running
    running.close()


TICK_ALL = "document.querySelectorAll('[name^=reviewed]').forEach(box => { box.checked = true; })"
FIELD = "document.querySelector('[name=%s]').value = %s"


@pytest.mark.long
def test_from_a_file_to_a_twin(browser, tmp_path, patients):
    write_table(patients[["sex", "age", "visits"]], tmp_path / "patients.csv")
    twin = tmp_path / "twin"
    session = Session(
        tmp_path / "patients.csv",
        schema_path=tmp_path / "patients.toml",
        ledger_path=tmp_path / "patients.ledger",
        output=twin,
        datasets=2,
    )
    shots = os.environ.get("DPVIM_SCREENSHOTS")

    def look(name):
        if shots:
            browser.screenshot(Path(shots) / f"{name}.png")

    with PageServer(session) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        # As `dpvim serve` opens it: another site leads to it.
        browser.call("Page.navigate", url=_way_in(tmp_path, server.url).as_uri())
        browser.wait("location.pathname == '/schema'")
        assert browser.evaluate("location.search") == ""
        look("schema")
        browser.click("Save and go on")
        browser.wait("document.body.innerText.includes('Still to be reviewed: sex, age, visits')")
        browser.evaluate(FIELD % (json.dumps("upper.1"), json.dumps("120")))
        browser.evaluate(FIELD % (json.dumps("lower.1"), json.dumps("0")))
        browser.evaluate(TICK_ALL)
        browser.click("Save and go on")

        browser.wait("location.pathname == '/budget'")
        browser.evaluate(FIELD % ("name", json.dumps("patients")))
        look("budget")
        browser.click("Declare the budget")
        browser.wait("location.pathname == '/plan'")
        look("plan")
        browser.click("Look at the plan")
        browser.wait("location.pathname == '/fit'")
        look("fit")
        assert Ledger(tmp_path / "patients.ledger").releases == ()
        # A double click.
        browser.evaluate("for (let i = 0; i < 2; i++) document.querySelector('.spend').click()")
        browser.wait("document.querySelector('progress') || location.pathname == '/done'")
        look("progress")
        browser.wait("!document.querySelector('progress')", seconds=900)
        browser.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/done")
        browser.wait("document.body.innerText.includes('The twin is there')")
        look("done")
        assert "-differential privacy" in browser.text()
        browser.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/report")
        browser.wait("document.images.length > 3")
        assert browser.evaluate("[...document.images].every(i => i.naturalWidth > 0)")
        look("report")
        browser.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/done")
        browser.wait("location.pathname == '/done'")
        browser.click("Close")
        browser.wait("document.body.innerText.includes('You can close this window')")
        thread.join(30)
        assert not thread.is_alive()

    assert browser.complaints() == []
    foreign = {
        address
        for address in browser.addresses()
        if not address.startswith((f"http://127.0.0.1:{server.port}/", "file:", "data:"))
    }
    assert foreign <= {"about:blank"}
    (release,) = Ledger(tmp_path / "patients.ledger").releases
    assert release.state == "done"
    assert release.epsilon == pytest.approx(1.0, rel=0.01)
    made = Twin.load(twin)
    assert made.privacy.private
    assert made.schema == Schema.load(tmp_path / "patients.toml")
    assert made.schema.column("age").bounds == (0, 120)
    assert len(read_table(twin / "data" / "synthetic-001.csv")) == len(patients)
    assert (twin / "closest.csv").is_file()
    assert (twin / "report.html").is_file()
