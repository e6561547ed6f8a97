"""Sessions of Spark's that are started for an address, and end with the table.

They write no log of events, have no page that shows plans, and are on the loopback if Spark runs on
this machine alone.

>>> options_of("spark.executor.memory=4g&spark.sql.catalogImplementation=hive")
{'spark.executor.memory': '4g', 'spark.sql.catalogImplementation': 'hive'}
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dpvim._extras import MissingExtraError, require
from dpvim.synthesis.tables import TableError

_DEFAULTS = {
    "spark.app.name": "dpvim",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.eventLog.enabled": "false",
    "spark.log.level": "FATAL",  # others may quote values
    "spark.sql.shuffle.partitions": "16",  # counts of cells are few
}
_ON_THIS_MACHINE = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.io.encryption.enabled": "true",  # of parts of sorts and hash tables on the disk
}
_STANDALONE = "spark://"
_WAIT = 15  # seconds for an answer of a master's, and then for the first executor
_WAIT_FOR_EXECUTORS = 60


def options_of(query: str) -> dict[str, str]:
    """Options after the question mark of an address."""
    found = dict(parse_qsl(query, keep_blank_values=True))
    if wrong := [name for name in found if not name.startswith("spark.")]:
        raise TableError(
            f"options of Spark's: expected names as Spark has them, such as "
            f"spark.executor.memory=4g, got {wrong[0]!r}."
        )
    return found


class _Running:
    """A session, how many tables need it, and what ends it."""

    def __init__(self, session: Any, chosen: Any, ending: contextlib.ExitStack) -> None:
        self.session, self.chosen, self.ending = session, chosen, ending
        self.tables = 0


_running: list[_Running] = []  # at most one: a process has one context of Spark's
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def started(name: str, master: str, options: dict[str, str]) -> Iterator[Any]:
    """A session on a master, for a block, and the Java machine that it needs.

    Tables on the same master with the same options share machine and context.

    Args:
        name: Of the table, for messages.
        master: As Spark names it: ``local[*]``, ``spark://host:7077``, ``yarn``.
        options: Of the session, before those that are set here.
    """
    with _one_at_a_time:
        if not _running or _running[0].chosen != (master, options):
            with contextlib.ExitStack() as ending:
                session = _start(name, master, options, ending)
                _running[:] = [_Running(session, (master, options), ending.pop_all())]
        mine = _running[0]
        mine.tables += 1
    try:
        yield mine.session.newSession()
    finally:
        with _one_at_a_time:
            mine.tables -= 1
            if mine.tables == 0:
                _running.clear()
                mine.ending.close()


def _start(name: str, master: str, options: dict[str, str], ending: contextlib.ExitStack) -> Any:
    pyspark = checked_pyspark()
    _check_java()
    if pyspark.SparkContext._active_spark_context is not None:
        raise TableError(
            f"{name}: expected a process without another session of Spark's, since it can have "
            "one, got one with. End that, or give a table of it: "
            "ibis.pyspark.connect(session).table(name)."
        )
    is_local = master == "local" or master.startswith("local[")
    if master.startswith(_STANDALONE):
        _check_answers(name, master)
    folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="dpvim-"))
    chosen = {
        **_DEFAULTS,
        **(_ON_THIS_MACHINE if is_local else {}),
        "spark.sql.warehouse.dir": folder,  # is made, and stays empty
        **options,
        "spark.master": master,
    }
    ending.callback(_restore_interrupts())
    gateway = ending.enter_context(_gateway(name, chosen))
    conf = pyspark.SparkConf(_jvm=gateway.jvm)  # with Spark's own files of defaults
    for key, value in chosen.items():
        conf.set(key, value)
    try:
        context = pyspark.SparkContext(conf=conf, gateway=gateway)
        session = require("pyspark.sql", extra="spark").SparkSession(context)
    except Exception as error:
        raise TableError(
            f"{name}: the connection failed: Spark {pyspark.__version__} got no session from "
            f"{master} ({type(error).__name__}). Check the master, its version and the options. "
            "Nothing was released."
        ) from None
    ending.callback(session.stop)
    if master.startswith(_STANDALONE):
        has_some = _has_executors(context)
        _wait_for(name, has_some)
        ending.enter_context(_watched(context, has_some))
    return session


def checked_pyspark() -> Any:
    """The package, in a version whose integers are tested."""
    pyspark = require("pyspark", extra="spark")
    if not pyspark.__version__.startswith("4.0."):
        raise MissingExtraError(
            f"pyspark: expected version 4.0, got {pyspark.__version__}: pip install 'dpvim[spark]'",
            name="pyspark",
        )
    return pyspark


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if home and Path(home, "bin", "java").exists():
        return
    if home or shutil.which("java") is None:
        place = f"in JAVA_HOME ({home})" if home else "here"
        raise MissingExtraError(
            f"java is not installed {place}: Spark runs on Java 17 or 21. Install it (apt-get "
            "install openjdk-17-jre-headless), or let JAVA_HOME name its folder.",
            name="java",
        )


def _check_answers(name: str, master: str) -> None:
    """Spark itself asks for minutes, and says less."""
    hosts = master.removeprefix(_STANDALONE).split(",")
    for each in hosts:
        host, _, port = each.rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_WAIT).close()
            return
    raise TableError(
        f"{name}: the connection failed: no master of Spark's answers at {', '.join(hosts)}. Check "
        "host and port (7077, unless it was set), and run again. Nothing was released."
    )


def _has_executors(context: Any) -> Callable[[], bool]:
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return lambda: True  # they come when they are needed
    inner = context._jsc.sc()
    return lambda: inner.getExecutorMemoryStatus().size() > 1  # the driver is the first


def _wait_for(name: str, has_some: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT_FOR_EXECUTORS
    while not has_some():
        if time.monotonic() > end:
            raise TableError(
                f"{name}: the connection failed: the master gave no executor within "
                f"{_WAIT_FOR_EXECUTORS} seconds. Check that it has workers with memory and cores "
                "to spare, and Spark of this version. Nothing was released."
            )
        time.sleep(0.2)


@contextlib.contextmanager
def _watched(context: Any, has_some: Callable[[], bool]) -> Iterator[None]:
    """Queries end, and do not wait for ever, when all executors are lost."""
    is_over = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not is_over.wait(1):
            with contextlib.suppress(Exception):  # of a machine that ends
                if has_some():
                    last = time.monotonic()
                elif time.monotonic() > last + _WAIT_FOR_EXECUTORS:
                    context._jsc.sc().cancelAllJobs()

    watcher = threading.Thread(target=watch, name="dpvim-spark", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join(_WAIT)


@contextlib.contextmanager
def _gateway(name: str, chosen: dict[str, str]) -> Iterator[Any]:
    """The Java machine; its words, which may quote values, are not shown."""
    pyspark = require("pyspark", extra="spark")
    if pyspark.SparkContext._gateway is not None:  # that of a session which has ended
        yield pyspark.SparkContext._gateway
        return
    conf = pyspark.SparkConf(loadDefaults=False)
    for key, value in chosen.items():
        conf.set(key, value)
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launch = require("pyspark.java_gateway", extra="spark").launch_gateway
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's of forks
            gateway = launch(conf, popen_kwargs=silent)
    except Exception:
        raise TableError(
            f"{name}: expected a Java machine that runs Spark {pyspark.__version__}, got one that "
            "ended at once. It needs Java 17 or 21 (java -version), and options that Spark knows."
        ) from None
    try:
        yield gateway
    finally:
        _end(gateway)
        pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None


def _end(gateway: Any) -> None:
    for end in (gateway.shutdown, gateway.close):
        with contextlib.suppress(Exception):
            end()
    process = gateway.proc
    if process is None:
        return
    process.stdin.close()
    try:
        process.wait(_WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _restore_interrupts() -> Any:
    """Spark takes Ctrl-C for itself; what is given puts back what was there."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.getsignal(signal.SIGINT)
    return lambda: signal.signal(signal.SIGINT, before)
