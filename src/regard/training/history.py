"""The history of a run, read from its metrics.jsonl: the loss curve, evaluations and speed.

The log is streamed, so it may be of any size. A curve keeps at most 2 · `max_points` points, each the mean of equally
many consecutive steps. Damaged lines are counted and skipped. The module does not import torch.
"""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RATE_STEPS = 100  # the speed is that of the last steps


@dataclass(frozen=True)
class CurvePoint:
    """The loss at a step; `tokens` is the number of training tokens so far."""

    step: int
    tokens: int
    loss: float


@dataclass
class History:
    """The log of a run. `points` is the training loss, `evaluations` the held-out loss."""

    points: list[CurvePoint] = field(default_factory=list)
    evaluations: list[CurvePoint] = field(default_factory=list)
    step: int = 0
    tokens: int = 0
    loss: float | None = None  # of the last step
    tokens_per_second: float | None = None
    damaged_lines: int = 0

    @property
    def best(self) -> CurvePoint | None:
        return min(self.evaluations, key=lambda point: point.loss, default=None)


class Curve:
    """Points of bounded number: when the list is full, neighbours are merged into their mean."""

    def __init__(self, max_points: int):
        self.max_points, self.size = max_points, 1  # size: steps per point
        self.points: list[CurvePoint] = []
        self.pending: list[CurvePoint] = []

    def add(self, point: CurvePoint) -> None:
        self.pending.append(point)
        if len(self.pending) == self.size:
            self.flush()
        if len(self.points) >= 2 * self.max_points:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [mean_point(pair) for pair in pairs]
            self.size *= 2

    def flush(self) -> list[CurvePoint]:
        if self.pending:
            self.points.append(mean_point(self.pending))
            self.pending = []
        return self.points


def mean_point(points: Iterable[CurvePoint]) -> CurvePoint:
    """The mean loss, at the last step."""
    points = list(points)
    return CurvePoint(points[-1].step, points[-1].tokens, sum(point.loss for point in points) / len(points))


def read_history(file: Path, max_points: int = 1000) -> History:
    """Read a metrics.jsonl. max_points=0: no curve, so that only evaluations and the last steps are parsed."""
    history, curve, last_lines = History(), Curve(max_points), deque(maxlen=RATE_STEPS)
    previous, tokens = b"", 0
    for line in complete_lines(file):
        evaluation = b'"held_out_' in line
        if evaluation or max_points:
            record = parse_line(line)
            if record is None:
                history.damaged_lines += 1
                continue
            if "tokens" in record:
                tokens = record["tokens"]
            elif not max_points:
                tokens = (parse_line(previous) or {}).get("tokens", tokens)
            if (loss := record.get("held_out_loss")) is not None:
                history.evaluations.append(CurvePoint(record["step"], tokens, loss))
            elif max_points and (loss := record.get("loss")) is not None:
                curve.add(CurvePoint(record["step"], tokens, loss))
        elif not (line.startswith(b"{") and line.endswith(b"}\n")):
            history.damaged_lines += 1
            continue
        if not evaluation:
            last_lines.append(line)
            previous = line
    history.points = curve.flush()
    read_last_steps(history, [record for line in last_lines if (record := parse_line(line)) is not None])
    return history


def read_last_steps(history: History, records: list[dict[str, Any]]) -> None:
    """Set the last step, its loss, and the mean speed of these steps."""
    if not records:
        return
    last = records[-1]
    history.step, history.tokens = last["step"], last.get("tokens", 0)
    history.loss = next((record["loss"] for record in reversed(records) if record.get("loss") is not None), None)
    timed = [(record["seconds"], record["tokens_per_second"]) for record in records if has_speed(record)]
    seconds = sum(second for second, _ in timed)
    if seconds > 0:
        history.tokens_per_second = sum(second * rate for second, rate in timed) / seconds


def has_speed(record: Mapping[str, Any]) -> bool:
    return record.get("seconds") is not None and record.get("tokens_per_second") is not None


def complete_lines(file: Path) -> Iterator[bytes]:
    """The lines that end with a newline; the last line of a run in progress may not be complete."""
    if file.is_file():
        with file.open("rb") as stream:
            yield from (line for line in stream if line.endswith(b"\n") and line.strip())


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The finite numbers of a line of metrics; None if the line is damaged or has no step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    numbers = {name: value for name, value in record.items() if is_number(value)}
    return numbers if isinstance(numbers.get("step"), int) else None


def is_number(value: object) -> bool:
    """Whether a value is finite as a float; JSON may have integers that are larger than any float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
