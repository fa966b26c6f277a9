"""The ledger (docs/ledger.md): its rows, their citations and their ticks. `python -m tests.ledger [--tick]`.

A row is ticked if the files that cite it are sufficient for its kind (SUFFICIENT). Citations are found without running
anything:

    @pytest.mark.ledger("pos.rope.relative")     in tests: on a function, in `pytestmark`, in `marks=` of a parameter
    @pytest.mark.ledger("a.claim", exact=True)   the test computes the claim; no experiment with seeds is needed
    <!-- ledger: pos.rope pos.rope.relative -->  in pages of docs/
    # ledger: pos.rope.decay                     in labs; they count once docs/labs has their results for several seeds
"""

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from regard.spec import suggest_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ledger.md"
KINDS = "MENCSF"
ROW = re.compile(r"\| ([☐☑]) `([^`]+)` \| (\w) \| (.+?) \| (.*?) ?\|")
COMMENT = re.compile(r"(?:<!--|#) ledger: ([\w. ]+)")
SEEDS = 3  # the fewest with which a lab's results show a claim

Evidence = Literal["test", "exact test", "GPU test", "page", "lab", "lab without results for several seeds"]
TESTS: tuple[Evidence, ...] = ("test", "exact test")
SUFFICIENT: dict[str, tuple[Evidence, ...]] = {  # by kind; one of them is enough
    "M": TESTS,
    "E": TESTS,
    "N": TESTS,
    "C": ("exact test", "lab"),
    "S": (*TESTS, "page"),
    "F": (*TESTS, "page"),
}


@dataclass(frozen=True, order=True)
class Citation:
    file: str  # path from the root
    evidence: Evidence


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


