"""Tables in databases: snapshots, refusals, passwords, fingerprints."""

from __future__ import annotations

import gzip

import numpy as np
import pandas as pd
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_cases import counted, expected, frame_of, in_parquet, in_postgres, in_spark, questions
from postgres_server import PASSWORD, USER

import dpvim
from dpvim.fingerprint import file_digest
from dpvim.ledger.book import Ledger
from dpvim.privacy.counts import CountMechanism, InPieces, counts_plan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis import fitting
from dpvim.synthesis.databases.addresses import is_database, without_password
from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.databases.errors import DatabaseError, errors_explained
from dpvim.synthesis.databases.looking import draft_of
from dpvim.synthesis.draft import draft
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fitting import CountSynthesizer, make_synthesizer, synthesize
from dpvim.synthesis.marginals.release import codes_of, design, release
from dpvim.synthesis.schema import Binary, Categorical, Date, Integer, Schema
from dpvim.synthesis.tables import TableError, read_table, write_table

ROWS = 300
SCHEMA = Schema(
    (
        Integer(name="age", lower=0, upper=120, reviewed=True),
        Categorical(name="region", levels=("north", "south"), nullable=True, reviewed=True),
        Binary(name="ill", levels=(False, True), reviewed=True),
    )
)
RNG = np.random.default_rng(3)
TABLE = pa.table(
    {
        "age": pa.array(RNG.integers(-3, 130, ROWS)),
        "region": pa.array([*RNG.choice(["north", "south", "east", ""], ROWS - 1), None], "string"),
        "ill": pa.array(RNG.random(ROWS) < 0.3),
    }
)
DELTA = 1e-6


@pytest.fixture
def folder(tmp_path):
    return in_parquet(tmp_path / "parts", TABLE)


@pytest.fixture
def address(postgres):
    return in_postgres(postgres, TABLE)


@pytest.fixture(params=["postgres", "spark"])
def put(request, tmp_path):
    """Puts a table into an engine; what it gives back is the table's address."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        return lambda table, name="records": in_postgres(server, table, name)
    request.getfixturevalue("spark")  # whose machine is shared
    return lambda table, name="records": in_spark(tmp_path / "spark" / name, table)


@pytest.fixture
def ledger(tmp_path):
    return Ledger.create(tmp_path / "l", name="people", epsilon=5.0, delta=1e-5)


def fails(source, error=TableError, *, match, schema=SCHEMA, ledger=None, **options):
    """A call is refused before anything is booked, and its message has no password in it."""
    with pytest.raises(error, match=match) as found:
        synthesize(source, schema, epsilon=1.0, delta=DELTA, ledger=ledger, **options)
    for word in (PASSWORD, "s3cret"):
        assert word not in str(found.value)
    # In what a traceback would show beside it, too.
    assert found.value.__cause__ is None or "s3cret" not in str(found.value.__cause__)
    if ledger is not None:
        assert ledger.releases == ()


def released(source, rows=ROWS):
    """What a twin's release gives with fixed noise."""
    plan = counts_plan(num_examples=rows, relation="zero_out").calibrate(epsilon=1.0, delta=DELTA)
    wanted = design(SCHEMA, plan)
    if hasattr(source, "counted"):
        source = source.counted(SCHEMA, wanted.grids)
    else:
        frame = source
        source = InPieces(lambda: [codes_of(encode(frame, SCHEMA), SCHEMA, wanted.grids)])
    found = release(CountMechanism(plan, SecretStreams(0), source), wanted)
    return [each.counts.tolist() for each in found.noisy]


def test_a_release_is_the_same_from_everywhere(folder, put):
    wanted = released(frame_of(TABLE))
    for place in (folder, put(TABLE)):
        with open_table(place) as table:
            assert table.num_rows == ROWS
            assert released(table) == wanted


# -- files that DuckDB reads ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet"])
def test_files(tmp_path, name):
    path = tmp_path / name
    write_table(frame_of(TABLE), path)
    with open_table(f"duckdb:{path}") as table:
        assert released(table) == released(read_table(path))
        assert table.digest() == file_digest(path)


