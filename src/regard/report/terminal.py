"""A loss curve as lines of text: braille dots for the training loss, filled circles for the held-out loss.

A braille character is a grid of 2 × 4 dots (Unicode block U+2800), so a plot of 64 × 12 characters has 128 × 48 dots.
The vertical axis is logarithmic if the largest loss is many times the smallest.
"""

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of the rows and columns of a braille character
LOG_RATIO = 10


def text_plot(curve: Points, markers: Points = (), width: int = 64, height: int = 12) -> list[str]:
    """The lines of a plot of (x, y) points, with the range of y on the left and that of x below; none without points.

    curve: points that are drawn as dots and joined. markers: points that are drawn as circles.
    """
    points = [*curve, *markers]
    if not points:
        return []
    ys = [y for _, y in points]
    log = min(ys) > 0 and max(ys) > LOG_RATIO * min(ys)
    axis = Axis([x for x, _ in points], [math.log(y) if log else y for y in ys], 2 * width - 1, 4 * height - 1)
    cells = [[0] * width for _ in range(height)]
    for column, row in joined([axis.place(x, math.log(y) if log else y) for x, y in curve]):
        cells[row // 4][column // 2] |= DOT_BITS[row % 4][column % 2]
    lines = [[chr(0x2800 + bits) if bits else " " for bits in row] for row in cells]
    for x, y in markers:
        column, row = axis.place(x, math.log(y) if log else y)
        lines[row // 4][column // 2] = "●"
    labels = {0: f"{max(ys):.4g}", height - 1: f"{min(ys):.4g}"}
    margin = max(map(len, labels.values()))
    rows = [f"{labels.get(i, ''):>{margin}} │{''.join(line).rstrip()}" for i, line in enumerate(lines)]
    left, right = f"{axis.low_x:,.0f}", f"{axis.high_x:,.0f}"
    return [*rows, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {left}{right:>{width - len(left)}}"]


class Axis:
    """Maps points to dots."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], columns: int, rows: int):
        self.low_x, self.high_x, self.low_y, self.high_y = min(xs), max(xs), min(ys), max(ys)
        self.columns, self.rows = columns, rows

    def place(self, x: float, y: float) -> tuple[int, int]:
        """(column, row) of a point; row 0 is the top."""
        right = (x - self.low_x) / (self.high_x - self.low_x or 1)
        up = (y - self.low_y) / (self.high_y - self.low_y or 1)
        return round(right * self.columns), round((1 - up) * self.rows)


def joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dots, and those of the vertical line between neighbours, so that a steep curve has no gaps."""
    filled = list(dots[:1])
    for (_, row), (next_column, next_row) in zip(dots, dots[1:], strict=False):
        step = 1 if next_row >= row else -1
        filled += [(next_column, between) for between in range(row, next_row + step, step)]
    return filled
