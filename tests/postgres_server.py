"""A PostgreSQL server for tests, in a folder of its own, that ends with them."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER, PASSWORD = "owner", "s3cret/@word"
_PLACES = "/usr/lib/postgresql/*/bin"


def programs() -> Path | None:
    """The folder with initdb, postgres and pg_ctl; None if PostgreSQL is not installed."""
    folders = sorted(Path("/").glob(_PLACES.lstrip("/")), reverse=True)
    found = shutil.which("initdb")
    if found:
        folders.append(Path(found).resolve().parent)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "pg_ctl")):
            return folder
    return None


def why_not() -> str | None:
    """The reason why there can be no server here, if there is one."""
    if programs() is None:
        return "PostgreSQL is not installed: apt-get install postgresql"
    if os.getuid() == 0 and (_other_user() is None or shutil.which("setpriv") is None):
        return "PostgreSQL does not run as root, and there is no other user to run it as"
    return None


@contextmanager
def running() -> Iterator[str]:
    """A server; what is given is its address, without a table."""
    folder, bin = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp")), programs()
    assert bin is not None
    data, words = folder / "data", folder / "password"
    data.mkdir()
    words.write_text(PASSWORD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if os.getuid() == 0:
        user = _other_user()
        for path in (folder, data, words):
            os.chown(path, user.pw_uid, user.pw_gid)
    try:
        _run(
            *(bin / "initdb", "-D", data, "-U", USER, "--pwfile", words, "--no-sync"),
            *("-E", "UTF8", "--locale", "C", "--auth", "scram-sha-256"),
        )
        options = (
            f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off "
            "-c shared_buffers=16MB -c max_connections=20 -c autovacuum=off"
        )
        _run(bin / "pg_ctl", "-D", data, "-w", "-o", options, "-l", folder / "log", "start")
        try:
            quoted = PASSWORD.replace("/", "%2F").replace("@", "%40")
            yield f"postgresql://{USER}:{quoted}@127.0.0.1:{port}/postgres"
        finally:
            _run(bin / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> pwd.struct_passwd | None:
    known = {each.pw_name: each for each in pwd.getpwall()}
    return known.get("postgres") or known.get("nobody")


def _run(*command: object) -> None:
    before: list[str] = []
    if os.getuid() == 0:
        user = _other_user()
        ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
        before = ["setpriv", *ids]
    done = subprocess.run(
        [*before, *map(str, command)],
        cwd="/tmp",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the server would keep a pipe open
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}")
