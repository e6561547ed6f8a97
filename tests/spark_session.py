"""A session of Spark's for tests, on this machine, that ends with them."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
