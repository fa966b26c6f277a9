"""The ledger (docs/ledger.md) read, counted and ticked: `python -m tests.ledger [--tick]`.

A row is ticked when something cites it. Citations are found without running anything:

    @pytest.mark.ledger("pos.rope.relative")     in tests: on a function, in `pytestmark`, in `marks=` of a parameter
    <!-- ledger: pos.rope pos.rope.relative -->  in pages of docs/
    # ledger: pos.rope.decay                     in labs
"""

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from regard.spec import nearest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ledger.md"
KINDS = "MENCSF"
ROW = re.compile(r"\| ([☐☑]) `([^`]+)` \| (\w) \| (.+?) \| (.*?) ?\|")
COMMENT = re.compile(r"(?:<!--|#) ledger: ([\w. ]+)")


@dataclass(frozen=True)
class Row:
    topic: str
    id: str
    kind: str
    statement: str
    ticked: bool
    shown_by: tuple[str, ...]

    def __str__(self) -> str:
        shown_by = ", ".join(f"`{name}`" for name in self.shown_by)
        return f"| {'☑' if self.ticked else '☐'} `{self.id}` | {self.kind} | {self.statement} | {shown_by} |"


def read(page: str) -> list[Row]:
    rows, topic = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            topic = line.removeprefix("## ")
        elif found := ROW.fullmatch(line):
            tick, id, kind, statement, shown_by = found.groups()
            rows.append(Row(topic, id, kind, statement, tick == "☑", tuple(re.findall(r"`([^`]+)`", shown_by))))
    return rows


def marks(source: str) -> Iterator[str]:
    """Ids in every `pytest.mark.ledger(…)` of a test file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.ledger"):
            for argument in node.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(f"{ast.unparse(node)} in line {node.lineno}: write the ids out, as strings")
                yield argument.value


def comments(source: str) -> Iterator[str]:
    for listed in COMMENT.findall(source):
        yield from listed.split()


def citations(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """Of each cited id the files that cite it, by their paths from the root."""
    places = [("tests", "*.py", marks), ("docs", "*.md", comments), ("src/regard/labs", "*.py", comments)]
    found = defaultdict(set)
    for room, pattern, ids in places:
        for path in (root / room).rglob(pattern):
            if path.name not in ("ledger.md", "ledger.py"):  # where the forms are explained
                for id in ids(path.read_text(encoding="utf-8")):
                    found[id].add(path.relative_to(root).as_posix())
    return {id: tuple(sorted(files)) for id, files in found.items()}


def contents(rows: list[Row]) -> str:
    """The table of contents: rows by topic and kind, those that correct a misstatement, those that are shown."""

    def line(name: str, those: list[Row]) -> str:
        kinds = Counter(row.kind for row in those)
        warned = sum(row.statement.startswith("⚠") for row in those)
        counts = [len(those), *(kinds[kind] for kind in KINDS), warned, sum(row.ticked for row in those)]
        return "| " + " | ".join([name, *(str(count or "") for count in counts)]) + " |"

    head = f"| topic | rows | {' | '.join(KINDS)} | ⚠ | ☑ |\n| --- |{' --: |' * 9}\n"
    topics = dict.fromkeys(row.topic for row in rows)
    lines = [line(topic, [row for row in rows if row.topic == topic]) for topic in topics]
    return head + "\n".join([*lines, line("**all**", rows)]) + "\n"


def tick(page: str, cited: dict[str, tuple[str, ...]]) -> str:
    """The page with ticks, names and contents as the citations have them."""
    ids = [row.id for row in read(page)]
    for id, files in cited.items():
        if id not in ids:
            raise ValueError(f"{', '.join(files)} cites {id!r}, no row of the ledger; {nearest(id, ids)}")

    def ticked(found: re.Match[str]) -> str:
        (row,) = read(found[0])
        return str(Row(row.topic, row.id, row.kind, row.statement, row.id in cited, cited.get(row.id, ())))

    page = ROW.sub(ticked, page)
    return re.sub(r"\| topic \|.*?\n(?=\n)", lambda _: contents(read(page)), page, count=1, flags=re.DOTALL)


def summary(rows: list[Row]) -> Table:
    """Shown and all rows by topic and kind."""
    table = Table("topic", *KINDS, "all", title="ledger: rows shown / rows")

    def cells(those: list[Row]) -> list[str]:
        groups = [*([row for row in those if row.kind == kind] for kind in KINDS), those]
        return [f"{sum(row.ticked for row in group)}/{len(group)}" if group else "" for group in groups]

    for topic in dict.fromkeys(row.topic for row in rows):
        table.add_row(topic, *cells([row for row in rows if row.topic == topic]))
    table.add_section()
    table.add_row("all", *cells(rows))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Count, or tick, the rows of docs/ledger.md.")
    parser.add_argument("--tick", action="store_true", help="write the page anew from what tests, labs and pages cite")
    if parser.parse_args().tick:
        PAGE.write_text(tick(PAGE.read_text(encoding="utf-8"), citations()), encoding="utf-8")
    Console().print(summary(read(PAGE.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
