"""The drawing of a model: its parts sum to the totals of the plan, equal blocks are folded, sources are real."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import regard
from regard.models.base import Model, build_on_meta
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, without_repeats
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.planning import plan
from regard.planning.part_tree import part_tree
from tests.laws import MODELS, OTHERS


def parts(tree: dict) -> Iterator[tuple[dict, int]]:
    """Every part with its number of occurrences."""
    for stack in tree["stacks"]:
        yield from ((part, 1) for part in stack["before"] + stack["after"])
        for run in stack["runs"]:
            for block in run["blocks"]:
                times = block["times"] * run["times"]
                found = [part for sublayer in block["sublayers"] for part in sublayer.values()]
                yield from ((part, times) for part in found + ([block["norm"]] if "norm" in block else []))
    yield from ((part, 1) for part in tree["others"])


@pytest.mark.parametrize("spec", [*MODELS.values(), *OTHERS.values()], ids=[*MODELS, *OTHERS])
def test_parts_exist_and_sum_to_the_plan(spec: Model) -> None:
    tree, numbers = part_tree(spec, 64), plan(spec, 64)
    model, found = build_on_meta(without_repeats(spec)), list(parts(tree))
    for part, _ in found:
        if not any(char.isdigit() for char in part["name"]):  # layers have other numbers in a model without repeats
            module = model.get_submodule(part["name"])
            assert f"{type(module).__module__}.{type(module).__qualname__}" == part["class"]
            assert {name: list(p.shape) for name, p in module.named_parameters()} == part["weights"]
        assert part["kind"] and part["class"] in tree["sources"]
    total = {cost: sum(part[cost] * times for part, times in found) for cost in ("flops", "cache", "parameters")}
    assert total["cache"] == numbers.kv_bytes() + numbers.state_bytes
    if isinstance(spec, Decoder):
        assert total["flops"] == pytest.approx(numbers.forward_flops, abs=4 * len(spec.blocks))
        if not (any(run.tied for run in spec.layers) or spec.ahead or shares_weights(spec)):
            assert total["parameters"] == numbers.parameters


def shares_weights(spec: Decoder) -> bool:
    return any(sublayer.body.kind == "shared_block" for block in spec.blocks for sublayer in block.sublayers)


def test_repeated_blocks_are_folded_and_keep_the_numbers_of_their_layers() -> None:
    full = Block((Sublayer(Attention(2)), Sublayer(SwiGLU(32))))
    linear = Block((Sublayer(LinearAttention(2)), Sublayer(FeedForward(32))))
    spec = Decoder(50, 16, (Repeat((linear, linear, full), 4), Repeat((full,), 2)), context=32)
    first, second = part_tree(spec, 8)["stacks"][0]["runs"]
    assert (first["times"], first["first"], first["layers"]) == (4, 0, 12)
    assert [(block["layer"], block["times"]) for block in first["blocks"]] == [(0, 2), (2, 1)]
    assert (second["times"], second["first"]) == (2, 12)
    assert second["blocks"][0]["sublayers"][0]["body"]["name"] == "stack.blocks.12.sublayers.0.body"


def test_costs_follow_the_length() -> None:
    window = regard.Window(8)
    spec = Decoder(50, 16, (Repeat((Block((Sublayer(Attention(2, mask=window)), Sublayer(Attention(2)))),)),))
    short, long = (part_tree(spec, length)["stacks"][0]["runs"][0]["blocks"][0]["sublayers"] for length in (4, 64))
    assert [layer["body"]["cache"] for layer in short] == [4 * 2 * 16 * 4] * 2
    assert [layer["body"]["cache"] for layer in long] == [8 * 2 * 16 * 4, 64 * 2 * 16 * 4]
    assert (
        long[0]["body"]["flops"] < long[1]["body"]["flops"] and short[0]["body"]["flops"] == short[1]["body"]["flops"]
    )


def test_sources_are_the_forwards_in_their_files() -> None:
    sources = part_tree(MODELS["multi-head"], 8)["sources"]
    root = Path(regard.__file__).parent.parent
    for source in sources.values():
        if source["file"].startswith("regard/"):
            lines = (root / source["file"]).read_text(encoding="utf-8").splitlines()
            shown = source["source"].splitlines()
            assert [line.strip() for line in lines[source["line"] - 1 :][: len(shown)]] == [s.strip() for s in shown]
