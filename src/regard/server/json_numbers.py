"""Numbers for JSON, which has neither NaN nor infinity: they become null, as a model with broken weights has them."""

import math
from typing import Any

from torch import Tensor


def rounded(value: Any, digits: int) -> Any:
    """A number, a tensor as nested lists, or a dictionary with such values."""
    if isinstance(value, Tensor):
        if value.isfinite().all():
            return value.double().round(decimals=digits).tolist()
        value = value.tolist()
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else None
    return value
