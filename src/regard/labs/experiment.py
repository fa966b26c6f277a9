"""The settings of an experiment (Bench), its findings, and the findings of several seeds combined into one.

A lab measures with one seed. Its findings for several seeds are combined: a number becomes its mean and its range, a
curve gets error bars from the smallest to the largest value, and a prediction holds if it holds with every seed.

full     the experiment as described; its verdict is the lab's
small    the same models and data with a quarter of the training: a preview of the verdict
quick    sizes that only show that the lab runs; the verdict is not meaningful
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Size = Literal["quick", "small", "full"]
Point = tuple[float, float]
ItemType = TypeVar("ItemType")
AmountType = TypeVar("AmountType", int, float)


class Bench:
    """The seed and the size of a run, and a progress bar."""

    def __init__(self, seed: int = 0, size: Size = "full", console: Console | None = None):
        if size not in get_args(Size):
            raise ValueError(f"size={size!r} is not a size of labs; choose one of {', '.join(get_args(Size))}")
        self.seed, self.size = seed, size
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True),
            console=console or Console(quiet=True),
        )  # fmt: skip

    def setting(self, full: ItemType, quick: ItemType) -> ItemType:
        """The size of a model or of data: the same in a full and a small run."""
        return quick if self.size == "quick" else full

    def training(self, full: AmountType, quick: AmountType) -> AmountType:
        """An amount of training in steps or seconds: in a small run a quarter of the full one, rounded down."""
        return full // 4 if self.size == "small" else self.setting(full, quick)

    def each(self, label: str, items: Iterable[ItemType]) -> Iterator[ItemType]:
        """The items one by one, with a progress bar."""
        items = list(items)
        task = self.bar.add_task(f"seed {self.seed}: {label}", total=len(items), status="")
        for item in items:
            yield item
            self.bar.advance(task)
        self.bar.stop_task(task)

    def show(self, status: str) -> None:
        """Show a status beside the newest bar."""
        self.bar.update(self.bar.task_ids[-1], status=status)


@dataclass(frozen=True)
class Check:
    """A prediction of the claim, the observation, and whether it holds; `seeds`: with how many of them, as text."""

    expected: str
    observed: str
    holds: bool
    seeds: str = ""


@dataclass(frozen=True)
class Plot:
    """One panel: a line of points per name; or bars, where x is an index into the names in `groups`.

    `ranges` has the smallest and largest value of each point over the seeds; a single run has none.
    """

    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    title: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    groups: Sequence[str] = ()
    ranges: Mapping[str, Sequence[Point]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The mean of a number over the seeds, and its smallest and largest value."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Findings:
    table: Sequence[Mapping[str, Any]]  # rows with the same keys
    checks: Sequence[Check]
    plots: Sequence[Plot]
    remark: str = ""  # limits of the experiment
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert self.table and self.checks and self.plots, "findings need a table, checks and a plot"

    @property
    def verdict(self) -> str:
        held, seeds = sum(check.holds for check in self.checks), len(self.seeds)
        with_seeds = f" with each of {seeds} seeds" if seeds > 1 else ""
        if held == len(self.checks):
            return f"the claim holds here{with_seeds}"
        if held == 0:
            return "the claim does not hold here"
        return f"the claim holds in part: {held} of {len(self.checks)} predictions{with_seeds}"


def run_seeds(experiment: Callable[[Bench], Findings], bench: Bench, seeds: int) -> Findings:
    """The combined findings of `seeds` runs, from the bench's seed on."""
    if seeds < 1:
        raise ValueError(f"seeds={seeds} is not positive; choose 1 or more")
    runs = {}
    for seed in range(bench.seed, bench.seed + seeds):
        run = copy.copy(bench)  # with the same progress bar
        run.seed = seed
        torch.manual_seed(seed)
        runs[seed] = experiment(run)
    return combine(runs)


def combine(runs: Mapping[int, Findings]) -> Findings:
    """The findings of several seeds as one. All runs must have the same rows, predictions and plots."""
    first, *_ = all_findings = list(runs.values())
    tables = zip(*(findings.table for findings in all_findings), strict=True)
    checks = zip(*(findings.checks for findings in all_findings), strict=True)
    plots = zip(*(findings.plots for findings in all_findings), strict=True)
    assert len({findings.remark for findings in all_findings}) == 1, "the remark differs between seeds"
    return Findings(
        [{key: combine_values([row[key] for row in rows]) for key in rows[0]} for rows in tables],
        [combine_checks(check_by_seed) for check_by_seed in checks],
        [combine_plots(plot_by_seed) for plot_by_seed in plots],
        first.remark,
        tuple(runs),
    )


def combine_values(values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, int | float) for value in values):
        return Measured(statistics.fmean(values), min(values), max(values))
    return ", ".join(dict.fromkeys(map(str, values)))


def combine_checks(checks: Sequence[Check]) -> Check:
    assert len({check.expected for check in checks}) == 1, f"predictions differ between seeds: {checks}"
    held = sum(check.holds for check in checks)
    observed = "; ".join(dict.fromkeys(check.observed for check in checks))
    return Check(checks[0].expected, observed, held == len(checks), f"{held} of {len(checks)}")


def combine_plots(plots: Sequence[Plot]) -> Plot:
    """Means and ranges by x. A run that ended early counts up to its end."""
    lines, ranges = {}, {}
    for name in plots[0].lines:
        values: dict[float, list[float]] = {}
        for plot in plots:
            for x, y in plot.lines[name]:
                values.setdefault(x, []).append(y)
        lines[name] = [(x, statistics.fmean(values[x])) for x in sorted(values)]
        ranges[name] = [(min(values[x]), max(values[x])) for x in sorted(values)]
    return replace(plots[0], lines=lines, ranges=ranges if len(plots) > 1 else {})
