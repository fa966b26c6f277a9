"""Every law of `regard verify` on every model of the table, in both dtypes; float64 tests every split of a sequence."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from regard.verification.laws import LAWS
from regard.verification.outcome import TOLERANCE, name_of, within_tolerance
from regard.verification.trial import Trial
from regard.verification.trials import trials
from tests.laws import MODELS, OTHERS, build

LENGTH = 12
QUICK_IN_FLOAT32 = {  # not marked slow in float32, and run with the oldest torch: their rounding differs most
    "cached = whole",
    "chunked = whole",
    "recurrent = parallel",
    "padded left = right = alone",
    "packed = separate",
    "paged = contiguous",
}


@cache
def cached_trials(name: str, dtype: torch.dtype) -> dict[str, Trial]:
    cuts = tuple(range(1, LENGTH)) if dtype == torch.float64 else None
    return trials(build((MODELS | OTHERS)[name], dtype), LENGTH, cuts)


def law_cases() -> Iterator[Any]:
    assert LAWS.keys() >= QUICK_IN_FLOAT32
    for law, name, dtype in product(LAWS, [*MODELS, *OTHERS], TOLERANCE):
        mark = pytest.mark.oldest if law in QUICK_IN_FLOAT32 else pytest.mark.slow
        marks = [mark] if dtype == torch.float32 else []
        yield pytest.param(law, name, dtype, marks=marks, id=f"{law}-{name}-{name_of(dtype)}")


@pytest.mark.parametrize(("law", "name", "dtype"), list(law_cases()))
def test_every_law_holds_for_every_model(law: str, name: str, dtype: torch.dtype) -> None:
    for part, trial in cached_trials(name, dtype).items():
        with torch.inference_mode():
            outcome = LAWS[law].attempt(trial)
        assert within_tolerance(outcome, dtype), (part, outcome)
        if law == "paged = contiguous":  # bit-identical
            assert outcome.difference == 0, (part, outcome)
