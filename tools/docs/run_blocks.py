"""Run the blocks of one page, one after the other, and write down what they showed.

    python tools/docs/run_blocks.py < blocks.json > outputs.json

The blocks share one namespace and the current folder. Whatever a block does not expect ends the
run with status 1 and a traceback.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")

Output = dict[str, str]


def main() -> int:
    """Blocks from standard input, their outputs to standard output."""
    sys.path[0] = os.getcwd()  # pages import what they have written, not what is beside this file
    blocks = json.load(sys.stdin)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, block in enumerate(blocks, start=1):
        try:
            shown.append(run_block(block, number, namespace))
        except Exception:
            print(f"block {number}:\n{block['code']}", file=sys.stderr)
            traceback.print_exc()
            return 1
    json.dump({"outputs": shown, "cpu_seconds": cpu_seconds()}, sys.stdout)
    return 0


def run_block(block: dict[str, Any], number: int, namespace: dict[str, Any]) -> list[Output]:
    """The outputs of one block: text, tables and pictures, in order."""
    code, options = block["code"], block["options"]
    if "file" in options:
        Path(options["file"]).write_text(code)
        return []
    fails = "raises" in options
    if block["language"] == "sh":
        return run_shell(code, fails=fails)
    return run_python(code, f"<block {number}>", namespace, fails=fails)


def run_shell(code: str, *, fails: bool) -> list[Output]:
    """Commands in the order in which they are written; the first that fails ends them."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    if (done.returncode != 0) is not fails:
        raise RuntimeError(f"ended with {done.returncode}:\n{done.stdout}")
    return text_output(done.stdout)


def run_python(code: str, name: str, namespace: dict[str, Any], *, fails: bool) -> list[Output]:
    """Statements, and the value of the last one if it is an expression, as in a notebook."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None

    def show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        print(f"{category.__name__}: {message}", file=printed)

    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show_warning
        try:
            exec(compile(tree, name, "exec"), namespace)
            if last is not None:
                expression = ast.Expression(last.value)  # type: ignore[attr-defined]
                value = eval(compile(expression, name, "eval"), namespace)
        except Exception as error:
            if not fails:
                raise
            print(f"{type(error).__name__}: {error}", file=printed)
        else:
            if fails:
                raise RuntimeError("expected an error, got none")
    return [*text_output(printed.getvalue()), *show(value), *open_figures(value)]


def text_output(text: str) -> list[Output]:
    """Text, if there is any."""
    return [{"kind": "text", "content": text.rstrip()}] if text.strip() else []


def show(value: Any) -> list[Output]:
    """The value of a last expression."""
    if value is None:
        return []
    if hasattr(value, "savefig"):
        return [{"kind": "png", "content": as_png(value)}]
    if hasattr(value, "to_html"):
        return [{"kind": "html", "content": value.to_html(border=0, classes="frame")}]
    return text_output(repr(value))


def open_figures(already_shown: Any) -> list[Output]:
    """Figures of pyplot that a block left open."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pictures = [as_png(figure) for figure in figures if figure is not already_shown]
    pyplot.close("all")
    return [{"kind": "png", "content": picture} for picture in pictures]


def as_png(figure: Any) -> str:
    """A figure of matplotlib, for a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", facecolor="white")
    return base64.b64encode(buffer.getvalue()).decode()


def cpu_seconds() -> float:
    """Of this process and of the commands that it ran."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
