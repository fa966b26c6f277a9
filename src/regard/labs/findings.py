"""What a lab found: the numbers, curves to draw, and checks that together are its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Point = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """One thing that the claim says would be seen, with what was seen."""

    expected: str
    seen: str
    holds: bool


@dataclass(frozen=True)
class Plot:
    """One panel: lines of points by name; or bars, where each x is the number of a name in `groups`."""

    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    title: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    groups: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    table: Sequence[Mapping[str, Any]]  # rows of named numbers; all have the same names
    checks: Sequence[Check]
    plots: Sequence[Plot]
    remark: str = ""  # what a reader should know before believing it

    def __post_init__(self) -> None:
        assert self.table and self.checks and self.plots, "a lab shows numbers, checks and a plot"

    @property
    def verdict(self) -> str:
        held = sum(check.holds for check in self.checks)
        if held == len(self.checks):
            return "the claim holds here"
        return "the claim does not hold here" if held == 0 else f"the claim holds in part: {held} of {len(self.checks)}"