def test_odd_csv_files(tmp_path):
    texts = (
        '\ufeffage, region ,,ill\n5,"no""rth",x,1\n\n "7" ,"a\nb",,0\r\n8,,"",true\n9,"",y,"x,y"\n'
        "10,north,z,\n"
    )
    path = tmp_path / "t.csv"
    path.write_bytes(texts.encode())
    schema = Schema(
        (
            Integer(name="age", lower=0, upper=10),
            Categorical(name="region", levels=('no"rth', "a\nb", "north"), nullable=True),
            Categorical(name="ill", levels=("1", "x,y", "0"), nullable=True),
        ),
        missing=("NA",),
    )
    with open_table(f"duckdb:{path}") as table:
        found = counted(table, schema)
    wanted = expected(read_table(path), schema)
    assert all(map(np.array_equal, found, wanted))
    latin = tmp_path / "l.csv"
    latin.write_bytes("k;a\nä;1\n".encode("latin-1"))
    schema = Schema((Categorical(name="k", levels=("a", "ä")),))
    with open_table(f"duckdb:{latin}", delimiter=";", encoding="latin-1") as table:
        assert counted(table, schema)[0].tolist() == [0, 1]
    single = tmp_path / "s.csv"
    single.write_text("k\na\n\nb\n")
    with open_table(f"duckdb:{single}") as table:
        assert table.num_rows == 3


def test_broken_files_are_refused_without_values(tmp_path):
    ragged, cut = tmp_path / "r.csv", tmp_path / "c.csv.gz"
    ragged.write_text("age,region,ill\n1,north,secret,2\n")
    cut.write_bytes(gzip.compress(b"age,region,ill\n" + b"1,north,secret\n" * 9999)[:60])
    for path in (ragged, cut):
        with pytest.raises(TableError) as found:
            open_table(f"duckdb:{path}")
        assert "secret" not in str(found.value)
    with pytest.raises(FileNotFoundError):
        open_table("duckdb:nowhere.csv")
    with pytest.raises(FileNotFoundError):
        open_table("nowhere.duckdb#t")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="with none"):
        open_table(tmp_path / "empty")


def test_a_file_that_changes_ends_the_run(folder, tmp_path):
    with open_table(folder) as table:
        grids, cells, asked = questions(SCHEMA)
        source = table.counted(SCHEMA, grids)
        source.count(cells, asked)
        pq.write_table(TABLE, tmp_path / "parts" / "c.parquet")
        with pytest.raises(DatabaseError, match="changed during the run"):
            source.count(cells, asked)


# -- snapshots ------------------------------------------------------------------------------------


def test_what_is_written_meanwhile_is_not_seen(address, postgres):
    with open_table(address) as table, psycopg.connect(postgres, autocommit=True) as other:
        before = released(table)
        other.execute("INSERT INTO records SELECT * FROM records")
        assert released(table) == before
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            table._backend.con.execute("DELETE FROM records")
    with open_table(address) as table:
        assert table.num_rows == 2 * ROWS


def test_counts_of_another_number_of_rows_are_refused(folder):
    with open_table(folder) as table:
        table.num_rows += 1
        with pytest.raises(DatabaseError, match="changed during the run"):
            counted(table, SCHEMA)


def test_a_lost_connection(address, postgres, ledger, monkeypatch):
    """Before a release nothing is booked; within one the ledger counts what was begun."""

    def end_all():
        with psycopg.connect(postgres, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'dpvim'"
            )

    with open_table(address) as table:
        end_all()
        fails(table, match="lost", ledger=ledger)
    real = CountMechanism.release

    def breaking(self, *args, **options):
        end_all()
        return real(self, *args, **options)

    monkeypatch.setattr(CountMechanism, "release", breaking)
    with pytest.raises(DatabaseError, match="lost"):
        synthesize(address, SCHEMA, epsilon=1.0, delta=DELTA, ledger=ledger)
    assert [each.state for each in ledger.releases] == ["done"]


# -- refusals -------------------------------------------------------------------------------------


