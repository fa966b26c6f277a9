"""The outcome of one law on one trial: the largest difference, an expected refusal, or why the law does not apply."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    result: Literal["compared", "refused", "not applicable"]
    note: str  # what was compared, or the reason
    difference: float = 0.0
    exact: bool = False  # must agree bit for bit


def compared(note: str, *differences: float, exact: bool = False) -> Outcome:
    return Outcome("compared", note, max(differences), exact)


def refused(error: ValueError) -> Outcome:
    return Outcome("refused", str(error))


def broken(note: str) -> Outcome:
    """A failure without a difference: something that must happen did not."""
    return Outcome("compared", note, float("inf"))


def not_applicable(why: str) -> Outcome:
    return Outcome("not applicable", why)


def difference(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max(1, max|expected|), infinite if a value is NaN."""
    if found.shape != expected.shape:
        return float("inf")
    error = ((found - expected).abs().amax() / expected.abs().amax().clamp_min(1.0)).item() if found.numel() else 0.0
    return error if error == error else float("inf")
