"""The metrics of a run as curves that a screen can show, read from where the last reading ended.

A long curve is divided into buckets of consecutive points; each keeps its mean, minimum and maximum, at its last step,
so that neither spikes nor the trend are lost.

A cursor "OFFSET-STEP" names the end of the last line that was read. A resumed run removes the lines after its
checkpoint, so if the line that ends at OFFSET is not one of STEP, the log is read from its beginning.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from regard.training.history import parse_line

MAX_COLUMNS = 64
LINE_WINDOW = 1 << 16  # bytes before a cursor that are searched for its line


@dataclass
class MetricCurve:
    """Points of one column. low, high: None if every bucket has one point."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] | None = None
    high: list[float] | None = None

    def downsampled(self, max_points: int) -> "MetricCurve":
        count = len(self.steps)
        if count <= max_points:
            return MetricCurve(self.steps, [rounded(value) for value in self.values])
        values = np.asarray(self.values, np.float64)
        starts = np.arange(max_points) * count // max_points
        ends = np.append(starts[1:], count)
        with np.errstate(over="ignore"):
            means = np.add.reduceat(values / (ends - starts).repeat(ends - starts), starts)
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        columns = (list(map(rounded, column.tolist())) for column in (means, low, high))
        return MetricCurve([self.steps[end - 1] for end in ends], *columns)


@dataclass(frozen=True)
class NewMetrics:
    """What was appended to a log. restarted: the log was read from its beginning, so earlier points are obsolete."""

    cursor: str
    restarted: bool
    curves: dict[str, MetricCurve]


def read_metrics(
    file: Path, cursor: str | None = None, columns: Collection[str] | None = None, max_points: int = 1000
) -> NewMetrics:
    """The curves of a metrics.jsonl after a cursor. columns: None: all. Damaged lines are skipped."""
    offset, step = parse_cursor(cursor)
    curves: dict[str, MetricCurve] = {}
    if not file.is_file():
        return NewMetrics("0-0", True, {})
    with file.open("rb") as stream:
        if restarted := not (offset and line_ends_here(stream, offset, step)):
            offset = step = 0
        stream.seek(offset)
        for line in stream:
            if not line.endswith(b"\n"):  # not written completely yet
                break
            offset += len(line)
            record = parse_line(line)
            if record is not None:
                step = record.pop("step")
                add_record(curves, step, record, columns)
    shown = {name: curve.downsampled(max_points) for name, curve in curves.items()}
    return NewMetrics(f"{offset}-{step}", restarted, shown)


def add_record(
    curves: dict[str, MetricCurve], step: int, record: dict[str, float], columns: Collection[str] | None
) -> None:
    for name, value in record.items():
        if columns is not None and name not in columns or name not in curves and len(curves) >= MAX_COLUMNS:
            continue
        curve = curves.setdefault(name, MetricCurve())
        curve.steps.append(step)
        curve.values.append(float(value))


def parse_cursor(cursor: str | None) -> tuple[int, int]:
    """(0, 0), the beginning, for a cursor that is none."""
    offset, _, step = (cursor or "").partition("-")
    valid = all(part.isascii() and part.isdigit() and len(part) <= 18 for part in (offset, step))
    return (int(offset), int(step)) if valid else (0, 0)


def line_ends_here(stream: IO[bytes], offset: int, step: int) -> bool:
    """Whether the last undamaged line before this offset ends there and is of this step."""
    stream.seek(0, 2)
    if offset > stream.tell():
        return False
    start = max(0, offset - LINE_WINDOW)
    stream.seek(start)
    lines = stream.read(offset - start).splitlines(keepends=True)
    if not lines or not lines[-1].endswith(b"\n"):
        return False
    record = next((record for line in reversed(lines) if (record := parse_line(line)) is not None), None)
    return record is not None and record["step"] == step


def rounded(value: float) -> float:
    """Six significant digits: more than a screen shows, and shorter to send."""
    return float(f"{value:.6g}")


def read_samples(file: Path, max_samples: int = 200, max_bytes: int = 4 << 20) -> list[tuple[int, str]]:
    """(step, text) of a samples.txt, as log.py writes it; of many, the last and others at equal distances.

    max_bytes: of the end of the file that is read.
    """
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - max_bytes))
        text = stream.read(max_bytes).decode("utf-8", "replace")
    samples: list[tuple[int, list[str]]] = []
    for line in text.split("\n"):
        word, _, number = line.partition(" ")
        if word == "step" and number.isascii() and number.isdigit() and len(number) <= 18:
            samples.append((int(number), []))
        elif samples and (line.startswith("    ") or not line):
            samples[-1][1].append(line[4:])
    found = [(step, "\n".join(lines).rstrip("\n")) for step, lines in samples]
    if len(found) <= max_samples:
        return found
    return [found[(i + 1) * len(found) // max_samples - 1] for i in range(max_samples)]
