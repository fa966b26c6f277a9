"""Groups of numbers: JSON data, formatted rows, and totals that agree with each other."""

import dataclasses
import json
import re

import pytest
from torch import nn

import regard
from regard.language_model import LanguageModel
from regard.parts.feedforward import SwiGLU
from regard.planning import Plan, groups, plan, rows
from regard.planning.groups import format_bytes, format_number, training_run_groups
from regard.planning.published import llama, rotary
from regard.text.train import byte
from tests.planning.test_cost import SPECS


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


def test_groups_can_be_serialized_as_json():
    planned = plan(SPECS["hybrid"])
    data = json.loads(json.dumps(groups(planned)))
    assert data["parameters"]["total"] == planned.parameters
    assert ("parameters", "swiglu", "23 k (49.1%)") in rows(data)
    assert isinstance(planned, Plan) and dataclasses.replace(planned, batch=2).kv_bytes() == 2 * planned.kv_bytes()


def test_plan_accepts_a_spec_a_model_or_a_published_name():
    spec = SPECS["hybrid"]
    model = spec.build(seed=0)
    for model_or_spec in (spec, model, LanguageModel(model, byte())):
        assert regard.plan(model_or_spec) == plan(spec)
    assert regard.plan("gpt2").parameters == 124_439_808
    assert regard.plan("7B").parameters == pytest.approx(7e9, rel=0.1)
    with pytest.raises(ValueError, match="'gpt-2' is not a published model; did you mean 'gpt2'"):
        regard.plan("gpt-2")
    with pytest.raises(ValueError, match="Linear has no spec; give a spec, or a model"):
        regard.plan(nn.Linear(2, 2))


def test_a_printed_plan_is_a_table_with_every_number(spec):
    planned = plan(spec, context=32, batch=2)
    title, blank, *lines = str(planned).splitlines()
    assert title == f"{spec.kind}: context 32, batch 2, cache in float32, weights in float32" and blank == ""
    assert [tuple(re.split(r" {2,}", line.strip()))[-2:] for line in lines] == [
        row[1:] for row in rows(groups(planned))
    ]
    assert len(set(map(len, lines))) == 1, "numbers are aligned on the right"
    assert json.loads(json.dumps(planned.to_dict())) == json.loads(json.dumps(groups(planned)))


@pytest.mark.ledger("calc.units")
def test_every_number_of_bytes_is_shown_in_both_units(spec):
    sizes = [text for group, _, text in rows(groups(plan(spec))) if "bytes" in group]
    assert len(sizes) > 15
    assert all(re.fullmatch(r"[\d.]+ B|[\d.]+ [kMGT]B \([\d.]+ ([KMGT]i)?B\)", text) for text in sizes), sizes


@pytest.mark.ledger("calc.units")
@pytest.mark.parametrize(
    "number, text",
    [(1_342_177_280, "1.34 GB (1.25 GiB)"), (32_768_000_000, "32.8 GB (30.5 GiB)"), (2**35, "34.4 GB (32 GiB)"),
     (2_684_354_560, "2.68 GB (2.5 GiB)"), (6_815_744 * 2, "13.6 MB (13 MiB)"), (8_388_608 * 4, "33.6 MB (32 MiB)"),
     (999, "999 B"), (1000, "1 kB (1000 B)"), (-13_400_000_000, "-13.4 GB (-12.5 GiB)")],
)  # fmt: skip
def test_bytes_are_formatted_in_gb_and_gib(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    "number, unit, step, text",
    [(0, "B", 1024, "0 B"), (999, "", 1000, "999"), (1536, "B", 1024, "1.5 KiB"), (12_345_678, "B", 1024, "11.8 MiB"),
     (1023 * 1024, "B", 1024, "1023 KiB"), (999_700, "", 1000, "1000 k"), (70_553_706_496, "", 1000, "70.6 G"),
     (10**19, "FLOP", 1000, "10 EFLOP")],
)  # fmt: skip
def test_numbers_are_formatted_with_prefixes(number, unit, step, text):
    assert format_number(number, unit, step) == text


@pytest.mark.parametrize("tied", [True, False])
def test_training_run_agrees_with_flops_per_token_and_differs_from_6nd_by_named_terms(tied):
    """6N omits the two products of attention, and it includes weights that no product uses."""
    spec = dataclasses.replace(llama(3, 64, rotary(4, 2), SwiGLU(96), vocab=100, context=32), tied=tied)
    planned, tokens = plan(spec), 10**6
    per_token, run = groups(planned)["flops_per_token"], training_run_groups(planned, tokens)["training_run_flops"]
    assert run["total"] == tokens * per_token["training"] and run["6ND"] == tokens * per_token["6N"]
    pairs = 3 * 4 * 32 * 4 * 16  # layers, scores and values, keys, heads, head_dim
    parts = planned.count.parts
    unused = parts["norm"] + (0 if tied else parts["embedding"])  # a tied embedding is the matrix of the head
    assert per_token["training"] - per_token["6N"] == 3 * pairs - 6 * unused
