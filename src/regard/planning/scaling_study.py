"""A study of trained runs: the law, the IsoFLOP curves, and the optimal size and data for some budgets, as data."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.planning.isoflop import IsoFlops, isoflops
from regard.planning.scaling import ScalingLaw, ScalingRun, flops_6nd
from regard.planning.scaling_fit import ScalingFit, fit_law

DRAWS = 200
BUDGETS = (1.0, 10.0, 100.0)  # times the compute of the largest run
COLUMNS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class ScalingStudy:
    fit: ScalingFit
    isoflops: IsoFlops
    budgets: tuple[float, ...]  # FLOPs, counted as 6·N·D

    @property
    def exponents(self) -> dict[str, tuple[float, Any]]:
        """The exponents and their intervals by the words for them."""
        fit, iso = self.fit, self.isoflops
        numbers: dict[str, tuple[float | None, Any]] = {
            "alpha": (fit.law.size_exponent, fit.interval(lambda law: law.size_exponent)),
            "beta": (fit.law.data_exponent, fit.interval(lambda law: law.data_exponent)),
            "size_of_optimum": (fit.law.optimum_exponent, fit.interval(lambda law: law.optimum_exponent)),
            "tokens_of_optimum": (1 - fit.law.optimum_exponent, fit.interval(lambda law: 1 - law.optimum_exponent)),
            "size_of_isoflop": (iso.size_exponent, iso.size_interval),
            "tokens_of_isoflop": (iso.token_exponent, iso.token_interval),
        }
        return {name: (value, spread) for name, (value, spread) in numbers.items() if value is not None}

    def optimum(self, compute: float) -> dict[str, Any]:
        """The size, tokens and loss of the law's optimum, with intervals."""

        def at(pick: Callable[[ScalingLaw], float]) -> dict[str, Any]:
            return {"value": pick(self.fit.law), "interval": self.fit.interval(pick)}

        return {
            "compute": compute,
            "parameters": at(lambda law: law.optimum(compute)[0]),
            "tokens": at(lambda law: law.optimum(compute)[1]),
            "loss": at(lambda law: law.loss(*law.optimum(compute))),
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "law": asdict(self.fit.law),
            "exponents": {name: {"value": v, "interval": spread} for name, (v, spread) in self.exponents.items()},
            "relative_error": self.fit.error,
            "isoflop_curves": [asdict(found) for found in self.isoflops.curves],
            "optima": [self.optimum(budget) for budget in self.budgets],
        }


def study(
    runs: Sequence[ScalingRun],
    budgets: Sequence[float] = (),
    draws: int = DRAWS,
) -> ScalingStudy:
    """budgets: FLOPs; by default the largest run's, 10 times and 100 times as many."""
    fit = fit_law(runs, draws)
    largest = max(flops_6nd(run.parameters, run.tokens) for run in runs)
    return ScalingStudy(
        fit, isoflops(runs, fit, draws), tuple(budgets) or tuple(largest * factor for factor in BUDGETS)
    )


def read_runs(file: Path) -> list[ScalingRun]:
    """The runs of a JSON file (a list, or an object with `runs`) or a CSV file with the columns `parameters`, `tokens`,
    `loss`, and optionally `flops`."""
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".csv":
        rows: Any = list(csv.DictReader(text.splitlines()))
    else:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not JSON: {error}; a table of results has the suffix .csv") from None
        rows = data.get("runs") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{file} has no runs; give a list of objects with {', '.join(COLUMNS)}, or a CSV file")
    return [read_run(file, number, row) for number, row in enumerate(rows, 1)]


def read_run(file: Path, number: int, row: Mapping[str, Any]) -> ScalingRun:
    for name in COLUMNS:
        if row.get(name) in (None, ""):
            raise ValueError(f"{file}: run {number} has no {name}; every run has {', '.join(COLUMNS)}")
    try:
        if any(isinstance(row.get(name), bool) for name in (*COLUMNS, "flops")):
            raise TypeError  # float(True) is 1.0
        parameters, tokens, loss = (float(row[name]) for name in COLUMNS)
        flops = float(row["flops"]) if row.get("flops") not in (None, "") else flops_6nd(parameters, tokens)
    except (TypeError, ValueError, OverflowError):
        values = ", ".join(f"{name}={row.get(name)!r:.40}" for name in (*COLUMNS, "flops"))
        raise ValueError(f"{file}: run {number} has {values}; they must be finite numbers") from None
    return ScalingRun(parameters, tokens, loss, flops)