def marks(source: str) -> Iterator[tuple[str, Evidence]]:
    """Ids in every `pytest.mark.ledger(…)` of a test file, and the kind of test that cites them."""
    tree = ast.parse(source)
    whole_file_on_gpu = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and has_gpu_mark([node.value])
        for node in tree.body
    )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nodes_of_gpu_tests = {id(n) for f in functions if has_gpu_mark(f.decorator_list) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.ledger"):
            exact = any(keyword.arg == "exact" for keyword in node.keywords)
            gpu = whole_file_on_gpu or id(node) in nodes_of_gpu_tests
            for argument in node.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(f"{ast.unparse(node)} in line {node.lineno}: write the ids out, as strings")
                yield argument.value, "GPU test" if gpu else "exact test" if exact else "test"


def has_gpu_mark(decorators: Iterable[ast.expr]) -> bool:
    """Whether pytest.mark.gpu is one of the decorators, or in a list of them. One parameter's mark does not count."""
    listed = [item for node in decorators for item in (node.elts if isinstance(node, ast.List) else [node])]
    return any(ast.unparse(node).endswith("mark.gpu") for node in listed)


def comments(source: str) -> Iterator[str]:
    for listed in COMMENT.findall(source):
        yield from listed.split()


def citations(root: Path = ROOT) -> dict[str, tuple[Citation, ...]]:
    """The citations of each cited id, by file."""
    found = defaultdict(set)
    for path in (root / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.name != "ledger.py" and "mark.ledger" in source:  # the docstring of ledger.py shows the forms
            for id, evidence in marks(source):
                found[id].add(Citation(path.relative_to(root).as_posix(), evidence))
    for path in (root / "docs").rglob("*.md"):
        if path.name != "ledger.md":
            for id in comments(path.read_text(encoding="utf-8")):
                found[id].add(Citation(path.relative_to(root).as_posix(), "page"))
    for path in (root / "src/regard/labs").rglob("*.py"):
        results = root / "docs/labs" / f"{path.stem.replace('_', '-')}.json"
        evidence: Evidence = "lab" if has_several_seeds(results) else "lab without results for several seeds"
        for id in comments(path.read_text(encoding="utf-8")):
            found[id].add(Citation(path.relative_to(root).as_posix(), evidence))
    return {id: tuple(sorted(cited)) for id, cited in found.items()}


def has_several_seeds(results: Path) -> bool:
    """Whether the file has a lab's results with enough seeds and enough training to judge its claim."""
    if not results.exists():
        return False
    result = json.loads(results.read_text(encoding="utf-8"))
    return len(result["seeds"]) >= SEEDS and result["settings"]["size"] != "quick"


def suffices(kind: str, cited: Sequence[Citation]) -> bool:
    return any(citation.evidence in SUFFICIENT[kind] for citation in cited)


def insufficient(rows: Sequence[Row], cited: dict[str, tuple[Citation, ...]]) -> list[str]:
    """A line for every row that is cited but not ticked."""
    return [
        f"{row.id}: {row.kind} needs {' or '.join(SUFFICIENT[row.kind])}, has "
        + ", ".join(f"{citation.file} ({citation.evidence})" for citation in cited[row.id])
        for row in rows
        if row.id in cited and not suffices(row.kind, cited[row.id])
    ]


def files_that_show(row: Row, cited: dict[str, tuple[Citation, ...]]) -> tuple[str, ...]:
    """The files that cite a row, GPU tests included, if they are sufficient for its kind; otherwise none."""
    found = cited.get(row.id, ())
    return tuple(dict.fromkeys(citation.file for citation in found)) if suffices(row.kind, found) else ()


def contents(rows: list[Row]) -> str:
    """The table of contents: the number of rows by topic and kind, of corrections, and of rows that are shown."""

    def line(name: str, group: list[Row]) -> str:
        kinds = Counter(row.kind for row in group)
        corrections = sum(row.statement.startswith("⚠") for row in group)
        counts = [len(group), *(kinds[kind] for kind in KINDS), corrections, sum(row.ticked for row in group)]
        return "| " + " | ".join([name, *(str(count or "") for count in counts)]) + " |"

    head = f"| topic | rows | {' | '.join(KINDS)} | ⚠ | ☑ |\n| --- |{' --: |' * 9}\n"
    topics = dict.fromkeys(row.topic for row in rows)
    lines = [line(topic, [row for row in rows if row.topic == topic]) for topic in topics]
    return head + "\n".join([*lines, line("**all**", rows)]) + "\n"


def tick(page: str, cited: dict[str, tuple[Citation, ...]]) -> str:
    """The page with ticks, file names and contents that follow from the citations."""
    ids = [row.id for row in read(page)]
    for id, found in cited.items():
        if id not in ids:
            files = ", ".join(citation.file for citation in found)
            raise ValueError(f"{files} cites {id!r}, which is no row of the ledger; {suggest_name(id, ids)}")

    def ticked(found: re.Match[str]) -> str:
        (row,) = read(found[0])
        shown_by = files_that_show(row, cited)
        return str(replace(row, ticked=bool(shown_by), shown_by=shown_by))

    page = ROW.sub(ticked, page)
    return re.sub(r"\| topic \|.*?\n(?=\n)", lambda _: contents(read(page)), page, count=1, flags=re.DOTALL)


def summary(rows: list[Row]) -> Table:
    """The numbers of shown rows and of all rows, by topic and kind."""
    table = Table("topic", *KINDS, "all", title="ledger: rows shown / rows")

    def cells(topic: list[Row]) -> list[str]:
        groups = [*([row for row in topic if row.kind == kind] for kind in KINDS), topic]
        return [f"{sum(row.ticked for row in group)}/{len(group)}" if group else "" for group in groups]

    for topic in dict.fromkeys(row.topic for row in rows):
        table.add_row(topic, *cells([row for row in rows if row.topic == topic]))
    table.add_section()
    table.add_row("all", *cells(rows))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Count, or tick, the rows of docs/ledger.md.")
    parser.add_argument("--tick", action="store_true", help="write the ticks and files that follow from the citations")
    cited = citations()
    if parser.parse_args().tick:
        PAGE.write_text(tick(PAGE.read_text(encoding="utf-8"), cited), encoding="utf-8")
    rows, console = read(PAGE.read_text(encoding="utf-8")), Console()
    console.print(summary(rows))
    for line in insufficient(rows, cited):
        console.print(f"cited but open: {line}", highlight=False)


if __name__ == "__main__":
    main()
