"""The densities of points: deterministic, split, and with the modes that they name."""

import numpy as np
import pytest

from regard.data.sources.base import Examples
from regard.data.sources.points import PlanePoints


def drawn(examples: Examples | None, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    assert examples is not None
    chosen = [examples.example(index) for index in range(count)]
    return np.array([example["point"] for example in chosen]), np.array([example["label"] for example in chosen])


@pytest.mark.parametrize(("density", "modes"), [("ring", 8), ("grid", 9), ("grid", 4)])
def test_points_are_near_the_center_of_their_mode(density: str, modes: int) -> None:
    source = PlanePoints(density=density, modes=modes, noise=0.1)
    points, labels = drawn(source.open().train)
    distances = np.linalg.norm(points - source.centers()[labels], axis=1)
    assert distances.max() < 0.5 and abs(distances.mean() - 0.1 * np.sqrt(np.pi / 2)) < 0.01
    assert np.bincount(labels).min() > 0.5 * 400 / modes and len(source.centers()) == modes
    assert np.abs(np.linalg.norm(source.centers(), axis=1).max() - (2 if density == "ring" else 8**0.5)) < 1e-12


@pytest.mark.parametrize("density", ["moons", "spiral"])
def test_the_two_arms_do_not_meet(density: str) -> None:
    points, labels = drawn(PlanePoints(density=density, noise=0.0).open().train)
    first, second = points[labels == 0], points[labels == 1]
    assert min(len(first), len(second)) > 150
    assert np.linalg.norm(first[:, None] - second[None], axis=2).min() > 0.25


def test_an_example_follows_from_its_index_and_seed() -> None:
    train, held_out = PlanePoints().open()
    assert np.array_equal(drawn(train)[0], drawn(PlanePoints().open().train)[0])
    other = PlanePoints().open(seed=1).train
    assert train.name != other.name and not np.array_equal(drawn(train)[0], drawn(other)[0])
    assert not np.array_equal(drawn(train)[0], drawn(held_out)[0])
    assert train.count is None and PlanePoints().open(hold_out=False).held_out is None
