"""The outcome of a law in one dtype, and the verdict over float64 and float32.

An outcome is the largest difference, an expected refusal, or the reason why the law does not apply. Differences are
max|Δ| / max(1, max|expected|). In float64 rounding is far smaller than any real difference, so the tolerance is tight;
float32 is the dtype in which models run. A model that amplifies rounding (a stack without norms) does so in float64
too; in float32 it may differ by as many units of rounding.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SAME_ROUNDING = 16 * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps


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


def not_applicable(reason: str) -> Outcome:
    return Outcome("not applicable", reason)


def difference(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max(1, max|expected|), infinite if a value is NaN."""
    if found.shape != expected.shape:
        return float("inf")
    error = ((found - expected).abs().amax() / expected.abs().amax().clamp_min(1.0)).item() if found.numel() else 0.0
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Verdict:
    law: str
    result: Literal["pass", "refused", "not applicable", "FAIL"]
    note: str
    differences: dict[str, float]  # by dtype; empty if nothing was compared

    def to_dict(self) -> dict[str, Any]:
        finite = {dtype: value if value < float("inf") else None for dtype, value in self.differences.items()}
        return {"law": self.law, "result": self.result, "note": self.note, "differences": finite}


def within_tolerance(outcome: Outcome, dtype: torch.dtype) -> bool:
    return outcome.difference <= (0.0 if outcome.exact else TOLERANCE[dtype])


def judge(law: str, outcomes: dict[torch.dtype, Outcome], rounding: float) -> Verdict:
    """`rounding`: the largest difference of all laws that hold in float64."""
    double, single = outcomes[torch.float64], outcomes[torch.float32]
    same_rounding = single.difference <= SAME_ROUNDING * rounding and not single.exact
    failed = [] if within_tolerance(double, torch.float64) else [double]
    failed += [] if within_tolerance(single, torch.float32) or same_rounding else [single]
    reported = (failed or [double])[0]
    result = "FAIL" if failed else "pass" if reported.result == "compared" else reported.result
    differences = {name_of(dtype): o.difference for dtype, o in outcomes.items() if o.result == "compared"}
    return Verdict(law, result, reported.note, differences)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
