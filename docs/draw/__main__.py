"""Draw the figures of the documentation from the parts themselves: `python docs/draw [name …]` writes docs/pictures."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attention import caches, masks, pages, patterns, scales
from models import crossover, depth, filters, routing, schedules
from positions import distances, scalings, sinusoids
from state_space import history

FOLDER = Path(__file__).parent.parent / "pictures"
PICTURES: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        masks, patterns, sinusoids, distances, scalings, scales, caches, routing, depth, schedules, pages, filters,
        crossover, history,
    )
}  # fmt: skip


def draw(names: Iterable[str], folder: Path) -> None:
    for name in names:
        figure = PICTURES[name]()
        figure.savefig(folder / f"{name}.png", metadata={"Software": None}, pil_kwargs={"optimize": True})
        figure.clear()


if __name__ == "__main__":
    draw(sys.argv[1:] or PICTURES, FOLDER)
