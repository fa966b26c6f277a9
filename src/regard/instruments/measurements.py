"""Measured results that instruments show: a mean over seeds with its range, and the files in `measured`.

`measured` has results of labs, as `regard lab` wrote them (docs/generate_labs.py copies them), and assistant.json, the
results.json of `regard pipeline assistant`. Their settings say on which machine they were measured.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "measured"
MAX_BYTES = 2_000_000  # of a file in the folder of runs; larger ones are not results
LARGEST = 1e100  # a sum of such numbers is finite, and an integer up to it is a float


class Spread(NamedTuple):
    """A mean, and the smallest and the largest value of a seed."""

    mean: float
    low: float
    high: float

    def percent(self) -> str:
        low, high = 100 * self.low, 100 * self.high
        return percent(self.mean) + (f" [{low:.1f}, {high:.1f}]" if high > low else "")

    def show(self, digits: int = 3) -> str:
        spread = f" [{self.low:.{digits}g}, {self.high:.{digits}g}]" if self.high > self.low else ""
        return f"{self.mean:.{digits}g}{spread}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def spread_of(value: Any) -> Spread:
    """Of a number, or of {"mean", "low", "high"}; ValueError for anything else."""
    parts = [value.get(name) for name in Spread._fields] if isinstance(value, dict) else [value] * 3
    if not all(isinstance(part, int | float) and not isinstance(part, bool) and abs(part) < LARGEST for part in parts):
        raise ValueError(f"{value!r:.60} is not a number below {LARGEST}, and has no mean, low and high")
    return Spread(*map(float, parts))


@cache
def measured(name: str) -> dict[str, Any] | None:
    """The results of this name that come with the package; None if there are none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def newest_files(folder: Path, name: str) -> list[Path]:
    """The files of this name in the folder's directories, the newest first; not those that a symbolic link leads to
    outside of it."""
    root, found = folder.resolve(), []
    for file in folder.glob(f"*/{name}"):
        try:
            if file.is_file() and file.resolve().parents[1] == root:
                found.append((file.stat().st_mtime, file))
        except OSError:  # it was removed
            continue
    return [file for _, file in sorted(found, reverse=True)]


def read_json(file: Path) -> Any:
    """The content of a file that another program may replace at any time; ValueError if it is too large or not JSON."""
    with file.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{file.name} has more than {MAX_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
