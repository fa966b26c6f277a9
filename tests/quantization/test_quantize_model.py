"""Quantizing a model block by block: statistics, errors of all layers by all methods, and the layers that stay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.adapt.adapters import add_lora
from regard.adapt.lora import LoRA
from regard.adapt.quantized import QuantizedLinear
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.formats.names import format_named
from regard.formats.nf4 import NF4
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.quantization.quantize_model import METHODS, quantize_model
from regard.quantization.select_layers import QuantizationError, select_layers, with_wide_scales
from regard.quantization.statistics import InputStatistics, add_inputs, record_inputs
from regard.spec import SpecError
from tests.laws import build

BLOCK = Block((Sublayer(Attention(4, 2, position=Rope())), Sublayer(SwiGLU(64))))
SPEC = Decoder(vocab=40, width=32, layers=(Repeat((BLOCK,), 2),))
LINEAR = 14  # layers of the two blocks


def sample(count: int = 4) -> list[tuple[torch.Tensor, TokenLayout | None]]:
    return [
        (torch.randint(40, (4, 32), generator=torch.Generator().manual_seed(n)), TokenLayout.padded([32, 20, 9, 27]))
        for n in range(count)
    ]


def model() -> DecoderModule:
    built = build(SPEC, torch.float32).eval()
    built.embedding.weight.data[:, ::7] *= 8  # large inputs, as trained models have
    return built


@pytest.mark.ledger("q.ptq", "q.gptq", "q.awq")
@pytest.mark.parametrize("format", [Integer(4, group=16), Integer(3, False, 32, "float16"), NF4(32)], ids=str)
def test_every_layer_has_a_smaller_error_than_rounding_to_nearest(format: NumberFormat) -> None:
    errors = {}
    for method in METHODS:
        quantized = model()
        selected = select_layers(quantized, format_named(name), head=True)
        results = quantize_model(quantized, selected, "nearest", sample(1))
        after = quantized(ids, layout)
    weights = sum(layer.out_features * layer.in_features for layer in quantized.modules() if hasattr(layer, "stored"))
    assert sum(result.bytes for result in results) == 2 * weights
    valid = layout.valid if layout is not None else slice(None)
    assert (after - before)[valid].norm() / before[valid].norm() < {"fp16": 1e-3, "bf16": 8e-3}[name]


@pytest.mark.ledger("q.group")
def test_smaller_groups_have_smaller_errors_and_a_group_of_a_row_is_a_channel() -> None:
    """The outputs, and the inputs, of trained layers have weights of different sizes."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=rng) * torch.linspace(0.1, 2, 32).unsqueeze(1) * torch.linspace(0.1, 2, 64)
    errors = []
    for group in ("tensor", "channel", 32, 16, 8):
        format = Integer(4, group=group)
        errors.append(float((format.dequantize(format.quantize(weight)) - weight).square().mean()))
    assert all(later < 0.9 * earlier for earlier, later in zip(errors, errors[1:], strict=False))
    channel, row = (Integer(4, group=group).quantize(weight) for group in ("channel", 64))
    assert all(torch.equal(channel[name], row[name]) for name in channel)
