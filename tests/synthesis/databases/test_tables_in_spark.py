"""Tables in Spark: addresses, snapshots, refusals, and what is left of a session."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spark_session
from engine_cases import counted, expected, frame_of, in_parquet, in_spark, questions

from dpvim._extras import MissingExtraError
from dpvim.ledger.book import Ledger
from dpvim.privacy.counts import CountMechanism
from dpvim.synthesis.databases import spark as in_sparks
from dpvim.synthesis.databases import spark_sessions
from dpvim.synthesis.databases.addresses import Address, is_database
from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.databases.errors import DatabaseError, errors_explained
from dpvim.synthesis.databases.looking import draft_of
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.schema import Binary, Categorical, Date, Integer, Schema
from dpvim.synthesis.tables import TableError

SCHEMA = Schema(
    (
        Integer(name="age", lower=0, upper=120, reviewed=True),
        Categorical(name="region", levels=("north", "south"), nullable=True, reviewed=True),
    )
)
TABLE = pa.table({"age": [5, 130, None, 40, 7], "region": ["north", "south", "x", None, "south"]})
WANTED = [each.tolist() for each in expected(frame_of(TABLE), SCHEMA)]
# Ibis asks for an option that pandas will drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Spark leaves them to Python
]


@pytest.fixture
def folder(tmp_path):
    return Path(in_parquet(tmp_path / "parts", TABLE))


@pytest.fixture
def people(spark, folder):
    """A table of Ibis' in a session that is the user's."""
    spark._session.read.parquet(str(folder)).createOrReplaceTempView("people")
    return spark.table("people")


@pytest.fixture
def ledger(tmp_path):
    return Ledger.create(tmp_path / "l", name="people", epsilon=5.0, delta=1e-5)


def counts(table):
    return [each.tolist() for each in counted(table, SCHEMA)]


def fails(source, error=TableError, *, match, schema=SCHEMA, ledger=None):
    """A call is refused before anything is booked."""
    with pytest.raises(error, match=match) as found:
        synthesize(source, schema, epsilon=1.0, delta=1e-6, ledger=ledger)
    assert ledger is None or ledger.releases == ()
    return str(found.value)


def in_sql(spark, text):
    """A view in the user's session."""
    spark._session.sql(text).createOrReplaceTempView("made")
    return spark.table("made")


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("spark:a/b.parquet", ("a/b.parquet", (), "local[*]", "")),
        ("spark:/a?b#c", ("/a?b#c", (), "local[*]", "")),
        ("spark:s3a://bucket/a", ("s3a://bucket/a", (), "local[*]", "")),
        ("spark://h:7077#c.s.t", ("spark://h:7077", ("c", "s", "t"), "spark://h:7077", "")),
        ("spark://h:1,i:2?spark.a=b#/d", ("/d", (), "spark://h:1,i:2", "spark.a=b")),
        ("spark:yarn#delta.%2Fa%2Eb", ("yarn", ("delta", "/a.b"), "yarn", "")),
        ("spark:local[2]#t", ("local[2]", ("t",), "local[2]", "")),
        ("spark:k8s://https://h:1#t", ("k8s://https://h:1", ("t",), "k8s://https://h:1", "")),
    ],
)
def test_addresses(text, address):
    assert is_database(text)
    assert Address.of(text)[1:] == address


@pytest.mark.parametrize("text", ["spark:", "spark://", "spark:local[1]", "spark://h:1#a.b.c.d"])
def test_addresses_that_are_none(text):
    with pytest.raises(TableError, match="expected"):
        Address.of(text)


