"""The numbers of the figures of GANs, as the instruments show them."""

import math

import pytest
import torch
from torch.distributions import Normal

from regard.instruments.adversarial import EVERY, GRID, RECORDS, AdversarialGame, Density, jensen_shannon
from tests.instruments.test_figures import panel, shown

BEST, GAME = "best-discriminator", "adversarial-training"


def curve(id: str, index: int, series: int = 0, /, **controls) -> dict[float, float]:
    return dict(panel(id, "lines", index, **controls)["series"][series]["points"])


@pytest.mark.ledger("fig.5.34")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_discriminator_falls_from_more_than_95_percent_to_a_coin(seed: int) -> None:
    controls = {"density": "one blob", "ticks": RECORDS, "seed": seed}
    accuracy = curve(GAME, 0, **controls)
    assert list(accuracy) == [EVERY * i for i in range(RECORDS + 1)]
    assert accuracy[40] > 0.95 and sum(list(accuracy.values())[-10:]) / 10 == pytest.approx(0.5, abs=0.12)
    assert list(curve(GAME, 1, **controls).values())[-1] == pytest.approx(-math.log(4), abs=0.15)
    assert shown(GAME, **controls)["share of samples near a mode"] > 0.9


@pytest.mark.ledger("fig.5.34")
def test_one_network_is_trained_and_the_other_frozen() -> None:
    values = {}
    for phase in ("discriminator", "generator"):
        drawn = panel(GAME, "diagram", phase=phase, ticks=4)
        values[phase] = {node["id"]: node["value"] for node in drawn["nodes"]}
        assert ("real", "D") in {(e["from"], e["to"]) for e in drawn["edges"]} or phase == "generator"
    assert values["discriminator"]["G"] == values["generator"]["D"] == 0
    assert values["discriminator"]["D"] > 0 and values["generator"]["G"] > 0
    assert values["generator"]["fake"] < 0.2 < 0.8 < values["generator"]["real"], "D alone was trained"
    game = AdversarialGame("two blobs", "saturating", 2 * EVERY, 3)
    states = []
    for count in range(4):
        game.until(count)
        states.append({name: value.clone() for name, value in game.model.state_dict().items()})
    for before, after, trained in zip(states, states[1:], ({"d"}, {"d"}, {"d", "g"}), strict=False):
        assert {name[0] for name in after if not torch.equal(before[name], after[name])} == trained


@pytest.mark.ledger("fig.5.34")
def test_a_seed_decides_everything_and_later_steps_change_no_earlier_ones() -> None:
    short = AdversarialGame("ring of 8", "non_saturating", 10, 5).until(2)
    long = AdversarialGame("ring of 8", "non_saturating", 10, 5).until(5)
    other = AdversarialGame("ring of 8", "non_saturating", 10, 6).until(2)
    assert [r.accuracy for r in short] == [r.accuracy for r in long[:3]]
    assert torch.equal(short[2].samples, long[2].samples) and not torch.equal(short[2].samples, other[2].samples)


@pytest.mark.ledger("fig.5.34")
def test_the_map_is_that_of_the_discriminator() -> None:
    model = (game := AdversarialGame("two blobs", "non_saturating", 40, 0)).until(4) and game.model
    drawn = panel(GAME, "heatmap", ticks=4)
    assert drawn["rows"] == drawn["columns"][::-1] and drawn["columns"][10] == "0.0"
    for i, j in ((0, 0), (3, 17), (20, 10)):
        x = torch.tensor([[float(drawn["columns"][j]), float(drawn["rows"][i])]], dtype=torch.float64)
        assert drawn["values"][i][j] == pytest.approx(float(model.score(x).detach().sigmoid()), abs=1e-5)


@pytest.mark.ledger("fig.5.35")
def test_the_divergence_of_the_figure_and_its_ends() -> None:
    numbers = shown(BEST)
    assert round(numbers["JSD, bits"], 3) == 0.893
    assert numbers["V(D*, G) of 4,000 samples"] == pytest.approx(numbers["−log 4 + 2 JSD"], abs=1e-3)
    equal = shown(BEST, distance=0.0)
    assert equal["JSD, nats"] == 0 and equal["accuracy of D*"] == 0.5
    assert set(curve(BEST, 1, distance=0.0).values()) == {0.5}
    apart = shown(BEST, distance=6.0, shape="uniform")
    assert apart["JSD, nats"] == pytest.approx(math.log(2), abs=1e-6) and apart["JSD, bits"] == 1
    assert apart["slope of the JSD with the distance"] == 0 and apart["accuracy of D*"] == 1


@pytest.mark.ledger("fig.5.35")
def test_the_best_discriminator_is_the_share_of_the_data() -> None:
    p, q = curve(BEST, 0, 0, distance=2.0, deviation=0.5), curve(BEST, 0, 1, distance=2.0, deviation=0.5)
    best = curve(BEST, 1, distance=2.0, deviation=0.5)
    assert all(best[x] == pytest.approx(p[x] / (p[x] + q[x]), abs=1e-4) for x in best if p[x] + q[x] > 1e-3)
    shares = shown(BEST, distance=3.29)["accuracy of D*"]
    assert shares == pytest.approx(float(Normal(0.0, 1.0).cdf(torch.tensor(3.29 / 2))), abs=1e-3)


@pytest.mark.ledger("fig.5.35")
@pytest.mark.parametrize("shape", ["normal", "uniform"])
def test_densities_have_an_integral_of_1_and_their_deviation(shape: str) -> None:
    density = Density(shape, 1.5, 0.7)
    p, step = density.log(GRID).exp(), float(GRID[1] - GRID[0])
    mean = float((p * GRID).sum() * step)
    assert float(p.sum() * step) == pytest.approx(1, abs=5e-3) and mean == pytest.approx(1.5, abs=1e-2)
    assert float((p * (GRID - mean).square()).sum() * step) ** 0.5 == pytest.approx(0.7, abs=5e-3)
    places = density.quantiles((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    assert float(places.std()) == pytest.approx(0.7, abs=5e-3)
    distances = [jensen_shannon(Density(shape, 0.0, 1.0), Density(shape, d, 1.0)) for d in (0.0, 1.0, 2.0, 3.0, 8.0)]
    assert distances == sorted(distances) and distances[0] == 0 < distances[1]
