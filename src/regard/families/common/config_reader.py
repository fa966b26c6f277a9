"""Reading a foreign config: every value is typed, and whatever is not understood is refused by name."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from regard.spec import nearest

REQUIRED: Any = object()
DEEPEST = 10_000  # layers: families may go through them one by one
FieldType = TypeVar("FieldType")


class FamilyError(ValueError):
    """A foreign config that our parts cannot express, or a spec that a foreign class cannot.

    `differences`: in how many places such a spec and what the class can say differ, where it came to that.
    """

    differences: float = math.inf


class Config:
    """A foreign config.json; a default is what the foreign class itself takes when the key is absent."""

    def __init__(self, model_type: str, values: Mapping[str, Any]):
        self.model_type, self.values = model_type, values

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        found = self.value(key, (int,), default)
        if "layer" in key and found is not None and found > DEEPEST:
            raise FamilyError(f"{self.model_type}: {key}={found} should be at most {DEEPEST}")
        return found

    def number(self, key: str, default: Any = REQUIRED) -> float:
        return self.real(key, self.value(key, (int, float), default))

    def positive(self, key: str, default: Any = REQUIRED) -> float:
        """What is divided by, or the root is taken of."""
        found = self.number(key, default)
        if not found > 0:
            raise FamilyError(f"{self.model_type}: {key}={found} should be above 0")
        return found

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        return self.value(key, (bool,), default)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def table(self, key: str) -> "Config":
        """A config inside the config; one that is not there is empty."""
        return Config(f"{self.model_type}: {key}", self.value(key, (dict,), {}))

    def each(self, key: str, kind: type[FieldType], default: Any = REQUIRED) -> tuple[FieldType, ...]:
        """A list of which every entry is of this type."""
        found = self.value(key, (list, tuple), default)
        if len(found) > DEEPEST:
            raise FamilyError(f"{self.model_type}: {key} has {len(found)} entries, should have at most {DEEPEST}")
        if not all(type(entry) is kind for entry in found):
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} should be a list of {kind.__name__}")
        return tuple(found)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self.real(key, entry) for entry in self.value(key, (list, tuple), REQUIRED))

    def choice(self, key: str, words: Mapping[str, FieldType], default: Any = REQUIRED) -> FieldType:
        """What a word of theirs is called here."""
        word = self.value(key, (str,), default)
        if word not in words:
            raise FamilyError(f"{self.model_type}: {key}={word!r} has no part here; {nearest(word, words)}")
        return words[word]

    def architecture(self, known: Iterable[str]) -> str:
        """The class that wrote the weights, which says what head they have; where none is named, the first known."""
        known = list(known)
        name = next(iter(self.each("architectures", str, [])), known[0])
        if name not in known:
            raise FamilyError(f"{self.model_type}: architectures={name!r} has no head here; {nearest(name, known)}")
        return name

    def labels(self) -> int:
        """How many labels a classifier has: those that are named, or their number; two, where neither is said."""
        return len(self.table("id2label").values) or self.integer("num_labels", 2)

    def only(self, key: str, allowed: Any) -> None:
        """Refuse a setting whose other values no part can express."""
        found = self.values.get(key)
        if found is not None and found != allowed:
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} has no part here; only {allowed!r} is read")

    def real(self, key: str, found: Any) -> float:
        if type(found) not in (int, float) or not abs(found) < 1e300:  # a whole number may be past all floats
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} should be a finite number")
        return float(found)

    def value(self, key: str, types: tuple[type, ...], default: Any) -> Any:
        found = self.values.get(key)
        if found is None:
            found = default
        if found is REQUIRED:
            raise FamilyError(f"{self.model_type}: the config has no {key!r}")
        if type(found) not in types:
            names = " or ".join(t.__name__ for t in types)
            raise FamilyError(f"{self.model_type}: {key}={found!r:.80} should be {names}")
        return found
