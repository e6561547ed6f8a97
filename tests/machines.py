"""Two machines for tests: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[list[list[str]], Callable[[], None]]]:
    """What a process sees of a network: what to put before commands on each, and how to cut it.

    Skips the test where namespaces cannot be made.
    """
    names = [f"dpvim{os.getpid()}{end}" for end in "ab"]
    cable = ["dpvimc0", "dpvimc1"]
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [["netns", name] for name in names]
        _ip("link", "add", cable[0], *ends[0], "type", "veth", "peer", cable[1], *ends[1])
        for i, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", cable[i])
            for device in ("lo", cable[i]):
                _ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield (
            [["nsenter", f"--net=/run/netns/{name}"] for name in names],
            lambda: _ip("-n", names[1], "link", "set", cable[1], "down"),
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
