"""The SQL tool: queries of one SQLite file, which is opened read-only.

Four independent limits: the file is opened with mode=ro; an authorizer permits only SELECT, reading columns and the
functions of a list, so there is no ATTACH, PRAGMA or load_extension; a progress handler ends a query after its time;
and rows and characters are counted.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any

from regard.agents.tool import AgentTool, ToolFailure, text_arguments

MAX_ROWS, MAX_CHARACTERS = 50, 4000  # of a result
MAX_VALUE, MAX_PATTERN = 1 << 17, 100  # bytes of a value and of a pattern: no clock is read inside of a function
SECONDS = 2.0
STEPS = 1000  # instructions of SQLite's machine between two looks at the clock
SCHEMA_CHARACTERS = 2000
FUNCTIONS = frozenset({  # without printf: '%.*c' writes gigabytes in one step
    "abs", "avg", "ceil", "ceiling", "char", "coalesce", "concat", "concat_ws", "count", "cume_dist", "date",
    "datetime", "dense_rank", "exp", "first_value", "floor", "glob", "group_concat", "hex", "ifnull", "iif", "instr",
    "julianday", "lag", "last_value", "lead", "length", "like", "ln", "log", "log10", "lower", "ltrim", "max", "min",
    "mod", "nth_value", "ntile", "nullif", "percent_rank", "pi", "pow", "power", "quote", "rank", "replace", "round",
    "row_number", "rtrim", "sign", "sqrt", "strftime", "string_agg", "substr", "substring", "sum", "time", "total",
    "trim", "typeof", "unicode", "unixepoch", "upper", "bm25", "highlight", "snippet", "match", "json_extract",
    "json_array_length", "->", "->>",
})  # fmt: skip
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}


def sql_tool(path: Path, seconds: float = SECONDS) -> AgentTool:
    """A tool whose description has the tables of the database. ValueError if the file is no database."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a SQLite database")
    try:
        with Reader(path) as reader:
            rows = reader.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND type IN ('table', 'view')")
            tables = "; ".join(" ".join(sql.split()) for (sql,) in rows)
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read as a SQLite database: {error}") from None
    return AgentTool(
        "sql",
        f"Queries a database. Tables: {tables[:SCHEMA_CHARACTERS]}",
        text_arguments(query="One SELECT statement of SQLite"),
        lambda arguments: query(path, arguments["query"], seconds),
    )


class Reader:
    """A connection that can only read, for a `with` block. A thread has its own."""

    def __init__(self, path: Path):
        self.connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=SECONDS)
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN)
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self.connection.set_authorizer(authorize)

    def __enter__(self) -> sqlite3.Connection:
        return self.connection

    def __exit__(self, *error: object) -> None:
        self.connection.close()


def authorize(action: int, first: str | None, second: str | None, *place: str | None) -> int:
    allowed = action in ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def query(path: Path, statement: str, seconds: float = SECONDS) -> str:
    """The names of the columns, then the rows, one per line."""
    deadline = time.monotonic() + seconds
    try:
        with Reader(path) as reader:
            reader.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
            cursor = reader.execute(statement)
            if cursor.description is None:
                raise ToolFailure("the query is empty; write a SELECT statement")
            rows = cursor.fetchmany(MAX_ROWS + 1)
            return table([name for name, *_ in cursor.description], rows)
    except ToolFailure:
        raise
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise ToolFailure(f"the query takes longer than {seconds:g} s; ask for less") from None
        raise ToolFailure(f"the query failed: {error}") from None


def table(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    lines, size, reason = [" | ".join(columns)], 0, ""
    for row in rows[:MAX_ROWS]:
        line = " | ".join(map(cell, row))
        size += len(line)
        if size > MAX_CHARACTERS:
            reason = f"(the rows are longer than {MAX_CHARACTERS} characters; the rest is left out)"
            break
        lines.append(line)
    else:
        reason = f"(only the first {MAX_ROWS} rows)" if len(rows) > MAX_ROWS else "" if rows else "(no rows)"
    return "\n".join([*lines, *filter(None, [reason])])


def cell(value: Any) -> str:
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return "NULL" if value is None else " ".join(str(value).split("\n"))
