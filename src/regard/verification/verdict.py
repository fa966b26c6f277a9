"""Run all laws on a model, in float64 and in float32, with one verdict per law.

In float64 rounding is far smaller than any real difference, so the tolerance is tight; float32 tests the dtype that is
used. Differences are max|Δ| / max(1, max|expected|). A model that amplifies rounding (a stack without norms) does so in
float64 too, and is allowed as many units of rounding in float32.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from regard.verification.laws import LAWS
from regard.verification.length import LEAST
from regard.verification.outcome import Outcome, broken
from regard.verification.trial import Trial
from regard.verification.trials import trials

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SAME_ROUNDING = 16 * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Verdict:
    law: str
    result: Literal["pass", "refused", "not applicable", "FAIL"]
    note: str
    differences: dict[str, float]  # by dtype; empty if nothing was compared

    def to_dict(self) -> dict[str, Any]:
        finite = {dtype: value if value < float("inf") else None for dtype, value in self.differences.items()}
        return {"law": self.law, "result": self.result, "note": self.note, "differences": finite}


def verify(
    model: nn.Module, length: int = LEAST, seed: int = 0, on_law: Callable[[str, str], None] = lambda law, dtype: None
) -> list[Verdict]:
    """A verdict per law; `on_law(law, dtype)` is called before each. The model is not changed."""
    outcomes: dict[tuple[str, str], dict[torch.dtype, Outcome]] = {}
    for dtype in TOLERANCE:
        copy = deepcopy(model).to(dtype).eval().requires_grad_(False)
        for part, trial in trials(copy, length, seed=seed).items():
            for law in LAWS:
                on_law(law, name_of(dtype))
                outcomes.setdefault((part, law), {})[dtype] = attempt(law, trial)
    tight = [found[torch.float64] for found in outcomes.values()]
    rounding = max((outcome.difference for outcome in tight if kept(outcome, torch.float64)), default=0.0)
    return [judge(f"{part}: {law}" if part else law, found, rounding) for (part, law), found in outcomes.items()]


def count(model: nn.Module) -> int:
    """How often `verify` calls `on_law`."""
    return len(TOLERANCE) * len(LAWS) * len(trials(model, LEAST))


@torch.inference_mode()
def attempt(law: str, trial: Trial) -> Outcome:
    """The outcome of one law. An error of the model is a failure, with its message."""
    try:
        return LAWS[law].attempt(trial)
    except (ValueError, RuntimeError, IndexError) as error:
        return broken(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def kept(outcome: Outcome, dtype: torch.dtype) -> bool:
    return outcome.difference <= (0.0 if outcome.exact else TOLERANCE[dtype])


def judge(law: str, outcomes: dict[torch.dtype, Outcome], rounding: float) -> Verdict:
    """`rounding`: the largest difference of all laws that hold in float64."""
    tight, loose = outcomes[torch.float64], outcomes[torch.float32]
    magnified = loose.difference <= SAME_ROUNDING * rounding and not loose.exact
    failed = [] if kept(tight, torch.float64) else [tight]
    failed += [] if kept(loose, torch.float32) or magnified else [loose]
    shown = (failed or [tight])[0]
    result = "FAIL" if failed else "pass" if shown.result == "compared" else shown.result
    compared = {name_of(dtype): o.difference for dtype, o in outcomes.items() if o.result == "compared"}
    return Verdict(law, result, shown.note, compared)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
