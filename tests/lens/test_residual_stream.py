"""Massive activations and the collapse of rank, found where they were planted."""

import pytest
import torch

from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.lens import massive_activations, patch, rank_collapse
from regard.lens.residual_stream import distance_from_mean
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import NoNorm
from tests.laws import MODELS, OTHERS, build, random_ids


def test_planted_massive_activations_are_found_and_random_models_have_none() -> None:
    model, ids = build(MODELS["grouped-query"]), random_ids(2, 9)
    assert massive_activations(model, ids).found == []

    def plant(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[1, 0, 7] = -5e6
        return x

    with patch(model, {"stack.blocks.1": plant}):
        sizes = massive_activations(model, ids)
    first = sizes.found[0]
    assert first[:5] == ("stack.blocks.1", 1, 0, 7, -5e6) and first.ratio > 1000
    assert sizes.ratios["stack.blocks.1"] == pytest.approx(first.ratio) and sizes.largest["stack.blocks.0"] < 5e6
    assert {one.channel for one in sizes.found} == {7}  # the stream carries it to the later layers


def test_the_largest_massive_activations_are_kept() -> None:
    """The limit of their number leaves out the smallest, not the last positions."""
    x = torch.ones(1, 40, 24, dtype=torch.float64)
    x[0, :30, 3], x[0, 35, 9] = 2e3, -9e3
    model, ids = build(MODELS["grouped-query"]), random_ids(1, 40)
    with patch(model, {"stack.input": x}):
        found = massive_activations(model, ids, most=4).found
    planted = [one for one in found if one.name == "stack.input"]
    assert planted[0][1:5] == (0, 35, 9, -9e3) and len(found) == 4
    assert [abs(one.value) for one in found] == sorted((abs(one.value) for one in found), reverse=True)


def test_equal_tokens_are_collapsed_and_orthogonal_ones_are_not() -> None:
    model, ids = build(MODELS["grouped-query"]), random_ids(2, 9)
    same = torch.randn(1, 1, 24, dtype=torch.float64).expand(2, 9, 24)
    orthogonal = torch.eye(24, dtype=torch.float64)[:9].expand(2, 9, 24)
    with patch(model, {"stack.input": orthogonal, "stack.blocks.1": same}):
        found = rank_collapse(model, ids)
    assert found.residual["stack.blocks.1"] == pytest.approx(0, abs=1e-9)
    assert found.cosine["stack.blocks.1"] == pytest.approx(1)
    assert found.cosine["stack.input"] == pytest.approx(0, abs=1e-9)
    assert found.residual["stack.input"] == pytest.approx((1 - 1 / 9) ** 0.5)
    with pytest.raises(ValueError, match="one token has no other"):
        rank_collapse(model, ids[:, :1])


def test_both_streams_of_an_encoder_decoder_are_measured() -> None:
    model = build(OTHERS["encoder-decoder"])
    found = rank_collapse(model, (random_ids(2, 7), random_ids(2, 5)))
    assert {name.split(".")[0] for name in found.cosine} == {"source", "target"} and len(found.cosine) == 6


def spread_after_layers(block: Block, seed: int, dtype: torch.dtype = torch.float32, layers: int = 4) -> list[float]:
    """The distance of 64 random tokens of width 256 from their mean, relative to their size, after every layer.

    All matrices have independent normal entries with a deviation of 1/√columns.
    """
    torch.manual_seed(seed)
    x, spreads = torch.randn(1, 64, 256, dtype=dtype), []
    for _ in range(layers):
        layer = block.build(256).to(dtype)
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=256**-0.5) if p.dim() == 2 else None
        with torch.no_grad():
            x, _ = layer(x, TokenLayout.whole(1, 64))
        spreads.append(float(distance_from_mean(x)))
    return spreads


@pytest.mark.ledger("blk.rankcollapse", exact=True)
def test_attention_alone_drives_random_tokens_to_one_vector_and_residuals_prevent_it() -> None:
    attention = Attention(1, mask=Full())
    alone = Block((Sublayer(attention, NoNorm()),), keep=0.0)
    one, two, three, four = torch.tensor([spread_after_layers(alone, seed) for seed in range(8)]).mean(0).tolist()
    assert one == pytest.approx(0.78, abs=0.03) and two == pytest.approx(0.008, abs=0.002)
    assert three < 1e-6 and four < 3e-7  # the rounding of float32: in float64 the fall goes on
    exact = torch.tensor([spread_after_layers(alone, seed, torch.float64) for seed in range(8)]).mean(0)
    assert exact[2] < 1e-7 and exact[3] < 1e-14
    for block in (Block((Sublayer(attention),)), Block((Sublayer(attention), Sublayer(FeedForward(1024))))):
        assert min(spread_after_layers(block, 0)) > 0.5
