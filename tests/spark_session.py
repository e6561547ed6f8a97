"""A session of Spark's for tests, on this machine, that ends with them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dpvim.synthesis.databases.spark_sessions import started

# Tests are short: Java compiles quickly rather than well.
MASTER, OPTIONS = (
    "local[1]",
    {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.sql.shuffle.partitions": "1",
    },
)


def why_not() -> str | None:
    """The reason why there can be no session here, if there is one."""
    if importlib.util.find_spec("pyspark") is None:
        return "Spark is not installed: pip install 'dpvim[spark]'"
    if shutil.which("java") is None:
        return "Java is not installed: apt-get install openjdk-17-jre-headless"
    return None


@contextmanager
def running() -> Iterator[Any]:
    """Ibis, connected to a session; addresses of `address` share its machine."""
    import ibis

    with started("tests", MASTER, OPTIONS) as session:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            backend = ibis.pyspark.connect(session)
        yield backend


def address(table: object) -> str:
    """The address of a table, or of a folder, in the session of the tests."""
    return f"spark:{MASTER}?{urlencode(OPTIONS)}#{table}"


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A standalone master and a worker on the loopback; what is given is the master's URL."""
    import pyspark

    home = Path(pyspark.__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    changed = {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    changed |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_WORKER_DIR": str(folder)}
    programs = {
        "master.Master": ("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"),
        "worker.Worker": ("--webui-port", "0", "-c", "1", "-m", "1g", master),
    }
    with ExitStack() as ending:
        for name, options in programs.items():
            process = subprocess.Popen(
                [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **changed},
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            _wait_for(port)
        yield master


def _wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError("Spark's master does not answer")
