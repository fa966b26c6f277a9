"""The findings of a lab: a table of numbers, curves to draw, and the checks that determine its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Point = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """A prediction of the claim, the observation, and whether the prediction holds."""

    expected: str
    observed: str
    holds: bool


@dataclass(frozen=True)
class Plot:
    """One panel: a line of points per name; or bars, where x is an index into the names in `groups`."""

    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    title: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    groups: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    table: Sequence[Mapping[str, Any]]  # rows with the same keys
    checks: Sequence[Check]
    plots: Sequence[Plot]
    remark: str = ""  # limits of the experiment

    def __post_init__(self) -> None:
        assert self.table and self.checks and self.plots, "findings need a table, checks and a plot"

    @property
    def verdict(self) -> str:
        held = sum(check.holds for check in self.checks)
        if held == len(self.checks):
            return "the claim holds here"
        return "the claim does not hold here" if held == 0 else f"the claim holds in part: {held} of {len(self.checks)}"
