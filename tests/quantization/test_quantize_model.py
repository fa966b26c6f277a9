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
from tests.laws import broken_laws, build

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
        results = quantize_model(quantized, select_layers(quantized, format), method, sample())
        assert len(results) == LINEAR
        errors[method] = {result.name: result.error for result in results}
        nearest = [result.nearest_error for result in results[:7]]
        if method == "nearest":
            assert [result.error for result in results] == [result.nearest_error for result in results]
        if method in ("gptq", "awq", "awq-gptq"):
            assert all(result.error < result.nearest_error for result in results), method
        assert nearest == [errors["nearest"][result.name] for result in results[:7]]  # the first block has equal inputs
    assert sum(errors["gptq"].values()) < sum(errors["clip"].values()) < sum(errors["nearest"].values())


def test_a_block_is_calibrated_with_the_outputs_of_quantized_blocks() -> None:
    """The error of the second block is that of a product with the inputs that it has in the quantized model."""
    quantized, format = model(), Integer(3, group=16)
    name = "stack.blocks.1.sublayers.0.body.q_proj"
    layer = quantized.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach().clone()
    results = quantize_model(quantized, select_layers(quantized, format), "nearest", sample())
    result = next(result for result in results if result.name == name)
    found, stored = [], quantized.get_submodule(name)
    assert isinstance(stored, QuantizedLinear)
    stored.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        for ids, layout in sample():
            quantized(ids, layout)
    x = torch.cat([x[layout.valid] for x, (_, layout) in zip(found, sample(), strict=True) if layout]).double()
    difference, size = x @ (stored.weight - weight).double().t(), x @ weight.double().t()
    assert result.error == pytest.approx(float(difference.norm() / size.norm()), rel=1e-5)


def test_statistics_equal_plain_sums_without_padding() -> None:
    layers = {"a": nn.Linear(6, 3), "b": nn.Linear(6, 2)}
    statistics: dict[str, InputStatistics] = {}
    batches = [torch.randn(2, 5, 6, dtype=torch.float64) for _ in range(3)]
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    for x in batches:
        with record_inputs(layers, valid) as inputs:
            layers["a"].double()(x), layers["b"].double()(x)
        add_inputs(statistics, inputs)
    assert statistics["a"] is statistics["b"] and statistics["a"].count == 21
    products, sizes, largest = torch.zeros(6, 6, dtype=torch.float64), [0.0] * 6, [0.0] * 6
    for x in batches:
        for row, column in valid.nonzero().tolist():
            products += torch.outer(x[row, column], x[row, column])
            for i, value in enumerate(x[row, column].abs().tolist()):
                sizes[i], largest[i] = sizes[i] + value, max(largest[i], value)
    found = statistics["a"]
    torch.testing.assert_close(found.products, products)
    torch.testing.assert_close(found.mean_magnitude, torch.tensor(sizes, dtype=torch.float64) / 21)
    assert found.largest.tolist() == largest


def test_layers_are_left_out_by_name_and_the_head_is_included_on_request() -> None:
    tied = build(replace(SPEC, tied=True), torch.float32)
    selection = select_layers(tied, Integer(4, group=16), ["*.down_proj", "stack.blocks.0.*"], head=True)
    assert len(selection.formats) == 7 - 1 + 1 and "head" in selection.formats
    assert selection.left["stack.blocks.1.sublayers.1.body.down_proj"] == "left out by --skip"
    quantize_model(tied, selection, "gptq", sample(2))
    assert isinstance(tied.head, QuantizedLinear) and isinstance(tied.embedding, nn.Embedding)
    assert "head" in select_layers(model(), Integer(8)).left
    with pytest.raises(QuantizationError, match=r"--skip \*.dwon_proj matches no linear layer; their names, such as"):
        select_layers(model(), Integer(4), ["*.dwon_proj"])