def test_names_paths_and_partitions(spark, folder, tmp_path):
    """All that an address may say; a folder's own folders are partitions, as Spark has them."""
    odd = in_parquet(tmp_path / "o[d]d {*}", TABLE)  # whose signs are no patterns
    named = f"parquet.{str(folder).replace('/', '%2F')}"
    for place in (folder, folder / "a.parquet", odd, named):
        with open_table(spark_session.address(place)) as table:
            assert counts(table) == WANTED or table.num_rows == 2
    with pytest.raises(FileNotFoundError):
        open_table(spark_session.address(folder / "*.parquet"))
    for year in (2023, 2024):
        in_parquet(tmp_path / "years" / f"year={year}", TABLE)
    columns = (SCHEMA.columns[0], Integer(name="year", lower=2020, upper=2030))
    with open_table(spark_session.address(tmp_path / "years")) as table:
        assert table.num_rows == 10
        assert sorted(counted(table, Schema(columns))[1].tolist())[-2:] == [5, 5]


def test_places_that_lead_nowhere(spark, ledger, folder, tmp_path):
    fails("spark:nowhere", FileNotFoundError, match="no such file", ledger=ledger)
    fails(spark_session.address("nothing"), match="no such table", ledger=ledger)
    fails(spark_session.address("no.such.name"), match="no such table", ledger=ledger)
    fails("spark://127.0.0.1:1#t", match="another session", ledger=ledger)
    fails("spark:local[1]?password=s3cret#t", match=r"spark\.executor\.memory=4g", ledger=ledger)
    (tmp_path / "empty").mkdir()
    fails(spark_session.address(tmp_path / "empty"), match="no such table|engine", ledger=ledger)
    with pytest.raises(TableError, match="delimiter"):
        open_table(f"spark:{folder}", delimiter=";")


def test_a_master_that_does_not_answer(monkeypatch):
    pyspark = pytest.importorskip("pyspark")
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(spark_sessions, "_running", [])
    monkeypatch.setattr(spark_sessions, "_check_java", lambda: None)
    with pytest.raises(TableError, match=r"no master of Spark's answers at 127\.0\.0\.1:1"):
        open_table("spark://127.0.0.1:1#t")


def test_without_java(folder, monkeypatch):
    pytest.importorskip("pyspark")
    monkeypatch.setattr(spark_sessions, "_running", [])
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match="Java 17"):
        open_table(f"spark:{folder}")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(MissingExtraError, match="/nowhere"):
        open_table(f"spark:{folder}")


# -- snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["comes", "goes", "is another"])
def test_a_file_that_changes_ends_the_run(spark, folder, change):
    with open_table(spark_session.address(folder)) as table:
        grids, cells, asked = questions(SCHEMA)
        source = table.counted(SCHEMA, grids)
        source.count(cells, asked)
        if change == "comes":
            pq.write_table(TABLE, folder / "c.parquet")
        elif change == "goes":
            os.remove(folder / "a.parquet")
        else:
            pq.write_table(TABLE, folder / "a.parquet")
        with pytest.raises(DatabaseError, match="changed during the run"):
            source.count(cells, asked)
        # A file may go between two looks: Spark says so itself.
        table._snapshot.are_unchanged = lambda: True
        if change == "goes":
            with pytest.raises(DatabaseError, match="changed during the run"):
                source.count(cells, asked)
        elif change == "comes":  # it is not on the list of files
            source.count(cells, asked)


def test_marks_of_programs_are_no_files_of_the_table(spark, folder):
    with open_table(spark_session.address(folder)) as table:
        (folder / "_SUCCESS").touch()
        (folder / "_temporary").mkdir()
        (folder / "_temporary" / "c.parquet").touch()
        assert counts(table) == WANTED


UNSTABLE = {
    "SELECT *, rand() AS r FROM people": "random",
    "SELECT * FROM people LIMIT 3": "limit",
    "SELECT * FROM people TABLESAMPLE (50 PERCENT)": "sample",
    "SELECT * FROM people WHERE current_timestamp() > '2020-01-01'": "time of day",
    "SELECT * FROM people WHERE age IN (SELECT age FROM people LIMIT 2)": "limit",
}


@pytest.mark.parametrize("text", UNSTABLE)
def test_views_that_may_be_others_for_each_query(spark, people, ledger, text):
    fails(in_sql(spark, text), match=UNSTABLE[text], ledger=ledger)


