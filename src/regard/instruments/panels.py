"""The kinds of panels that the page draws. Each is a dictionary of plain numbers and strings.

numbers    labelled values                              table      columns and rows
heatmap    a matrix with labels of rows and columns     tokens     pieces of text with a value each
lines      curves over a common axis                    diagram    nodes and edges, at positions from 0 to 1
bars       one value per label                          scatter    points in the plane, or arrows from the origin
pictures   small gray images                            equation   one of the instrument's `equations`

`sets` names the control that a click on a row, a bar, a token or a node sets, to its index; `place` the two sliders
that a click on a plane sets. Numbers other than integers are rounded to six significant digits: a panel is drawn, not
computed with.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from regard.instruments.instrument import Panel

Scale = Literal["unit", "signed", "positive"]  # 0 to 1, symmetric around 0, 0 to the largest
Number = float | None


def rounded(value: Any) -> Any:
    """Numbers in nested lists to six significant digits. They must be finite: another value is a mistake of the
    instrument, not of the controls."""
    if isinstance(value, Tensor):
        value = value.detach().double().tolist()
    if isinstance(value, float):
        assert math.isfinite(value), f"a panel has the value {value}; panels show finite numbers only"
        return value if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def numbers(items: Mapping[str, float | str], title: str = "") -> Panel:
    return {
        "kind": "numbers",
        "title": title,
        "items": [{"label": label, "value": rounded(value)} for label, value in items.items()],
    }


def equation(title: str, name: str) -> Panel:
    """name: of one of the instrument's equations"""
    return {"kind": "equation", "title": title, "name": name}


def heatmap(
    title: str,
    values: Tensor | Sequence[Sequence[Number]],
    rows: Iterable[Any],
    columns: Iterable[Any],
    scale: Scale = "unit",
    sets: str | None = None,
    selected: int | None = None,
    shows_numbers: bool = True,
) -> Panel:
    """A value of None is a blocked cell. `sets` is set by a click on a row."""
    return {
        "kind": "heatmap",
        "title": title,
        "rows": [str(row) for row in rows],
        "columns": [str(column) for column in columns],
        "values": rounded(values),
        "scale": scale,
        "sets": sets,
        "selected": selected,
        "shows_numbers": shows_numbers,
    }


def lines(
    title: str,
    series: Mapping[str, Iterable[tuple[float, ...]]],
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, float] | None = None,
    from_zero: bool = True,
    top: float | None = None,
    wide: bool = False,
) -> Panel:
    """`marks` are labelled vertical lines. On a log axis, points that are not positive are left out.

    A point (x, y, low, high) is drawn as a dot with an error bar. from_zero: the y axis includes zero. top: the end of
    the y axis; curves are cut off there. wide: the panel has the width of two.
    """
    kept = {
        name: [point for point in points if (point[0] > 0 or not log_x) and (point[1] > 0 or not log_y)]
        for name, points in series.items()
    }
    return {
        "kind": "lines",
        "title": title,
        "series": [{"name": name, "points": rounded(points)} for name, points in kept.items()],
        "from_zero": from_zero,
        "top": rounded(top),
        "wide": wide,
        "x": x,
        "y": y,
        "log_x": log_x,
        "log_y": log_y,
        "marks": [{"label": label, "x": rounded(float(at))} for label, at in (marks or {}).items()],
    }


def bars(
    title: str,
    values: Mapping[str, float] | Sequence[tuple[str, float]],
    unit: str = "",
    sets: str | None = None,
    selected: int | None = None,
    digits: int = 3,
) -> Panel:
    """Values may be negative; `digits` are the significant digits of the labels. Pairs allow equal labels."""
    pairs = list(values.items()) if isinstance(values, Mapping) else list(values)
    return {
        "kind": "bars",
        "title": title,
        "labels": [label for label, _ in pairs],
        "values": [rounded(float(value)) for _, value in pairs],
        "unit": unit,
        "sets": sets,
        "selected": selected,
        "digits": digits,
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Panel:
    return {"kind": "table", "title": title, "columns": list(columns), "rows": [rounded(list(row)) for row in rows]}


def tokens(
    title: str,
    pieces: Sequence[str],
    values: Tensor | Sequence[float],
    notes: Sequence[str] | None = None,
    sets: str | None = None,
    selected: int | None = None,
) -> Panel:
    """Pieces of text, tinted by values from 0 to 1; a note is shown below each."""
    return {
        "kind": "tokens",
        "title": title,
        "pieces": list(pieces),
        "values": rounded(values if isinstance(values, Tensor) else [float(value) for value in values]),
        "notes": list(notes) if notes is not None else [""] * len(pieces),
        "sets": sets,
        "selected": selected,
    }


def diagram(
    title: str,
    nodes: Sequence[dict[str, Any]],
    edges: Sequence[tuple[str, str, float]],
    sets: str | None = None,
    selected: int | None = None,
) -> Panel:
    """Nodes have id, label, x, y and optionally value; an edge is (from, to, weight), its width by |weight|."""
    return {
        "kind": "diagram",
        "title": title,
        "nodes": [{"value": None} | {name: rounded(value) for name, value in node.items()} for node in nodes],
        "edges": [{"from": a, "to": b, "weight": rounded(float(weight))} for a, b, weight in edges],
        "sets": sets,
        "selected": selected,
    }


def scatter(
    title: str,
    points: Sequence[tuple[float, float, str]],
    groups: Sequence[str] | None = None,
    arrows: bool = False,
    reach: float | None = None,
    widths: Sequence[tuple[float, float] | None] | None = None,
    place: tuple[str, str] | None = None,
) -> Panel:
    """Points (x, y, label), coloured by group; with `arrows`, vectors from the origin in equal scales. reach: both axes
    go from -reach to reach, so that they stay when the points move. widths: half axes of an ellipse around each point.
    place: the sliders of x and y."""
    return {
        "kind": "scatter",
        "title": title,
        "points": [
            {"x": rounded(float(a)), "y": rounded(float(b)), "label": label, "group": group}
            | ({"wide": rounded(list(wide))} if wide else {})
            for (a, b, label), group, wide in zip(
                points, groups or [""] * len(points), widths or [None] * len(points), strict=True
            )
        ],
        "arrows": arrows,
        "reach": rounded(reach),
        "place": list(place) if place else None,
    }


def pictures(title: str, images: Tensor, labels: Sequence[str] | None = None) -> Panel:
    """Gray images (N, H, W) with values from 0, black, to 1, white."""
    hundredths = (images.detach().clamp(0, 1) * 100).round().int().tolist()
    return {
        "kind": "pictures",
        "title": title,
        "images": [
            {"label": label, "values": [[value / 100 for value in row] for row in rows]}
            for rows, label in zip(hundredths, labels or [""] * len(hundredths), strict=True)
        ],
    }