def test_layers_that_cannot_be_quantized_stay_or_are_refused() -> None:
    experts = Block((Sublayer(Attention(4)), Sublayer(Experts(4, 2, SwiGLU(24), shared=SwiGLU(24)))))
    spec = replace(SPEC, layers=(Repeat((experts,), 2),))
    assert not any(
        "experts" in reason for reason in select_layers(build(spec, torch.float32), Integer(8)).left.values()
    )
    left = select_layers(build(spec, torch.float32), Integer(8), int8_inputs=True).left
    assert [name for name, reason in left.items() if "experts" in reason] == [
        f"stack.blocks.{n}.sublayers.1.body.experts.{name}_proj" for n in (0, 1) for name in ("gate", "up", "down")
    ]
    shared = build(replace(SPEC, layers=(Repeat((BLOCK,), 2, tied=True), Repeat((BLOCK,)))), torch.float32)
    found = select_layers(shared, Integer(8))
    assert len(found.formats) == 7 and list(found.left.values()).count("shared by several layers") == 14
    with pytest.raises(QuantizationError, match="group=7 does not divide the 32 inputs"):
        select_layers(model(), Integer(4, group=7))
    with pytest.raises(QuantizationError, match="a model of kind Linear cannot be quantized yet"):
        select_layers(nn.Linear(2, 2), Integer())
    adapted = model()
    add_lora(adapted, LoRA(2))
    with pytest.raises(QuantizationError, match="has an adapter; merge it first"):
        select_layers(adapted, Integer(4))
    damaged = model()
    name, weight = next((name, p) for name, p in damaged.named_parameters() if name.endswith("down_proj.weight"))
    weight.data[0, 0] = torch.nan
    with pytest.raises(QuantizationError, match=f"{name} has values that are not finite"):
        select_layers(damaged, Integer(4))
    twice = model()
    quantize_model(twice, select_layers(twice, Integer(8)), "nearest", sample(1))
    with pytest.raises(QuantizationError, match="is stored as integer already"):
        select_layers(twice, Integer(4))


def test_small_weights_get_scales_in_float32() -> None:
    weight = torch.randn(4, 64) * 0.02
    format = Integer(4, group=32, scale_dtype="float16")
    assert with_wide_scales(format, weight) == format
    assert with_wide_scales(format, weight * 1e-2) == replace(format, scale_dtype="float32")


def test_names_of_formats() -> None:
    assert format_named("int4") == Integer(4, False, 64, "float16")
    assert format_named("int8") == Integer(8, True, "channel", "float32")
    assert format_named("int3", "32", True) == Integer(3, True, 32, "float16")
    assert format_named("fp8") == Float("float8_e4m3fn") and format_named("nf4", "32") == NF4(32)
    for name, group, symmetric, expected in [
        ("int9", None, None, "format='int9' is unknown"),
        ("", None, None, "format='' is unknown"),
        ("stored", None, None, "format='stored' is unknown"),
        (None, None, None, "format=None is not a name"),
        ("int4", "0", None, "group='0' is neither"),
        ("int4", "٣٢", None, "group='٣٢' is neither"),
        ("nf4", "٣٢", None, "group='٣٢' of nf4 is a number"),
        ("bf16", "8", None, "has no groups"),
        ("nf4", None, True, "has no zero points"),
    ]:
        with pytest.raises(SpecError, match=expected):
            format_named(name, group, symmetric)


@pytest.mark.ledger("q.half")
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sixteen_bits_are_half_the_bytes_and_hardly_change_the_logits(name: str) -> None:
    quantized, (ids, layout) = model(), sample(1)[0]
    with torch.no_grad():
        before = quantized(ids, layout)
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


def test_laws_hold_for_a_quantized_model() -> None:
    quantized = model()
    quantize_model(quantized, select_layers(quantized, Integer(4, group=16)), "gptq", sample(1))
    assert not broken_laws(quantized, 12, laws=("saved and loaded = original", "LoRA merged = unmerged"))
    assert not broken_laws(quantized, 12, laws=("exported and imported = original", "batched = alone"))
