"""Points in the plane from simple densities with several modes, on which a generative model can be seen to succeed.

    ring     Gaussians on a circle of radius 2            grid     Gaussians on a square grid from -2 to 2
    moons    two interleaved half circles                 spiral   two arms

An example has a `point` of two numbers, and the number of its mode as `label`.
"""

from dataclasses import dataclass
from math import isqrt, pi
from typing import Literal

import numpy as np

from regard.data.sources.base import DataSource, Example, Generated, Splits
from regard.spec import require

RADIUS = 2.0


@dataclass(frozen=True)
class PlanePoints(DataSource):
    density: Literal["ring", "grid", "moons", "spiral"] = "ring"
    modes: int = 8  # Gaussians; of a grid a square number. Moons and spirals have two arms
    noise: float = 0.05  # standard deviation around a mode or an arm

    def check(self) -> None:
        super().check()
        require(self.modes > 0, f"points: modes={self.modes} must be positive")
        require(self.noise >= 0, f"points: noise={self.noise} must not be negative")
        side = isqrt(self.modes)
        require(
            self.density != "grid" or side * side == self.modes > 1,
            f"points: a grid of modes={self.modes} is not a square; choose 4, 9, 16 or 25",
        )

    def centers(self) -> np.ndarray:
        """The means of the Gaussians of a ring or grid (modes, 2)."""
        if self.density == "ring":
            angles = 2 * pi * np.arange(self.modes) / self.modes
            return RADIUS * np.stack([np.cos(angles), np.sin(angles)], 1)
        line = np.linspace(-RADIUS, RADIUS, isqrt(self.modes))
        return np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        def generated(split: str, number: int) -> Generated:
            name = f"points {self.density} {self.modes} noise {self.noise}, {split}, seed {seed}"
            return Generated(name, lambda index: self.draw(np.random.default_rng((seed, number, index))))

        return Splits(generated("train", 0), generated("held-out", 1) if hold_out else None)

    def draw(self, rng: np.random.Generator) -> Example:
        if self.density in ("ring", "grid"):
            mode = int(rng.integers(self.modes))
            mean = self.centers()[mode]
        else:
            mode, place = int(rng.integers(2)), rng.random()
            mean = (moon if self.density == "moons" else arm)(mode, place)
        return {"point": mean + self.noise * rng.standard_normal(2), "label": mode}


def moon(number: int, place: float) -> np.ndarray:
    """A place from 0 to 1 on the upper half circle, or on the lower one, which begins inside of it."""
    circle = np.array([np.cos(pi * place), np.sin(pi * place)])
    return circle - [0.5, 0.25] if number == 0 else [0.5, 0.25] - circle


def arm(number: int, place: float) -> np.ndarray:
    """A place from 0 to 1 on one of two arms around the origin, one and a half turns each."""
    angle, radius = 3 * pi * place, RADIUS * (0.1 + 0.9 * place)
    return (1 - 2 * number) * radius * np.array([np.cos(angle), np.sin(angle)])
