"""The table of docs/topics/families.md, made from the families and the cases that they are tested with.

`python -m tests.families.page` writes it anew; tests/families/test_page.py holds the page to it.
"""

import importlib
import re
from collections import Counter, defaultdict
from pathlib import Path

import transformers

from regard.families import FAMILIES, family
from tests.families.cases import Cases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/topics/families.md"
BEGIN, END = "<!-- made by python -m tests.families.page -->\n", "<!-- until here -->"


def cases() -> Cases:
    """All of them, from every file."""
    found: Cases = {}
    for path in sorted((Path(__file__).parent / "cases").glob("[a-z]*.py")):
        found |= importlib.import_module(f"tests.families.cases.{path.stem}").CASES
    return found


def classes() -> dict[str, Counter[str]]:
    """Of each family the classes of `transformers` that it is tested with, and with how many configs."""
    tested: dict[str, Counter[str]] = defaultdict(Counter)
    for model, *_ in cases().values():
        tested[getattr(transformers, model).config_class.model_type][model] += 1
    return tested


def table() -> str:
    tested, lines = (
        classes(),
        ["| model_type | what it is | classes, each with so many tiny configs |", "| --- | --- | --- |"],
    )
    for model_type in FAMILIES:
        first = (family(model_type).__doc__ or "").partition("\n")[0].rstrip(".")
        named = ", ".join(f"{model} {count}" for model, count in sorted(tested[model_type].items()))
        lines.append(f"| `{model_type}` | {first} | {named} |")
    version = re.search(r"^transformers==(\S+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.M)
    assert version is not None, "the lock names no transformers"
    total = sum(counts.total() for counts in tested.values())
    kinds = sum(map(len, tested.values()))
    lines += ["", f"{len(FAMILIES)} families, {kinds} classes, {total} configs, beside transformers {version[1]}.", ""]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
