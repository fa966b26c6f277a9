"""JSON on standard output. It has neither NaN nor infinity: those of a model with broken weights become null."""

import json
import math
from typing import Any


def print_json(value: Any) -> None:
    try:
        print(json.dumps(value, allow_nan=False))
    except ValueError:
        print(json.dumps(finite(value)))


def finite(value: Any) -> Any:
    """Nested lists and dictionaries with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
