"""Every law of `regard verify` on every model of the table, in both dtypes; in float64 with every cut."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from regard.verification.laws import LAWS
from regard.verification.outcome import TOLERANCE, kept, name_of
from regard.verification.trial import Trial
from regard.verification.trials import trials
from tests.laws import MODELS, OTHERS, build

LENGTH = 12
IN_FLOAT32 = {  # quick in float32 too, and also on the oldest torch: the laws whose rounding differs most
    "cached = whole",
    "chunked = whole",
    "recurrent = parallel",
    "padded left = right = alone",
    "packed = separate",
    "paged = contiguous",
}


@cache
def made(name: str, dtype: torch.dtype) -> dict[str, Trial]:
    cuts = tuple(range(1, LENGTH)) if dtype == torch.float64 else None
    return trials(build((MODELS | OTHERS)[name], dtype), LENGTH, cuts)


def cases() -> Iterator[Any]:
    assert LAWS.keys() >= IN_FLOAT32
    for law, name, dtype in product(LAWS, [*MODELS, *OTHERS], TOLERANCE):
        single = pytest.mark.oldest if law in IN_FLOAT32 else pytest.mark.slow
        marks = [single] if dtype == torch.float32 else []
        yield pytest.param(law, name, dtype, marks=marks, id=f"{law}-{name}-{name_of(dtype)}")


@pytest.mark.parametrize(("law", "name", "dtype"), list(cases()))
def test_law(law: str, name: str, dtype: torch.dtype) -> None:
    for half, trial in made(name, dtype).items():
        with torch.inference_mode():
            outcome = LAWS[law].attempt(trial)
        assert kept(outcome, dtype), (half, outcome)
        if law == "paged = contiguous":  # of these, bit for bit
            assert outcome.difference == 0, (half, outcome)
