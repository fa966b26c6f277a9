"""LoRA against full fine-tuning: the numbers are those that the labs wrote, and the bits those of the planner."""

import json
from pathlib import Path
from typing import Any

import pytest

from regard.instruments import INSTRUMENTS, lora_findings
from regard.instruments.lora_findings import CLAIMS, LABS, RANKS, RATES, result_of
from regard.instruments.measurements import measured, spread_of
from regard.planning.training import episode_bits, lora_parameters
from tests.planning.test_training import LLAMA_8B

RECORDED = Path(__file__).parents[2] / "docs/labs"
COMPARED = INSTRUMENTS["lora-rates"]


def items(panel: dict[str, Any]) -> dict[str, Any]:
    return {item["label"]: item["value"] for item in panel["items"]}


@pytest.mark.parametrize("lab", [lab for lab in LABS if (RECORDED / f"{lab}.json").exists()])
def test_the_packaged_results_are_the_recorded_ones(lab: str) -> None:
    recorded = json.loads((RECORDED / f"{lab}.json").read_text(encoding="utf-8"))
    assert result_of(lab) == recorded, "run python docs/generate_labs.py"
    assert recorded["settings"]["size"] == "full" and len(recorded["seeds"]) >= 3


@pytest.mark.ledger("fig.5.33")
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("length", ["short runs", "long runs"])
def test_the_curves_and_their_minima_are_those_of_the_lab(rank: int, length: str) -> None:
    result, method = result_of(RATES), f"LoRA r {rank}"
    steps = (min if length == "short runs" else max)(row["steps"] for row in result["table"])
    curves, best, factors, *_ = COMPARED.panels({"rank": f"rank {rank}", "length": length})
    plot = next(plot for plot in result["plots"] if plot["title"] == f"after {steps} steps")
    for line in curves["series"]:
        assert line["points"] == [pytest.approx(point, rel=1e-5) for point in plot["lines"][line["name"]]]
    assert [line["name"] for line in curves["series"]] == ["FullFT", method] and curves["log_x"]
    rows = {row["method"]: row for row in result["table"] if row["steps"] == steps}
    rates = [spread_of(rows[name]["best rate"]).mean for name in ("FullFT", method)]
    factor = spread_of(rows[method]["times FullFT's"]).mean
    assert [mark["x"] for mark in curves["marks"]] == pytest.approx(rates, rel=1e-5)
    assert curves["marks"][1]["label"] == f"r {rank}: ×{factor:.1f}"
    assert items(best)["times FullFT's"].startswith(f"{factor:.2g}")
    assert factors["values"][factors["selected"]] == pytest.approx(factor, rel=1e-5)
    everything = COMPARED.panels({"rank": f"rank {rank}", "length": length, "others": True})[0]
    assert [line["name"] for line in everything["series"]] == list(plot["lines"])


@pytest.mark.ledger("fig.5.33")
@pytest.mark.parametrize("finding", [name for name, (lab, _) in CLAIMS.items() if measured(lab) is not None])
def test_each_finding_has_the_verdict_of_its_lab(finding: str) -> None:
    lab, shown = CLAIMS[finding]
    result = result_of(lab)
    shares, plot, predictions = COMPARED.panels({"finding": finding})[3:6]
    held = [check["holds"] for check in result["checks"]]
    assert shares["values"][shares["selected"]] == pytest.approx(100 * sum(held) / len(held), rel=1e-5)
    assert result["verdict"] in predictions["title"] and result["claim"] in predictions["title"]
    assert [(row[0], row[3] == "yes") for row in predictions["rows"]] == [
        (check["expected"], check["holds"]) for check in result["checks"]
    ]
    assert {line["name"]: len(line["points"]) for line in plot["series"]} == {
        name: len(points) for name, points in result["plots"][shown]["lines"].items()
    }


def test_results_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_findings, "measured", lambda lab: None if lab == "rank-one-rl" else measured(lab))
    shares, missing, *bits = COMPARED.panels({"finding": "reinforcement learning"})[3:]
    assert shares["title"].endswith("not measured: reinforcement learning") and len(bits) == 2
    assert items(missing)["results"].startswith("measured/rank-one-rl.json is missing; run regard lab rank-one-rl")
    others = COMPARED.panels({"finding": "capacity"})[3]
    assert others["labels"][others["selected"]] == "capacity" and len(others["values"]) == len(CLAIMS)


@pytest.mark.ledger("fig.5.33", "lwr.bits")
def test_the_bits_of_rewards_are_counted_against_the_weights_of_the_adapter() -> None:
    bits, numbers = COMPARED.panels({})[6:]
    assert bits["values"] == [episode_bits(10_000, 32), lora_parameters(LLAMA_8B, 1)] == [320_000, 2_621_440]
    assert items(numbers)["weights per bit"] == 8.192 and items(numbers)["with the output head"] == "2,753,792"
    more = COMPARED.panels({"adapter_rank": 4, "problems": 100, "samples": 1, "bits": 2.0})[6]
    assert more["values"] == [200, 4 * 2_621_440]