def test_rows_that_are_in_no_file(spark, people, ledger):
    spark._session.createDataFrame([(1, "north")], "age int, region string").createTempView("rows")
    try:
        fails(spark.table("rows"), match="Store it as Parquet", ledger=ledger)
    finally:
        spark._session.catalog.dropTempView("rows")
    # What is written in the view itself is the same for all.
    given = in_sql(spark, "SELECT p.* FROM people p JOIN VALUES (5), (7) AS v(age) USING (age)")
    with open_table(given) as table:
        assert table.num_rows == 2


def test_views_of_ibis_and_views_of_spark(spark, people):
    for unstable in (people.limit(5), people.sample(0.5)):
        with pytest.raises(DatabaseError, match="the same for every query"):
            open_table(unstable)
    with open_table(people.filter(people.age > 6)) as table:
        assert table.num_rows == 3
    spark._session.table("people").cache()
    try:
        with open_table(people) as table:
            assert counts(table) == WANTED
    finally:
        spark._session.catalog.uncacheTable("people")


# -- a user's session -----------------------------------------------------------------------------


# As a user may have set them, so that queries would mean something else.
SETTINGS = {
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.variable.substitute": "true",
    "spark.sql.parser.escapedStringLiterals": "true",
    "spark.sql.parser.quotedRegexColumnNames": "true",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "true",
    "x": "y",
}
HARD = Schema(
    (
        Date(name="at", lower="2024-03-10", upper="2024-03-11", resolution="hour"),
        Categorical(name="text|at", levels=('q"', "${x}", "a\\b")),
        Integer(name="number", lower=-1, upper=9),
    ),
)


@pytest.fixture
def hard(spark, tmp_path):
    """Whether a table is counted rightly in a session with all of these settings."""
    at = datetime.datetime(2024, 3, 10, 2, 30)  # there is none such in New York
    table = pa.table(
        {
            "at": pa.array([at, at + datetime.timedelta(hours=1)], pa.timestamp("us")),
            "text|at": ["${x}", "a\\b"],
            "number": ["x", "1e400"],
        }
    )
    session = spark._session
    session.read.parquet(in_parquet(tmp_path / "t", table)).createOrReplaceTempView("hard")
    before = {name: session.conf.get(name, None) for name in SETTINGS}

    def is_right():
        try:
            with open_table(given) as opened:
                found, wanted = counted(opened, HARD), expected(frame_of(table), HARD)
        except DatabaseError:
            return False
        return all(map(np.array_equal, found, wanted))

    given = spark.table("hard")
    try:
        for name, value in SETTINGS.items():
            session.conf.set(name, value)
        yield is_right
        assert {name: session.conf.get(name) for name in SETTINGS} == SETTINGS
    finally:
        for name, value in before.items():
            session.conf.unset(name) if value is None else session.conf.set(name, value)


def test_a_session_is_left_as_it_is_and_its_settings_do_not_matter(spark, hard):
    session = spark._session
    session.sql("SELECT 1").collect()
    before = type(session).getActiveSession()
    assert hard()
    assert type(session).getActiveSession()._jsparkSession.equals(before._jsparkSession)
    assert not session.catalog.tableExists("dpvim_table_at_one_moment")


@pytest.mark.parametrize("setting", [*SETTINGS][:4])
def test_every_setting_of_ours_is_needed(spark, hard, monkeypatch, setting):
    """A fault that is planted is found: without the setting there are other counts, or none."""
    monkeypatch.delitem(in_sparks._SETTINGS, setting)
    assert not hard()


def test_a_session_that_has_ended(people, ledger, monkeypatch):
    ended = SimpleNamespace(_sc=SimpleNamespace(_jsc=None))
    real = CountMechanism.release

    def breaking(self, *args, **options):
        monkeypatch.setattr(opened._snapshot, "_session", ended)
        return real(self, *args, **options)

    with open_table(people) as opened:
        monkeypatch.setattr(CountMechanism, "release", breaking)
        with pytest.raises(DatabaseError, match="lost"):
            synthesize(opened, SCHEMA, epsilon=1.0, delta=1e-6, ledger=ledger)
    assert [each.state for each in ledger.releases] == ["done"]
    with open_table(people) as opened:
        monkeypatch.setattr(opened._snapshot, "_session", ended)
        with pytest.raises(DatabaseError, match="lost"):
            counts(opened)
        with pytest.raises(DatabaseError, match="lost") as found:
            opened.digest()
        assert "view" not in str(found.value)


