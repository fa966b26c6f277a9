"""An instrument: a function of a few controls whose numbers the parts of the package compute, for the page to draw.

    compute(**controls) -> panels          panels.py has the kinds of panels

Controls are declared as data, so the page can draw them, and a request is checked before anything is computed. An
instrument that reads a model has `subject` as its first argument: the served model, or None. One that reads training
runs has the folder of runs there, or None.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from regard.lens.recorded_attention import copy_with_shared_tensors
from regard.models.decoder import DecoderModule
from regard.spec import suggest_name
from regard.text.tokenizer import Tokenizer

MAX_TEXT = 200  # characters of a text control
Panel = dict[str, Any]


class Subject(NamedTuple):
    """A decoder that instruments read, its tokenizer, and what a server tells about the engine that serves it."""

    name: str
    model: DecoderModule
    tokenizer: Tokenizer
    metrics: Callable[[], Mapping[str, int]] | None = None  # `Engine.metrics`
    arrivals: Callable[[list[int], int], list[float]] | None = None  # (ids, new) -> seconds until each new token


COPIES: WeakKeyDictionary[DecoderModule, DecoderModule] = WeakKeyDictionary()  # they share the weights


def subject_of(name: str, model: Any, tokenizer: Tokenizer) -> Subject | None:
    """None for a model that is no decoder."""
    if not isinstance(model, DecoderModule):
        return None
    if model not in COPIES:
        copy = copy_with_shared_tensors(model).eval()
        assert isinstance(copy, DecoderModule)
        COPIES[model] = copy
    return Subject(name, COPIES[model], tokenizer)


@dataclass(frozen=True)
class Slider:
    name: str
    label: str
    low: float
    high: float
    default: float
    step: float = 1
    names: tuple[str, ...] = ()  # shown in place of the numbers from `low` on

    kind = "slider"

    def check(self, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{self.name}={shown(value)} is not a number; send one from {self.low} to {self.high}")
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.name}={shown(value)} must be from {self.low} to {self.high}")
        whole = all(isinstance(number, int) for number in (self.low, self.high, self.step))
        if whole and value != int(value):
            raise ValueError(f"{self.name}={shown(value)} must be a whole number")
        return int(value) if whole else float(value)


@dataclass(frozen=True)
class Selection:
    name: str
    label: str
    options: tuple[str, ...]
    default: str

    kind = "selection"

    def check(self, value: Any) -> str:
        if value not in self.options:
            raise ValueError(f"{self.name}={shown(value)} is unknown; choose one of {', '.join(self.options)}")
        return value


@dataclass(frozen=True)
class Switch:
    name: str
    label: str
    default: bool

    kind = "switch"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{self.name}={shown(value)} must be true or false")
        return value


@dataclass(frozen=True)
class TextField:
    name: str
    label: str
    default: str

    kind = "text"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{self.name}={shown(value)} is not a text")
        if not 1 <= len(value) <= MAX_TEXT:
            raise ValueError(f"{self.name} has {len(value)} characters; send 1 to {MAX_TEXT}")
        return value


Control = Slider | Selection | Switch | TextField


@dataclass(frozen=True)
class Quiz:
    """A question that the instrument answers once its controls have the values of `setting`."""

    question: str
    answer: str
    setting: Mapping[str, Any]


@dataclass(frozen=True)
class Instrument:
    id: str
    title: str
    explanation: str  # one line
    equation: str  # LaTeX; docs/generate_equations.py writes it as MathML
    controls: tuple[Control, ...]
    quiz: Quiz
    compute: Callable[..., list[Panel]]
    files: tuple[str, ...]  # under src/regard, where the numbers come from
    reads_model: bool = False  # compute(subject, **controls)
    reads_runs: bool = False  # compute(folder, **controls)
    equations: Mapping[str, str] = field(default_factory=dict)  # LaTeX by name, for panels that show one

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every control, with defaults for those that are not given; ValueError for invalid ones."""
        controls = {control.name: control for control in self.controls}
        for name in given:
            if name not in controls:
                known = suggest_name(name[:40], controls) if controls else "it has none"
                raise ValueError(f"{self.id} has no control {name[:40]!r}; {known}")
        return {name: c.check(given[name]) if name in given else c.default for name, c in controls.items()}

    def panels(self, given: Mapping[str, Any], subject: Subject | None = None, runs: Path | None = None) -> list[Panel]:
        values = self.values(given)
        if self.reads_runs:
            return self.compute(runs, **values)
        return self.compute(subject, **values) if self.reads_model else self.compute(**values)

    def describe(self) -> dict[str, Any]:
        """Everything but the panels, as data for JSON."""
        return {
            "id": self.id,
            "title": self.title,
            "explanation": self.explanation,
            "controls": [{"kind": control.kind} | asdict(control) for control in self.controls],
            "quiz": asdict(self.quiz),
            "files": list(self.files),
            "reads_model": self.reads_model,
        }


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
