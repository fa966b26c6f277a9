"""Tiny configs of `transformers`, a file a group: name -> (class, settings of its config)."""

from typing import Any

import pytest

VOCAB = 97
WIDE = {"initializer_range": 0.2}  # attention far from uniform, greedy choices far from ties
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

Cases = dict[str, tuple[str, dict[str, Any]]]


def params(cases: Cases) -> list[Any]:
    """One case of every class in the quick tests, the others in the thorough ones."""
    first = {model: name for name, (model, _) in reversed(cases.items())}
    return [
        pytest.param(case, id=name, marks=() if first[case[0]] == name else pytest.mark.slow)
        for name, case in cases.items()
    ]