class _SparksError(Exception):
    __module__ = "pyspark.errors"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("[INSUFFICIENT_PERMISSIONS] 'secret'", "may not be read"),
        ("java.io.FileNotFoundException: /secret (Permission denied)", "may not be read"),
        ("org.apache.hadoop.security.AccessControlException: secret", "may not be read"),
        ("Cannot call methods on a stopped SparkContext. secret", "lost"),
        ("[CAST_INVALID_INPUT] The value 'secret'", "not shown"),
    ],
)
def test_messages_of_spark_are_not_shown(words, match):
    with pytest.raises(DatabaseError, match=match) as found, errors_explained("t"):
        raise _SparksError(words)
    assert "secret" not in str(found.value)
    assert found.value.__suppress_context__


# -- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("TIMESTAMP '2020-01-01 00:00:00'", r"timestamp\('UTC'\)"),
        ("X'00'", "binary"),
        ("array(1)", "array"),
        ("true", "boolean"),
        ("parse_json('1')", "unknown"),
        ("INTERVAL 1 MONTH", "unknown"),
    ],
)
def test_columns_of_other_types(spark, people, ledger, tmp_path, value, shown):
    frame = spark._session.sql(f"SELECT *, {value} AS x FROM people")
    frame.write.parquet(str(tmp_path / "made"))
    given = spark_session.address(tmp_path / "made")
    columns = (*SCHEMA.columns, Integer(name="x", lower=0, upper=9, reviewed=True))
    match = f"column 'x'.*{shown}"
    if shown not in ("array", "unknown"):  # which a ledger does not know
        fails(given, match=match, schema=Schema(columns), ledger=ledger)
    fails(given, match=match, schema=Schema(columns))
    with open_table(given) as table:
        assert counts(table) == WANTED
        assert "x" in {*draft_of(table).schema.names, *draft_of(table).left_out}
        if shown in ("array", "unknown"):
            with pytest.raises(DatabaseError, match="all of its columns"):
                table.digest()
        else:
            assert len(table.digest()) == 32


def test_texts_that_are_equal_without_being_the_same(spark, people, ledger):
    given = in_sql(spark, "SELECT age, region COLLATE UTF8_LCASE AS region FROM people")
    fails(given, match="collation", ledger=ledger)


def test_names_that_are_there_twice(spark, people, ledger):
    spark._session.sql("SELECT age, region, 1 AS x FROM people").createOrReplaceTempView("made")
    fails(in_sql(spark, "SELECT age, age AS Age, region FROM people"), match=".", ledger=ledger)


def test_a_fingerprint_tells_all_values_apart(spark, people):
    def digest(text):
        with open_table(in_sql(spark, text)) as table:
            return table.digest()

    texts = [
        "VALUES (0.0D), (1.0D) AS t(x)",
        "VALUES (-0.0D), (1.0D) AS t(x)",
        "VALUES (0.1D), (1.0D) AS t(x)",
        "VALUES (0.10000000000000002D), (1.0D) AS t(x)",
        "VALUES (CAST('NaN' AS DOUBLE)), (1.0D) AS t(x)",
        "VALUES (CAST(NULL AS DOUBLE)), (1.0D) AS t(x)",
        "VALUES (X'FF'), (X'FE') AS t(x)",
        "VALUES (X'FF'), (X'FD') AS t(x)",
        "VALUES (TIMESTAMP_NTZ '2020-01-01 00:00:00'), (NULL) AS t(x)",
        "VALUES (TIMESTAMP_NTZ '2020-01-01 00:00:00.000001'), (NULL) AS t(x)",
    ]
    assert len({*map(digest, texts)}) == len(texts)
    assert digest("VALUES (1.0D), (0.0D) AS t(x)") == digest(texts[0])