def test_rights(address, postgres, ledger):
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute("DROP ROLE IF EXISTS reader")
        owner.execute("CREATE ROLE reader LOGIN PASSWORD 's3cret'")
        host = address.partition("@127")[2]
        reader = f"postgresql://reader:s3cret@127{host}"
        fails(reader, match="may not be read", ledger=ledger)
        owner.execute("GRANT SELECT (age, region) ON records TO reader")
        fails(reader, match="may not be read", ledger=ledger)
        # A ledger that knows its data otherwise does not ask for them: the plan is refused.
        told = Ledger(ledger.path, data=frame_of(TABLE))
        fails(reader, match="may not be read", ledger=told)
        # Counting rows needs no right on the missing column: it is the plan that is refused.
        with open_table(reader) as table:
            assert table.num_rows == ROWS
            some = Schema(SCHEMA.columns[:2])
            assert counted(table, some)[0].sum() == ROWS
            with pytest.raises(DatabaseError, match=r"all of its columns"):
                table.digest()
        owner.execute("DROP OWNED BY reader; DROP ROLE reader")


def test_addresses_that_lead_nowhere(address, ledger):
    wrong = address.replace("s3cret%2F%40word", "wr0ng%20word")
    fails(wrong, match="connection failed", ledger=ledger)
    fails(address.replace("127.0.0.1:", "127.0.0.1:1"), match="connection failed|address")
    fails(address.replace("#records", "#nothing"), match="no such table", ledger=ledger)
    fails(address.replace("#records", "#no.records"), match="no such table", ledger=ledger)
    fails(address.replace("#records", ""), match="name of a table")
    fails(address.replace("#records", "#a.b.c"), match="schema.table")
    fails(f"postgresql://{USER}:s3cret@[bad#t", match="address")
    for reading in (dpvim.read_table, lambda place: Ledger(ledger.path, data=place)):
        with pytest.raises(ValueError, match="address of a database") as found:
            reading(address)
        assert "s3cret" not in str(found.value)


@pytest.mark.parametrize("kind", ["timestamptz", "bytea", "json", "integer[]", "boolean", "uuid"])
def test_columns_of_other_types(postgres, ledger, kind):
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute("DROP TABLE IF EXISTS other; CREATE TABLE other (age int, region text)")
        owner.execute("INSERT INTO other VALUES (1, 'north')")
        owner.execute(f"ALTER TABLE other ADD COLUMN x {kind}")
    columns = (*SCHEMA.columns[:2], Integer(name="x", lower=0, upper=9, reviewed=True))
    fails(f"{postgres}#other", match="column 'x'", schema=Schema(columns), ledger=ledger)


def test_texts_that_are_equal_without_being_the_same(postgres, ledger):
    with psycopg.connect(postgres, autocommit=True) as owner:
        try:
            owner.execute(
                "CREATE COLLATION IF NOT EXISTS any_case (provider = icu, "
                "locale = 'und-u-ks-level2', deterministic = false)"
            )
        except psycopg.Error:
            pytest.skip("this server is without ICU")
        owner.execute("DROP TABLE IF EXISTS other")
        owner.execute("CREATE TABLE other (age int, region text COLLATE any_case, ill bool)")
        owner.execute("INSERT INTO other VALUES (1, 'NORTH', true)")
    fails(f"{postgres}#other", match="collation", ledger=ledger)


def test_enumerations_are_texts(postgres):
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute("DROP TABLE IF EXISTS other; DROP TYPE IF EXISTS side")
        owner.execute("CREATE TYPE side AS ENUM ('north', 'south')")
        owner.execute("CREATE TABLE other (region side)")
        owner.execute("INSERT INTO other VALUES ('north'), ('south'), ('south'), (NULL)")
    with open_table(f"{postgres}#other") as table:
        assert counted(table, Schema(SCHEMA.columns[1:2]))[0].tolist() == [1, 2, 1]


def test_what_needs_records(folder, ledger):
    fails(folder, ValueError, match="group_by", group_by="person", ledger=ledger)
    fails(folder, ValueError, match="engine", engine="dpvi", ledger=ledger)
    fails(
        folder,
        match="none named 'x'",
        schema=Schema((Integer(name="x", lower=0, upper=1, reviewed=True),)),
    )
    with pytest.raises(TableError, match="delimiter"):
        open_table(folder, delimiter=";")


