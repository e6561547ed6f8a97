"""A table in Apache Spark at one moment: what it is made of is found out once, and kept.

Spark has no transactions. A table's plan, with the list of files that it reads, is made once, in a
session of our own that shares nothing but the machines with the one it came from. Files are looked
at before and after every query, as those that DuckDB reads.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpvim._extras import LazyModule, require
from dpvim.synthesis.tables import TableError

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

_VIEW, _GIVEN = "dpvim_table_at_one_moment", "dpvim_table_as_given"
# So that a query means the same whatever the session has set.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "false",  # no value is an error
    "spark.sql.variable.substitute": "false",  # a level may be "${x}"
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
}
_PLAN = "org.apache.spark.sql.catalyst.trees.TreePattern"
# Names of Spark's: steps of a plan that may give other rows each time.
_UNSTABLE = ("GlobalLimit", "LocalLimit", "Offset", "Tail", "Sample")
_CONSTANT = ("LocalRelation", "OneRowRelation", "Range")
_LISTED = ("InMemoryFileIndex", "CatalogFileIndex")

MISSING, FORBIDDEN, LOST, CHANGED = "missing", "forbidden", "lost", "changed"
# Words of Spark's error conditions, and of classes of Java's.
_TROUBLES = {
    FORBIDDEN: (
        *("INSUFFICIENT_PERMISSIONS", "AccessControlException", "AccessDeniedException"),
        *("PermissionDenied", "Permission denied", "UnauthorizedException"),
    ),
    MISSING: (
        *("TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND", "PATH_NOT_FOUND"),
        *("TABLE_NOT_FOUND", "CATALOG_NOT_FOUND", "NoSuchTable", "NoSuchNamespace"),
        *("UNABLE_TO_INFER_SCHEMA", "REQUIRES_SINGLE_PART_NAMESPACE"),
    ),
    CHANGED: ("FILE_NOT_EXIST", "READ_FILE_NOT_FOUND", "java.io.FileNotFoundException"),
    LOST: (
        *("java.net.ConnectException", "ConnectionRefusedError", "Py4JNetworkError"),
        *("EndedSessionError", "SparkContext was shut down", "stopped SparkContext"),
        *("Connection refused", "cancellation of all jobs", "JOB_CANCELLED"),
    ),
}


class EndedSessionError(RuntimeError):
    """A session was stopped while a table of it was open."""


class _Seen(NamedTuple):
    """The files of a table, as far as listings tell without reading them."""

    listed: tuple[str, ...]
    files: tuple[tuple[str, int, int], ...]


class SnapshotInSpark:
    """A table in a session of Spark's, as it is now.

    Args:
        name: For messages.
        session: That has the table; it is left as it is.
        text: A query that gives the table.
    """

    def __init__(self, name: str, session: Any, text: str) -> None:
        self._name, self._session = name, session
        self._check_open()
        self._jvm = session._jvm
        self._own = session._jsparkSession.cloneSession()
        for key, value in _SETTINGS.items():
            self._own.conf().set(key, value)
        with without_a_word():
            frame = self._sql(text)
        self._plan = frame.queryExecution().analyzed()
        self._relations = list(self._relations_of(self._plan))
        frame.createOrReplaceTempView(_VIEW)
        self.types = _types_of(name, self._python(frame).schema.fields)
        self._seen = self._look()

    @property
    def expression(self) -> Any:
        """The table, for Ibis."""
        return ibis.table(self.types, name=_VIEW)

    def rows(self, text: str) -> list[Any]:
        """The rows of a query; private, and to be few."""
        self._check_open()
        with without_a_word():
            return self._python(self._sql(text)).collect()

    def are_unchanged(self) -> bool:
        """True if the files are as they were, as far as their sizes and times tell."""
        self._check_open()
        return self._look() == self._seen

    def close(self) -> None:
        """Forget the table."""
        self._own.catalog().dropTempView(_VIEW)

    def _check_open(self) -> None:
        if self._session._sc._jsc is None:
            raise EndedSessionError("the session was stopped")

    def _sql(self, text: str) -> Any:
        return self._own.sql(text)

    def _python(self, frame: Any) -> Any:
        return require("pyspark.sql", extra="spark").DataFrame(frame, self._session)

    def _relations_of(self, plan: Any) -> Iterator[Any]:
        """The files of a plan; refuses what may be other rows for another query."""
        if plan.isStreaming():
            raise self._unstable("a stream")
        if not plan.deterministic():
            raise self._unstable("random numbers, or functions that are not known to be the same")
        if plan.containsPattern(getattr(self._jvm, _PLAN).CURRENT_LIKE()):
            raise self._unstable("the time of day, or the name of the user")
        if not {*_steps_of(plan)}.isdisjoint(_UNSTABLE):
            raise self._unstable("a limit or a sample")
        for leaf in _all(plan.collectLeaves()):
            kind = leaf.getClass().getSimpleName()
            if kind in _CONSTANT:
                continue
            relation = leaf.relation() if kind == "LogicalRelation" else leaf
            about = relation.getClass().getSimpleName()
            location = relation.location() if about == "HadoopFsRelation" else None
            if location is None or location.getClass().getSimpleName() not in _LISTED:
                raise TableError(
                    f"{self._name}: expected a table in files that Spark lists itself (Parquet, "
                    f"ORC), got {about}, of which it is not tested that all queries see the "
                    "same rows. Store it as Parquet first."
                )
            yield location
        for inner in _all(plan.subqueriesAll()):
            yield from self._relations_of(inner)

    def _unstable(self, what: str) -> TableError:
        return TableError(
            f"{self._name}: expected a table that is the same for every query, got a view with "
            f"{what}. Store it as a table first."
        )

    def _look(self) -> _Seen:
        listed, files = set(), set()
        for location in self._relations:
            listed |= {*location.inputFiles()}
            for root in _all(location.rootPaths()):
                files |= {*self._files_below(root)}
        return _Seen(tuple(sorted(listed)), tuple(sorted(files)))

    def _files_below(self, root: Any) -> Iterator[tuple[str, int, int]]:
        """Files at a place and in the folders there, without hidden ones."""
        system = root.getFileSystem(self._own.sessionState().newHadoopConf())
        start = len(system.makeQualified(root).toString())
        statuses = system.listFiles(root, True)
        while statuses.hasNext():
            status = statuses.next()
            path = status.getPath().toString()
            if not any(map(_is_hidden, path[start:].split("/"))):
                yield path, int(status.getLen()), int(status.getModificationTime())


def _types_of(name: str, fields: Sequence[Any]) -> dict[str, Any]:
    """Types as Ibis names them; moments with a time zone are told from those without."""
    kinds = require("pyspark.sql.types", extra="spark")
    translate = require("ibis.backends.pyspark.datatypes", extra="spark").PySparkType.to_ibis
    names = [each.name for each in fields]
    if len({*names}) < len(names):
        raise TableError(
            f"{name}: expected columns with names of their own, got two with the same. "
            "Make a view in which they have others."
        )
    found: dict[str, Any] = {}
    for field in fields:
        if isinstance(field.dataType, kinds.TimestampType):
            found[field.name] = ibis.expr.datatypes.Timestamp(timezone="UTC")
            continue
        collation = getattr(field.dataType, "collation", "UTF8_BINARY")
        if isinstance(field.dataType, kinds.StringType) and collation != "UTF8_BINARY":
            raise TableError(
                f"{name}: expected texts that are equal only if they are the same, got a "
                f"collation that says otherwise in {field.name!r}. Make a view with COLLATE "
                "UTF8_BINARY for it."
            )
        try:
            found[field.name] = translate(field.dataType)
        except (NotImplementedError, TypeError):
            found[field.name] = ibis.expr.datatypes.unknown
    return found


def check_session(backend: Any) -> None:
    """Refuse sessions whose plans cannot be looked at."""
    session = backend._session
    if not hasattr(session, "_jsparkSession"):
        raise TableError(
            "table: expected one of a session of Spark's own (spark://, local, yarn, k8s), got one "
            "by Spark Connect, whose plans cannot be looked at from here."
        )
    if backend.mode != "batch":
        raise TableError("table: expected one of a session for batches, got one for streams.")


def there_is(path: str) -> None:
    """A path on this machine leads to something."""
    if "://" not in path and not path.startswith("hdfs:") and not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder.")


def table_at(name: str, backend: Any, table: tuple[str, ...], path: str) -> Any:
    """A table, or Parquet files, in a session of our own, for Ibis."""
    session = backend._session
    if table:
        quoted = ".".join("`" + part.replace("`", "``") + "`" for part in table)
        frame = session.sql(f"SELECT * FROM {quoted}")
    else:
        place = path if "://" in path else _escaped(Path(path).absolute())
        frame = session.read.option("mergeSchema", "true").parquet(place)
    types = _types_of(name, frame.schema.fields)
    frame.createOrReplaceTempView(_GIVEN)
    # Ibis itself refuses a table for a column of a type that it does not know.
    operation = ibis.expr.operations.DatabaseTable(
        name=_GIVEN, schema=ibis.schema(types), source=backend
    )
    return operation.to_expr()


def _escaped(path: Path) -> str:
    """A path on this machine, whose signs are no patterns."""
    return "file://" + re.sub(r"([*?{}\[\]\\])", r"\\\1", str(path))


def trouble_of(error: Exception) -> str | None:
    """The kind of an error, if Spark says so in words that are known.

    Messages, which have the names of conditions and of classes, are looked at and not shown: they
    may quote values.
    """
    words = "\n".join(_words_of(error))
    return next((kind for kind, known in _TROUBLES.items() if any(w in words for w in known)), None)


def is_sparks(error: Exception) -> bool:
    """True for errors of Spark's."""
    modules = {each.__module__.split(".")[0] for each in type(error).__mro__}
    return isinstance(error, EndedSessionError) or not modules.isdisjoint(("pyspark", "py4j"))


@contextlib.contextmanager
def without_a_word() -> Iterator[None]:
    """A block without Spark's logs of failing queries, which may quote values."""
    logger = require("pyspark.logger", extra="spark").PySparkLogger.getLogger
    found = [logger(f"{each}QueryContextLogger") for each in ("SQL", "DataFrame")]
    before = [each.disabled for each in found]
    try:
        for each in found:
            each.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Spark leaves sockets to Python
            yield
    finally:
        for each, was in zip(found, before, strict=True):
            each.disabled = was


def _words_of(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield type(error).__name__
        with contextlib.suppress(Exception):  # the machine that knows may be gone
            yield str(getattr(error, "_desc", "") or error)
            yield str(getattr(error, "_stackTrace", ""))
        error = getattr(error, "_cause", None) or error.__cause__


def _steps_of(plan: Any) -> Iterator[str]:
    yield plan.getClass().getSimpleName()
    for child in _all(plan.children()):
        yield from _steps_of(child)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _all(sequence: Any) -> Iterator[Any]:
    """The parts of a sequence of Scala's."""
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()