# -- what is left ---------------------------------------------------------------------------------


def test_nothing_is_written_and_no_page_is_shown(spark, folder, tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    with open_table(in_spark(folder, TABLE)) as table:
        counts(table)
        table.digest()
        conf = table._snapshot._session._sc.getConf()
        assert conf.get("spark.ui.enabled") == conf.get("spark.eventLog.enabled") == "false"
        assert table._snapshot._session._sc.uiWebUrl is None
        assert conf.get("spark.driver.host") == "127.0.0.1"
        warehouse = Path(conf.get("spark.sql.warehouse.dir").removeprefix("file:"))
        assert not any(warehouse.iterdir())
    assert not any(place.iterdir())
    assert {each.name for each in folder.iterdir()} == {"a.parquet", "b.parquet"}


def test_two_tables_share_a_machine(spark, folder):
    """A second one begins and ends without the first's noticing; other options are refused."""
    with open_table(spark_session.address(folder)) as first:
        with open_table(spark_session.address(folder)) as second:
            assert counts(second) == WANTED
        assert counts(first) == WANTED
        with pytest.raises(TableError, match="another session"):
            open_table(f"spark:{folder}")


ON_A_CLUSTER = """
import sys
from urllib.parse import urlencode
import pyarrow.parquet
from test_tables_in_spark import TABLE, WANTED, counts
from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.databases.errors import DatabaseError
from dpvim.synthesis.databases.spark_sessions import started

master, folder = sys.argv[1:]
java = f"-XX:TieredStopAtLevel=1 -Dderby.stream.error.file={folder}/derby.log"
derby = f"jdbc:derby:;databaseName={folder}/derby;create=true"
options = {
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.extraJavaOptions": java,
    "spark.driver.host": "127.0.0.1",
    "spark.sql.catalogImplementation": "hive",
    "spark.sql.warehouse.dir": f"{folder}/warehouse",
    "spark.hadoop.javax.jdo.option.ConnectionURL": derby,
}
pyarrow.parquet.write_table(TABLE, f"{folder}/t.parquet")
with started("tests", master, options) as session:
    session.sql("CREATE DATABASE clinic")
    rows = session.read.parquet(f"{folder}/t.parquet")
    rows.selectExpr("*", "2024 AS year").write.partitionBy("year").saveAsTable("clinic.patients")
    session.sql("CREATE TABLE clinic.texts (age INT) STORED AS TEXTFILE")
    for place in ("clinic.patients", "spark_catalog.clinic.patients", f"{folder}/t.parquet"):
        with open_table(f"{master}?{urlencode(options)}#{place}") as table:
            assert counts(table) == WANTED, place
            if "clinic" in place:
                session.sql("INSERT INTO clinic.patients VALUES (1, 'south', 2025)")
                try:
                    counts(table)
                except DatabaseError as error:
                    assert "changed during the run" in str(error)
                else:
                    raise AssertionError("a new partition was not seen")
                session.sql("ALTER TABLE clinic.patients DROP PARTITION (year = 2025)")
    try:
        open_table(f"{master}?{urlencode(options)}#clinic.texts")
    except ValueError as error:
        assert "HiveTableRelation" in str(error), error
"""


@pytest.mark.long
def test_a_metastore_and_a_cluster(tmp_path):
    """In a process of its own, which has a session of its own."""
    if reason := spark_session.why_not():
        pytest.skip(reason)
    with spark_session.cluster(tmp_path / "work") as master:
        done = subprocess.run(
            [sys.executable, "-c", ON_A_CLUSTER, master, str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr


def test_a_column_of_booleans(spark, tmp_path):
    table = pa.table({"b": [True, None, False, True]})
    schema = Schema((Binary(name="b", levels=(True, False), nullable=True),))
    with open_table(in_spark(tmp_path / "t", table)) as opened:
        assert counted(opened, schema)[0].tolist() == [2, 1, 1]
