"""The settings of a scaling grid: sizes, rates, lengths and schedules."""

import math

import pytest

from regard.planning import plan
from regard.planning.parameters import count_parameters, non_embedding_parameters
from regard.spec import SpecError
from regard.training.overrides import override
from regard.training.recipe import draft_recipe, find_recipe, read_recipe
from regard.training.scaling_grid import (
    GridSize,
    grid_settings,
    parse_sizes,
    parse_tokens,
    run_title,
    size_values,
    tokens_for_budget,
)


def llama(**changes: str) -> dict:
    return read_recipe(find_recipe("llama"), changes)


def test_sizes_and_token_counts_are_read() -> None:
    assert parse_sizes("32x2, 64") == [GridSize(32, 2), GridSize(64)] and str(GridSize(32, 2)) == "32x2"
    assert parse_tokens("200000, 200.5k,1.5M,2e6") == [200_000, 200_500, 1_500_000, 2_000_000]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_sizes, "32x", "'32x' is not a size"),
        (parse_sizes, "32,32", "given twice"),
        (parse_sizes, "0", "must not be 0"),
        (parse_tokens, "10q", "'10q' is not a number of tokens"),
        (parse_tokens, "1k,1000", "given twice"),
        (parse_tokens, "1e400,1k", "1e400 is more than 1e\\+15 tokens"),
    ],
)
def test_wrong_sizes_and_counts_are_refused(read, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(text)


def test_a_size_scales_the_hidden_layers_and_the_rate() -> None:
    values = size_values(llama(), GridSize(96, 3), power=0.5)  # the recipe: width 192, hidden 512, 6 layers, rate 1e-3
    assert values == {
        "model.width": "96",
        "model.layers.0.blocks.0.sublayers.1.body.hidden": "256",
        "model.layers.0.times": "3",
        "train.lr": "0.001414",
    }
    spec = draft_recipe(override(llama(), values))[0].model
    assert plan(spec, context=256).parameters < plan(draft_recipe(llama())[0].model, context=256).parameters
    assert size_values(llama(), GridSize(96), power=0.0)["train.lr"] == "0.001"


def test_every_length_has_its_own_schedule() -> None:
    settings = grid_settings(llama(), [GridSize(96), GridSize(192)], [102_400, 4_096_000], seeds=2, power=0.5)
    assert len(settings) == 8 and [values["train.seed"] for values in settings] == ["0"] * 4 + ["1"] * 4
    short, long = settings[:2]  # steps of 8 · 256 tokens
    assert (short["train.steps"], short["train.schedule.warmup"]) == ("50", "5")
    assert (long["train.steps"], long["train.schedule.warmup"]) == ("2000", "100")  # the recipe's
    for values in settings:
        train = draft_recipe(override(llama(), values))[0].train
        assert train.schedule.kind == "wsd" and train.schedule.factor(train.steps - 1, train.steps) < 0.1


def test_a_budget_is_divided_among_the_runs() -> None:
    counts = tokens_for_budget(100, [1e-5, 3e-5])
    assert sum(counts) * 4e-5 == pytest.approx(100, rel=1e-3)
    assert [round(after / before, 2) for before, after in zip(counts, counts[1:], strict=False)] == [2.0] * 4
    assert tokens_for_budget(300, [1e-5, 3e-5], seeds=3) == counts
    alone = tokens_for_budget(100, [1e-5, 3e-5], at_once=100)  # the longest run decides
    assert alone[-1] * 3e-5 == pytest.approx(100)
    with pytest.raises(SpecError, match="--budget: .* tokens are more than 1e"):
        tokens_for_budget(1e300, [1e-5])


@pytest.mark.parametrize(
    ("recipe", "size", "tokens", "message"),
    [
        ("llama", GridSize(96), 1000, "1,000 tokens are 0 steps of 2,048 tokens; give at least 40,960 tokens"),
        ("t5", GridSize(96), 10**6, "no model.width"),
        ("finetune", GridSize(96), 10**6, "trains new models"),
        ("jamba", GridSize(96, 3), 10**6, "not one repeated pattern"),
    ],
)
def test_recipes_that_do_not_scale_are_refused(recipe: str, size: GridSize, tokens: int, message: str) -> None:
    changes = {"from": "smollm2"} if recipe == "finetune" else {}
    with pytest.raises(SpecError, match=message):
        grid_settings(read_recipe(find_recipe(recipe), changes), [size], [tokens], 1, 0.5)


@pytest.mark.parametrize(
    ("sizes", "tokens", "power", "message"),
    [
        ([GridSize(96), GridSize(96, 6)], [10**6], 0.5, "--sizes: 96 and 96x6 are the same model"),
        (
            [GridSize(96)],
            [102_400, 102_500],
            0.5,
            "102,400 and 102,500 tokens are both 50 steps of 2,048; leave one out",
        ),
        ([GridSize(96)], [10**6], 1e308, "--lr-power 1e\\+308 gives the width 96 the learning rate inf"),
        ([GridSize(384)], [10**6], 1e308, "the learning rate 0; choose a power such as 0.5"),
        ([GridSize(384)], [10**6], math.nan, "the learning rate nan"),
    ],
)
def test_runs_that_would_be_equal_or_diverge_are_refused(sizes, tokens, power: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        grid_settings(llama(), sizes, tokens, 1, power)


def test_a_run_is_named_by_its_size_tokens_and_rate() -> None:
    (values,) = grid_settings(llama(), [GridSize(96, 3)], [102_400], 1, 0.5)
    assert run_title(llama(), values, False) == "96x3, 102,400 tokens, lr 0.001414"
    (values,) = grid_settings(llama(), [GridSize(192)], [102_400], 1, 0.5)
    assert run_title(llama(), values, True) == "192, 102,400 tokens, lr 0.001, seed 0"


def test_parameters_without_embedding_and_output_layer() -> None:
    tied = draft_recipe(llama())[0].model
    untied = draft_recipe(llama(**{"model.tied": "false"}))[0].model
    blocks = 6 * (2 * 192 * 192 + 2 * 192 * 64 + 3 * 192 * 512)
    norms = 13 * 192
    for spec in (tied, untied):
        assert non_embedding_parameters(count_parameters(spec)) == blocks + norms