def test_formats_that_engines_cannot_read(tmp_path):
    for format in ("%Y%m%d", "%d.%m.%y", "%j/%Y"):
        column = Date(name="d", lower="2020-01-01", upper="2021-01-01", format=format)
        place = in_parquet(tmp_path / format.replace("/", "-"), pa.table({"d": ["x", "y"]}))
        with open_table(place) as table, pytest.raises(TableError, match="Make a view"):
            counted(table, Schema((column,)))


# -- tables of Ibis' ------------------------------------------------------------------------------


# Ibis asks for an option that pandas will drop.
@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated")
def test_tables_of_ibis():
    import ibis

    backend = ibis.duckdb.connect()
    connection = backend.con
    connection.register("given", TABLE)
    connection.execute("CREATE TABLE people AS SELECT * FROM given")
    with errors_explained("people"):  # in which Ibis may use what DuckDB deprecates
        people = backend.table("people")
    assert is_database(people)
    old = people.filter(people.age >= 60)
    frame = frame_of(TABLE)
    with open_table(old) as table:
        connection.cursor().execute("INSERT INTO people SELECT * FROM people")
        kept = frame[frame["age"] >= 60]
        assert released(table, len(kept)) == released(kept, len(kept))
        with pytest.raises(DatabaseError, match="transaction"):
            open_table(people)
    assert connection.execute("SELECT count(*) FROM people").fetchone() == (2 * ROWS,)
    for unstable in (people.limit(5), people.sample(0.5), people.mutate(r=ibis.random())):
        with pytest.raises(DatabaseError, match="the same for every query"):
            open_table(unstable)
    with pytest.raises(DatabaseError, match="pass the frame"):
        open_table(ibis.memtable(pa.table({"a": [1]})))
    with pytest.raises(TypeError, match="address"):
        open_table(5)


# -- ledgers and checkpoints ----------------------------------------------------------------------


def test_a_fingerprint_is_of_what_a_table_holds(put, tmp_path):
    def digest(place):
        with open_table(place) as table:
            return table.digest()

    first = digest(put(TABLE))
    order = np.random.default_rng(0).permutation(ROWS)
    assert digest(put(TABLE.take(order), "shuffled")) == first
    assert digest(put(TABLE.slice(1), "fewer")) != first
    others = TABLE.set_column(1, "region", pa.array(["north"] * ROWS))
    assert digest(put(others, "others")) != first
    # A value that moves to the column beside it is another table.
    two = pa.table({"a": ["x", "y"], "b": ["", None]})
    assert digest(put(two, "a")) != digest(put(pa.table({"a": ["", None], "b": ["x", "y"]}), "b"))
    parts = in_parquet(tmp_path / "p", TABLE)
    assert digest(parts) == digest(parts)
    assert digest(parts) != digest(in_parquet(tmp_path / "q", TABLE.slice(1)))


def test_a_ledger_knows_its_table(put, tmp_path):
    address = put(TABLE)
    with open_table(address) as table:
        book = Ledger.create(tmp_path / "b", name="x", epsilon=1.0, delta=1e-5, data=table)
    fails(put(TABLE.slice(1), "fewer"), Exception, match="data", ledger=book)
    with open_table(address) as table:
        assert Ledger(tmp_path / "b", data=table).releases == ()
    text = (tmp_path / "b").read_text()
    assert "s3cret" not in text
    assert "127.0.0.1" not in text


def quick(monkeypatch):
    """Twins whose model is not fitted: the release is what is of interest."""
    monkeypatch.setattr("dpvim.synthesis.marginals.fit.fit_traits", lambda *a, **o: None)
    monkeypatch.setattr(fitting, "Twin", lambda schema, fitted, model, rows: fitted)


