"""Chromium by its DevTools protocol, over a pipe: no driver and no network is needed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# The protocol's pipe is at descriptors 3 and 4.
START = "import os, sys; r, w = map(int, sys.argv[1:3]); a, b = os.dup(r), os.dup(w); "
START += "os.dup2(a, 3); os.dup2(b, 4); os.set_inheritable(3, True); "
START += "os.set_inheritable(4, True); os.execvp(sys.argv[3], sys.argv[3:])"


class Browser:
    """One page of a browser."""

    def __init__(self, name: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        command = [sys.executable, "-c", START, str(to_browser), str(from_browser), name, *options]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 2**16)
            assert piece, "the browser ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 300) -> Any:
        """The value of an expression when it is true; pages may come and go meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if value := self.evaluate(f"document.readyState == 'complete' && !!({expression})"):
                    return value
            except AssertionError:  # between two pages
                pass
            time.sleep(0.2)
        raise TimeoutError(f"{expression}: {self.text()}")

    def text(self) -> str:
        return self.evaluate("document.body.innerText")

    def click(self, words: str) -> None:
        """Click on the button or link that has these words."""
        find = "[...document.querySelectorAll('button, a')].find(e => e.innerText.includes(%s))"
        self.evaluate(find % json.dumps(words) + ".click()")

    def screenshot(self, path: Path) -> None:
        import base64

        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the browser logged: errors, refusals of its security policy."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]

    def addresses(self) -> set[str]:
        """All addresses that were asked for."""
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._write)
        os.close(self._read)
