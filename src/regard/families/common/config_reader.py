"""Reading a Hugging Face config: every value is checked for its type, and errors name the key of a setting."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from regard.parts.feedforward import Activation
from regard.spec import suggest_name

REQUIRED: Any = object()
MAX_LAYERS = 10_000  # families may iterate over the layers before the sizes of the files are known
FieldType = TypeVar("FieldType")

ACTIVATION_NAMES: dict[Activation, str] = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "identity": "linear",
}
LEGACY_ACTIVATION_NAMES: dict[Activation, str] = ACTIVATION_NAMES | {"gelu_tanh": "gelu_new"}  # in GPT-2, BERT, Phi
ACTIVATIONS: dict[str, Activation] = {name: activation for activation, name in ACTIVATION_NAMES.items()} | {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}


class FamilyError(ValueError):
    """A config that our parts cannot express, or a spec that a foreign class cannot.

    `differences` counts the fields in which such a spec differs from the nearest one that the class can express.
    """

    differences: float = math.inf


class Config:
    """A foreign config.json. A default is the value that the foreign class takes if the key is absent or null."""

    def __init__(self, model_type: str, values: Mapping[str, Any]):
        self.model_type, self.values = model_type, values

    def error(self, key: str, value: Any, rule: str) -> FamilyError:
        return FamilyError(f"{self.model_type}: {key}={value!r:.80} {rule}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        found = self.value(key, (int,), default)
        if "layer" in key and found > MAX_LAYERS:
            raise self.error(key, found, f"must be at most {MAX_LAYERS}")
        return found

    def integer_or_none(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: Any = REQUIRED) -> float:
        return self.finite(key, self.value(key, (int, float), default))

    def number_or_none(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def positive(self, key: str, default: Any = REQUIRED) -> float:
        found = self.number(key, default)
        if not found > 0:
            raise self.error(key, found, "must be positive")
        return found

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self.finite(key, entry) for entry in self.value(key, (list, tuple), REQUIRED))

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        return self.value(key, (bool,), default)

    def list_of(self, kind: type[FieldType], key: str, default: Any = REQUIRED) -> tuple[FieldType, ...]:
        found = self.value(key, (list, tuple), default)
        if len(found) > MAX_LAYERS:
            raise FamilyError(f"{self.model_type}: {key} has {len(found)} entries, but may have at most {MAX_LAYERS}")
        if not all(type(entry) is kind for entry in found):
            raise self.error(key, found, f"must be a list of {kind.__name__}")
        return tuple(found)

    def nested(self, key: str) -> "Config":
        """A config inside the config; an absent one is empty."""
        return Config(f"{self.model_type}: {key}", self.value(key, (dict,), {}))

    def choice(self, key: str, options: Mapping[str, FieldType], default: Any = REQUIRED) -> FieldType:
        """The entry of `options` for the string at this key."""
        name = self.value(key, (str,), default)
        if name not in options:
            raise self.error(key, name, f"is not supported; {suggest_name(name, options)}")
        return options[name]

    def activation(self, key: str, default: Any = REQUIRED) -> Activation:
        return self.choice(key, ACTIVATIONS, default)

    def architecture(self, supported: Iterable[str]) -> str:
        """The class that wrote the weights, which determines their head; the first supported one if none is named."""
        supported = list(supported)
        name = next(iter(self.list_of(str, "architectures", [])), supported[0])
        if name not in supported:
            raise self.error("architectures", name, f"is not supported; choose one of {', '.join(supported)}")
        return name

    def num_labels(self) -> int:
        """The number of labels of a classifier: the size of `id2label`, or else `num_labels`, which defaults to 2."""
        return len(self.nested("id2label").values) or self.integer("num_labels", 2)

    def label_names(self) -> tuple[str, ...]:
        """The names of a classifier's labels, by number; empty if they are the default ones, LABEL_0, LABEL_1 …"""
        names = {str(number): str(name) for number, name in self.nested("id2label").values.items()}
        numbers = [str(n) for n in range(len(names))]
        if names.keys() != {*numbers}:
            raise self.error("id2label", names, f"must have the keys 0 to {len(names) - 1}; renumber the labels")
        default = all(names[number] == f"LABEL_{number}" for number in numbers)
        return () if default else tuple(names[number] for number in numbers)

    def accept_only(self, key: str, supported: Any) -> None:
        """Raise FamilyError if the setting has another value; it may be absent."""
        found = self.values.get(key)
        if found is not None and found != supported:
            raise self.error(key, found, f"is not supported, only {supported!r} is")

    def finite(self, key: str, found: Any) -> float:
        if type(found) not in (int, float) or not abs(found) < 1e300:  # an integer may exceed every float
            raise self.error(key, found, "must be a finite number")
        return float(found)

    def value(self, key: str, types: tuple[type, ...], default: Any) -> Any:
        found = self.values.get(key)
        if found is None:
            found = default
        if found is REQUIRED:
            raise FamilyError(f"{self.model_type}: the config has no {key!r}; add it to config.json")
        if type(found) not in types:
            raise self.error(key, found, f"must be {' or '.join(t.__name__ for t in types)}")
        return found