def test_a_twin_is_released_and_paid_for(put, folder, ledger, monkeypatch):
    quick(monkeypatch)
    address = put(TABLE)
    found = synthesize(address, SCHEMA, epsilon=0.5, delta=DELTA, ledger=ledger)
    assert found.releases.num_rows == ROWS
    assert [each.state for each in ledger.releases] == ["done"]
    seeded = [
        synthesize(source, SCHEMA, epsilon=0.5, delta=DELTA, seed=1)
        for source in (address, folder, frame_of(TABLE))
    ]
    counts = [[each.counts.tolist() for each in one.releases.noisy] for one in seeded]
    assert counts[0] == counts[1] == counts[2]


def test_a_checkpoint_goes_on_with_the_same_table(put, tmp_path, monkeypatch):
    quick(monkeypatch)
    address = put(TABLE)
    real, place = CountMechanism.release, tmp_path / "run"

    def crashing(self, cells, marginals, *, share):
        if len(marginals) > 1:
            raise KeyboardInterrupt
        return real(self, cells, marginals, share=share)

    run = make_synthesizer(SCHEMA, checkpoint=place)
    assert isinstance(run, CountSynthesizer)
    monkeypatch.setattr(CountMechanism, "release", crashing)
    with pytest.raises(KeyboardInterrupt):
        run.fit(address, epsilon=1.0, delta=DELTA)
    monkeypatch.setattr(CountMechanism, "release", real)
    with pytest.raises(ValueError, match="other data"):
        run.fit(
            put(TABLE.slice(1).append_column("more", pa.array(["x"] * (ROWS - 1)))),
            epsilon=1.0,
            delta=DELTA,
            num_examples=ROWS,
        )
    assert run.fit(put(TABLE), epsilon=1.0, delta=DELTA).releases.num_rows == ROWS


# -- looking --------------------------------------------------------------------------------------


def test_drafts_are_those_of_files(put, folder):
    wanted = draft(frame_of(TABLE))
    for place in (put(TABLE), folder):
        with open_table(place) as table:
            assert draft_of(table) == wanted


def test_drafts_of_many_values(tmp_path, monkeypatch):
    monkeypatch.setattr("dpvim.synthesis.databases.looking.MOST_VALUES", 20)
    values = np.arange(200) / 10
    table = pa.table(
        {
            "real": pa.array(np.append(values, values), mask=np.arange(400) == 9),
            "text": [f"t{i}" for i in range(400)],
            "few": ["a", "b"] * 200,
            "zoned": pa.array([0] * 400, pa.timestamp("us", tz="UTC")),
        }
    )
    with open_table(in_parquet(tmp_path / "t", table)) as opened:
        made = draft_of(opened)
    assert made.schema.names == ["real", "few"]
    assert made.schema.column("real").bounds == (0.0, 20.0)
    assert made.schema.column("real").nullable
    assert "20 different texts" in made.left_out["text"]
    assert "time zone" in made.left_out["zoned"]


# -- passwords ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p%40w@h/d#t", "postgresql://u:***@h/d#t"),
        ("postgres://u:p@w:x@h:5/d", "postgres://u:***@h:5/d"),
        ("postgres:/u:pw@h/d is no file", "postgres:/u:***@h/d is no file"),
        ("postgresql://h/d?user=u&password=pw#t", "postgresql://h/d?user=u&password=***#t"),
        ("postgresql://u@h/d#t", "postgresql://u@h/d#t"),
        (
            "spark://h:7077?spark.a.secret.key=k&spark.b=1#t",
            "spark://h:7077?spark.a.secret.key=***&spark.b=1#t",
        ),
        ("spark:local[1]?spark.b=1#/a/b@c", "spark:local[1]?spark.b=1#/a/b@c"),
        ("C:/data/people.csv", "C:/data/people.csv"),
    ],
)
def test_passwords_are_not_shown(text, shown):
    assert without_password(text) == shown


def test_a_table_shows_no_password(address):
    with open_table(address) as table:
        assert "s3cret" not in repr(table)
        assert "s3cret" not in table.name


def test_frames_are_no_databases(tmp_path):
    assert not any(map(is_database, [pd.DataFrame(), "t.csv", tmp_path / "t.parquet", None, b"x"]))
