"""Folding of scales: the logits do not change, whatever the norms, the heads and the style of the block."""

import pytest
import torch
from torch import nn

from regard.families import family
from regard.formats.integers import Integer
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.norm import LayerNorm, NoNorm, RMSNorm
from regard.quantization.folding import Fold, find_folds
from regard.quantization.quantize_model import inputs_of_blocks
from regard.quantization.scaling import awq_scales, smooth_scales
from regard.quantization.select_layers import shared_parameters
from regard.quantization.statistics import InputStatistics, add_inputs, record_inputs
from tests.laws import build

ATTENTION = Attention(4, 2, bias=True)


def decoder(*sublayers: Sublayer, times: int = 2, tied: bool = False, **block: object) -> Decoder:
    return Decoder(vocab=31, width=32, layers=(Repeat((Block(sublayers, **block),), times, tied),))  # ty: ignore


PRE = decoder(Sublayer(ATTENTION), Sublayer(SwiGLU(48)))
SPECS = {  # with the number of folds per block
    "grouped heads": (PRE, 4),
    "gate": (decoder(Sublayer(Attention(4, gate="element"))), 2),
    "layer norm": (decoder(Sublayer(ATTENTION, LayerNorm()), Sublayer(FeedForward(48), LayerNorm())), 3),
    "around one": (decoder(Sublayer(ATTENTION, RMSNorm(around_one=True)), Sublayer(SwiGLU(48))), 4),
    "no weight": (decoder(Sublayer(ATTENTION, RMSNorm(weight=False)), Sublayer(SwiGLU(48))), 3),
    "post": (decoder(Sublayer(ATTENTION), Sublayer(SwiGLU(48)), style="post"), 2),
    "parallel": (
        decoder(Sublayer(ATTENTION, NoNorm()), Sublayer(SwiGLU(48), NoNorm()), style="parallel", norm=RMSNorm()),
        3,
    ),
    "clipped": (decoder(Sublayer(Attention(4, clip=0.1))), 1),
    "limited": (decoder(Sublayer(SwiGLU(48, limit=0.1))), 1),
    "experts": (decoder(Sublayer(ATTENTION), Sublayer(Experts(4, 2, SwiGLU(24), shared=SwiGLU(24)))), 3),
    "tied": (decoder(Sublayer(ATTENTION), tied=True), 0),
}


def folds_of(model: DecoderModule) -> list[list[Fold]]:
    ids, shared = torch.arange(20).view(2, 10), shared_parameters(model)
    ((x, layout),) = inputs_of_blocks(model, [(ids, None)])
    return [find_folds(block, lambda block=block: block(x, layout, None), shared) for block in model.stack.blocks]


def draw_norms(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)


@pytest.mark.ledger("q.awq")
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_the_logits_do_not_change(name: str) -> None:
    spec, count = SPECS[name]
    model = build(spec, torch.float64).eval()
    draw_norms(model)
    ids = torch.arange(20).view(2, 10)
    before, folds = model(ids), folds_of(model)
    assert [len(found) for found in folds] == [count] * 2
    for fold in [fold for found in folds for fold in found]:
        outputs = fold.source.weight.shape[0]
        fold.apply(torch.empty(outputs, dtype=torch.float64).uniform_(0.2, 5))
    torch.testing.assert_close(model(ids), before, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_folds_of_a_family() -> None:
    config = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    spec = family("llama").spec({"model_type": "llama", **config, "num_attention_heads": 4, "num_key_value_heads": 2})
    blocks = folds_of(build(spec, torch.float64).eval())
    assert [[len(fold.sinks) for fold in folds] for folds in blocks] == [[3, 2, 1, 1]] * 2


@pytest.mark.ledger("q.awq")
@torch.no_grad()
def test_awq_scales_have_the_least_error_and_smooth_scales_balance_the_sizes() -> None:
    rng = torch.Generator().manual_seed(0)
    norm, layer = nn.LayerNorm(32).double(), nn.Linear(32, 24).double()
    x = torch.randn(300, 32, generator=rng, dtype=torch.float64) * torch.where(torch.arange(32) % 11 == 3, 20, 0.5)
    statistics: dict[str, InputStatistics] = {}
    with record_inputs({"layer": layer}) as inputs:
        layer(x)
    add_inputs(statistics, inputs)
    fold, format, found = Fold(norm, [layer]), Integer(3, group=16), statistics["layer"]

    def error(scales: torch.Tensor) -> float:
        rounded = format.dequantize(format.quantize(layer.weight * scales), torch.float64) / scales
        return float(((rounded - layer.weight) @ x.t()).square().sum())

    scales = awq_scales(fold, found, {layer: format})
    candidates = [x.abs().mean(0) ** (step / 20) for step in range(20)]
    assert error(scales) == pytest.approx(min(map(error, candidates)), rel=0.02)  # they are scaled by a constant
    assert error(scales) < 0.7 * error(torch.ones(32, dtype=torch.float64))
    smooth = smooth_scales(fold, found, {layer: format})
    sizes = x.abs().amax(0) / smooth, layer.weight.abs().amax(0) * smooth
    torch.testing.assert_close(*sizes)
