"""The SQL tool reads one database, and nothing that is asked of it writes, opens another file or runs long."""

import sqlite3
import time
from hashlib import sha256
from pathlib import Path

import pytest

from regard.agents.sql import MAX_CHARACTERS, MAX_ROWS, query, sql_tool
from regard.agents.tool import ToolFailure

SPELLED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n{}) SELECT {} FROM n"
ATTACKS = [
    "INSERT INTO things VALUES ('x', 'y', 1)", "UPDATE things SET price = 0", "DELETE FROM things", "DROP TABLE things",
    "CREATE TABLE evil(x)", "CREATE TEMP TABLE evil(x)", "ALTER TABLE things ADD COLUMN x", "VACUUM", "REINDEX",
    "VACUUM INTO '{folder}/copy.db'", "ATTACH '{folder}/other.db' AS other", "ATTACH ':memory:' AS m", "DETACH main",
    "PRAGMA writable_schema = 1", "PRAGMA journal_mode = DELETE", "PRAGMA database_list", "SELECT load_extension('x')",
    "SELECT * FROM pragma_database_list", "BEGIN EXCLUSIVE", "SAVEPOINT a", "SELECT 1; DROP TABLE things",
    "SELECT writefile('{folder}/evil', 'x')", "SELECT readfile('/etc/passwd')", "SELECT randomblob(1000000000)",
    "SELECT zeroblob(1000000000)", "SELECT fts3_tokenizer('x')", "ANALYZE", "REPLACE INTO things VALUES ('a','b',1)",
    "WITH x AS (SELECT 1) DELETE FROM things", "EXPLAIN INSERT INTO things VALUES ('x', 'y', 1)", "", ";", "-- nothing",
    "SELECT * FROM nowhere", "SELEKT 1", "CREATE VIRTUAL TABLE t USING fts5(x)", "SELECT 'a\x00b' FROM",
    "SELECT printf('%.*c', 2000000000, 'x')", "SELECT format('%.*c', 2000000000, 'x')",
    "SELECT replace(hex(zeroblob(100000)), '0', hex(zeroblob(100000)))",
]  # fmt: skip
BOMBS = [
    "WITH RECURSIVE a(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM a WHERE length(x) < 60000), b(i) AS (SELECT 1 "
    "UNION ALL SELECT i + 1 FROM b) SELECT sum(instr((SELECT max(x) FROM a), (SELECT min(x) FROM a) || 'b' || i)) "
    "FROM b",
    SPELLED.format("", "count(*)"), SPELLED.format("", "max(i)"),
    "SELECT count(*) FROM " + ", ".join(f"things t{i}" for i in range(12)),
    SPELLED.format(" LIMIT 1000000000", "sum(i)"),
]  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a shop?.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE things(name TEXT, place TEXT, price INTEGER)")
        rows = [(f"thing {i}", f"place {i % 7}", i) for i in range(100)]
        connection.executemany("INSERT INTO things VALUES (?, ?, ?)", rows)
    connection.close()
    return path


@pytest.mark.ledger("tool.call")
def test_queries_are_answered(database: Path) -> None:
    tool = sql_tool(database)
    assert "CREATE TABLE things(name TEXT, place TEXT, price INTEGER)" in tool.description
    assert tool.run({"query": "SELECT place, price FROM things WHERE name = 'thing 9'"}) == "place | price\nplace 2 | 9"
    assert tool.run({"query": "select sum(price) as total from things group by place limit 1"}) == "total\n735"
    assert tool.run({"query": "SELECT NULL, x'00ff', 'a' || char(10) || 'b', 1.5"}).endswith(
        "NULL | (2 bytes) | a b | 1.5"
    )
    assert tool.run({"query": "SELECT 1 AS one WHERE 0"}) == "one\n(no rows)"
    assert tool.run({"query": SPELLED.format(" LIMIT 5", "sum(i)")}).endswith("\n15")


def test_rows_and_characters_are_limited(database: Path) -> None:
    lines = query(database, "SELECT name FROM things").splitlines()
    assert len(lines) == MAX_ROWS + 2 and lines[-1] == f"(only the first {MAX_ROWS} rows)"
    long = query(database, "SELECT replace('xxxxxxxxxxxxxxxxxxxx', 'x', name || 'yyyyyyyyyyyyyyyyyyyyyy') FROM things")
    assert len(long) < MAX_CHARACTERS + 200 and "left out" in long


@pytest.mark.parametrize("statement", ATTACKS, ids=lambda text: ascii(text)[:40])
def test_nothing_is_written_or_opened(database: Path, statement: str) -> None:
    before = {path: sha256(path.read_bytes()).digest() for path in database.parent.iterdir()}
    with pytest.raises(ToolFailure):
        query(database, statement.replace("{folder}", str(database.parent)))
    assert {path: sha256(path.read_bytes()).digest() for path in database.parent.iterdir()} == before


@pytest.mark.parametrize("statement", BOMBS, ids=lambda text: text[:40])
def test_long_queries_are_stopped(database: Path, statement: str) -> None:
    start = time.monotonic()
    with pytest.raises(ToolFailure, match=r"longer than 0\.2 s"):
        query(database, statement, 0.2)
    assert time.monotonic() - start < 5


def test_an_error_that_names_a_column_is_not_taken_for_a_long_query(database: Path) -> None:
    with pytest.raises(ToolFailure, match="the query failed: no such column: interrupted"):
        query(database, "SELECT interrupted FROM things")


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database " * 100)
    with pytest.raises(ValueError, match="cannot be read as a SQLite database"):
        sql_tool(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="does not exist; give a SQLite database"):
        sql_tool(tmp_path / "none.db")
