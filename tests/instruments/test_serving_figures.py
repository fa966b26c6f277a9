"""The figures about fewer bits and fewer steps: what the instruments show is what formats, engine and caches do."""

import math

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.formats.names import format_named
from regard.instruments.drafts import LONGEST, NEW, SAME, SMALLER, run_engines
from regard.instruments.examples import LENGTH, START, example_subject, ids, trained
from regard.instruments.precision import FORMATS, NAMES, round_weight
from tests.instruments.test_figures import panel, shown

GRIDS = {  # numbers of the format, with a scale s; computed without it
    "FP16": lambda s: torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).double(),
    "FP8 E4M3": lambda s: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * s["scale"].item(),
    "INT8": lambda s: (torch.arange(1, 256).double() - 128) * s["scale"].item(),
    "INT4": lambda s: (torch.arange(16).double() - s["zero"].item()) * s["scale"].item(),
    "INT2": lambda s: (torch.arange(4).double() - s["zero"].item()) * s["scale"].item(),
}


@pytest.mark.ledger("fig.5.28")
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("weight", [0.62, -0.31, 0.0])
def test_a_weight_becomes_the_nearest_number_of_its_format(name: str, weight: float) -> None:
    _, _, scales = round_weight(format_named(FORMATS[name]), weight)
    grid = GRIDS[name](scales)
    grid = grid[grid.isfinite()]
    numbers = shown("precision", format=NAMES.index(name), weight=weight)
    distance = float((grid - weight).abs().min())
    assert float(numbers["error |W − W′|"]) == pytest.approx(distance, rel=0.06, abs=1e-7)
    stored = float(numbers["stored as W′"])
    assert abs(stored - weight) == pytest.approx(distance, rel=1e-2, abs=1e-5)
    below, above = (float(n) for n in numbers["next numbers"].split(" and "))
    nearest = grid[(grid - weight).abs().argmin()]
    assert below == pytest.approx(float(grid[grid < nearest].max()), rel=1e-4)
    assert above == pytest.approx(float(grid[grid > nearest].min()), rel=1e-4)
    steps = [
        y for _, y in panel("precision", "lines", 1, format=NAMES.index(name), weight=weight)["series"][1]["points"]
    ]
    assert all(float((grid - y).abs().min()) < 1e-5 for y in steps) and len(set(steps)) > 2


@pytest.mark.ledger("fig.5.28", "q.fig")
def test_fewer_bits_take_fewer_bytes_and_training_with_them_recovers_the_loss() -> None:
    sizes = dict(zip(NAMES, panel("precision", "bars")["values"], strict=True))
    assert sizes["FP16"] == pytest.approx(141.1, abs=0.05)  # 70.55e9 parameters of two bytes
    assert sizes["FP8 E4M3"] == pytest.approx(sizes["FP16"] / 2, rel=1e-3)
    assert sizes["INT4"] == pytest.approx(sizes["FP16"] * (4 + 24 / 64) / 16, rel=1e-5)  # float16 and uint8 for 64
    assert sizes["NF4"] == pytest.approx(sizes["FP16"] * 4.127 / 16, rel=1e-3)
    plain, trained, post, aware = panel("precision", "bars", 1, format=NAMES.index("INT2"))["values"]
    assert post > 2 * plain and aware < 1.1 * plain and abs(trained - plain) < 0.01
    _, _, fine, _ = panel("precision", "bars", 1, format=NAMES.index("FP16"))["values"]
    assert math.isclose(fine, plain, rel_tol=1e-4)  # no measurable loss in 16 bits
    rows = panel("precision", "table", format=NAMES.index("INT2"))["rows"]
    assert [row[0] for row in rows] == ["post-training", "quantization-aware"]
    assert float(rows[0][2]) == pytest.approx(post - plain, abs=1e-4)


@pytest.mark.ledger("fig.5.29")
@pytest.mark.parametrize("draft", [SMALLER, SAME])
@pytest.mark.parametrize("length", [1, 5, LONGEST])
def test_rounds_are_those_of_plain_decoding_with_each_model_alone(draft: str, length: int) -> None:
    """The draft of a round is what the draft model generates from there; the accepted part is that which agrees."""
    model, other = example_subject().model, trained("draft") if draft == SMALLER else example_subject().model
    prompt, run = ids([START, "the", "old", "lamp"]), run_engines(draft, length, "lamp")
    engine = Engine(model, rows=1, capacity=LENGTH)
    expected = [token.id for token in engine.generate(prompt, Sampling(max_new=NEW, temperature=0))]
    assert run.ids == expected
    done, drafter = 1, Engine(other, rows=1, capacity=LENGTH)
    for proposed, accepted in run.rounds:
        assert len(proposed) == min(length, NEW - done - 1)
        greedy = Sampling(max_new=len(proposed), temperature=0)
        assert proposed == [token.id for token in drafter.generate(prompt + expected[:done], greedy)]
        following = expected[done : done + len(proposed)]
        assert accepted == next(
            (i for i, (a, b) in enumerate(zip(proposed, following, strict=True)) if a != b), len(proposed)
        )
        done += accepted + 1
    assert NEW - done <= 1, "one token may be left, for which no draft is needed"
    assert run.acceptance == 1 or draft == SMALLER
    assert min(run.plain_seconds, run.draft_seconds, run.verify_seconds) > 0


@pytest.mark.ledger("fig.5.29")
def test_the_speed_up_counts_the_cost_of_drafts() -> None:
    numbers = shown("speculative-rounds", acceptance=0.6, length=5, cost=0.1)
    expected = sum(0.6**i for i in range(6))
    assert numbers["tokens per pass"] == pytest.approx(expected, rel=1e-5)
    assert numbers["speed-up"] == pytest.approx(expected / 1.5, rel=1e-5)
    assert numbers["speed-up if all 5 of 5 are accepted"] == pytest.approx(4.0)
    for draft in (SMALLER, SAME):
        rows = panel("speculative-rounds", "table", draft=draft, length=5)["rows"]
        tokens, passes = sum(row[3] for row in rows), len(rows)
        plain = NEW - 1 - tokens
        found = shown("speculative-rounds", draft=draft, length=5, cost=0.2)
        assert found["speed-up of these rounds if c were 0.2"] == pytest.approx(
            (NEW - 1) / (2 * passes + plain), rel=1e-5
        )
    assert shown("speculative-rounds", acceptance=0.1, cost=0.5)["the best k"] == 0, "drafts that do not pay"
    pieces = panel("speculative-rounds", "tokens", number=2, length=5)
    row = panel("speculative-rounds", "table", length=5)["rows"][1]
    assert pieces["notes"].count("accepted") == row[2] and pieces["notes"][-1] == "own"
