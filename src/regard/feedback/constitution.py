"""A constitution: written principles by which a model criticises its answers, and a judge compares them.

    critique = "… {principle} …"        # optional: the request for a critique
    revision = "… {principle} …"        # optional: the request for a new answer
    judge = "… {prompt} {first} {second} {principles} …"      # optional: the question to a judge

    [[principles]]
    name = "concise"
    text = "Answer in as few words as the question needs."

The package has one as an example (constitution.toml).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from regard.feedback.judge import TEMPLATE, fill_template
from regard.spec import suggest_name

PACKAGED = Path(__file__).with_suffix(".toml")
PLACEHOLDERS = {  # of each template: those that it needs
    "critique": ("principle",),
    "revision": ("principle",),
    "judge": ("prompt", "first", "second"),
}


@dataclass(frozen=True)
class Principle:
    name: str
    text: str


@dataclass(frozen=True)
class Constitution:
    principles: tuple[Principle, ...]
    critique: str
    revision: str
    judge: str = TEMPLATE

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(principle.text for principle in self.principles)

    def draw(self, seed: int, number: int, rounds: int) -> list[Principle]:
        """The principles of the rounds for a prompt: in random order, again from the first one after the last."""
        order = Random(f"principles/{seed}/{number}").sample(self.principles, len(self.principles))
        return [order[turn % len(order)] for turn in range(rounds)]

    def critique_request(self, principle: Principle) -> str:
        return fill_template(self.critique, {"principle": principle.text}).strip()

    def revision_request(self, principle: Principle) -> str:
        return fill_template(self.revision, {"principle": principle.text}).strip()


def read_constitution(path: Path | None = None) -> Constitution:
    """The constitution of a TOML file; None: the package's example. Templates that it leaves out are the example's."""
    tables = read_tables(PACKAGED)
    if path is not None:
        tables = {"critique": tables["critique"], "revision": tables["revision"], **read_tables(path)}
    path = path or PACKAGED
    if unknown := sorted(tables.keys() - {"principles", *PLACEHOLDERS}):
        raise ValueError(
            f"{path}: {unknown[0]!r} is not a key of a constitution; "
            f"{suggest_name(unknown[0], ['principles', *PLACEHOLDERS])}"
        )
    templates = {name: checked_template(tables[name], name, path) for name in PLACEHOLDERS if name in tables}
    entries = tables.get("principles")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} has no [[principles]]; add one per principle, with name and text")
    principles = tuple(read_principle(entry, path) for entry in entries)
    if len({principle.name for principle in principles}) < len(principles):
        raise ValueError(f"{path}: two principles have the same name; rename one")
    return Constitution(principles, **templates)


def read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def checked_template(template: Any, name: str, path: Path) -> str:
    for placeholder in PLACEHOLDERS[name]:
        if not isinstance(template, str) or f"{{{placeholder}}}" not in template:
            raise ValueError(f"{path}: {name} must be a string with {{{placeholder}}} in it, found {template!r:.60}")
    return template


def read_principle(entry: Any, path: Path) -> Principle:
    values = dict(entry) if isinstance(entry, Mapping) else {}
    valid = values.keys() == {"name", "text"} and all(isinstance(v, str) and v.strip() for v in values.values())
    if not valid:
        raise ValueError(f"{path}: a principle has a name and a text, both strings, and nothing else; found {entry!r}")
    return Principle(values["name"], values["text"].strip())
