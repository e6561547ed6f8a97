"""The report in a browser: it opens without an error and can be read on narrow and wide screens."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest
from small_twin import counted_twin, small_twin

from dpvim.synthesis.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (400, 1400)
# The page is shown in frames of known widths; a window may not be narrow enough.
WRAPPER = """<!doctype html><body>
%s
<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const doc = frame.contentDocument, root = doc.documentElement;
    const texts = [...doc.querySelectorAll("p, li, td, th, dd, dt, pre, figcaption, a")];
    const sizes = texts.map((e) => parseFloat(doc.defaultView.getComputedStyle(e).fontSize));
    return {
      page: frame.getAttribute("src"),
      title: doc.title,
      width: root.clientWidth,
      overflow: root.scrollWidth - root.clientWidth,
      height: root.scrollHeight,
      images: doc.images.length,
      broken: [...doc.images].filter((i) => !i.complete || !i.naturalWidth).length,
      narrowest: Math.min(...[...doc.images].map((i) => i.getBoundingClientRect().width)),
      smallest: Math.min(...sizes),
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def chromium():
    name = os.environ.get("DPVIM_CHROMIUM") or next(filter(shutil.which, NAMES), None)
    if name is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed; see DPVIM_CHROMIUM")

    def run(folder, *arguments):
        """What the browser wrote, and what the pages wrote to its console."""
        done = subprocess.run(
            [
                name,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--allow-file-access-from-files",
                "--enable-logging=stderr",
                f"--user-data-dir={folder / 'profile'}",
                *map(str, arguments),
            ],
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


def measured(chromium, folder, pages):
    frames = [
        f'<iframe src="{page}" style="border:0;width:{width}px;height:900px"></iframe>'
        for page in pages
        for width in WIDTHS
    ]
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER % "\n".join(frames), encoding="utf-8")
    dom, console = chromium(folder, "--dump-dom", wrapper.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1])), console


@pytest.mark.long
def test_reports_open_and_can_be_read(chromium, tmp_path):
    made = small_twin()
    long_command = "dpvim synth " + "long/" * 60
    write_report(made.twin, made.tables, tmp_path / "plain.html", command=long_command)
    write_report(made.twin, made.tables, tmp_path / "compared.html", compare=made.original)
    counted = counted_twin()
    write_report(counted.twin, counted.tables, tmp_path / "counted.html")
    pages = ["plain.html", "compared.html", "counted.html"]
    found, console = measured(chromium, tmp_path, pages)
    assert console == []
    assert [frame["page"] for frame in found] == [page for page in pages for _ in WIDTHS]
    for frame, width in zip(found, WIDTHS * 3, strict=True):
        assert frame["title"].startswith("NOT ")
        assert width - 20 <= frame["width"] <= width  # a scroll bar takes some
        assert frame["overflow"] <= 0
        assert frame["images"] >= (11 if frame["page"] == "counted.html" else 15)
        assert frame["broken"] == 0
        assert frame["narrowest"] >= 300
        assert frame["smallest"] >= 13
        assert frame["height"] > 3000

    shot = tmp_path / "shot.png"
    page = (tmp_path / "compared.html").as_uri()
    chromium(tmp_path, "--window-size=1400,900", f"--screenshot={shot}", page)
    assert shot.stat().st_size > 20_000


def test_the_measurements_see_what_is_wrong(chromium, tmp_path):
    (tmp_path / "bad.html").write_text(
        "<!doctype html><title>NOT</title><p style='width:3000px;font-size:5px'>wide</p>"
        "<img src='data:image/png;base64,AAAA'><script>console.error('oh')</script>"
    )
    found, console = measured(chromium, tmp_path, ["bad.html"])
    assert any("oh" in line for line in console)
    assert all(frame["overflow"] > 1000 for frame in found)
    assert [(frame["broken"], frame["smallest"]) for frame in found] == [(1, 5)] * 2
