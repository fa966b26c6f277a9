"""Linear layers with stored weights: outputs, gradients of inputs, what backward keeps, and the kernel of a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.adapt import quantized
from regard.adapt.quantized import QuantizedLinear, pack_weights, quantize_linears
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.kernels.packed import why_no_packed_kernel
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

PACKED = [
    Integer(8), Integer(8, symmetric=False), Integer(8, group="tensor"), Integer(8, False, 64), Integer(4),
    Integer(4, False, 32), Integer(4, True, 64, "float16"),
    *(GGUFBlocks(type) for type in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")),
]  # fmt: skip
needs_kernel = pytest.mark.skipif(why_no_packed_kernel() is not None, reason=why_no_packed_kernel() or "")
FORMATS = [Integer(8), Integer(4, symmetric=False, group=32), Float("float8_e4m3fn"), NF4()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(format: NumberFormat, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, bias).double()
    layer = QuantizedLinear.of(linear, format)
    x = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    weight = format.dequantize(format.quantize(linear.weight), torch.float64)
    y, expected = layer(x), F.linear(x, weight, linear.bias)
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    (found,), (wanted,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if bias else [])
    assert sum(buffer.nbytes for buffer in layer.buffers()) == format.bytes(linear.weight.shape)


def test_backward_keeps_no_dequantized_weight() -> None:
    kept: list[torch.Tensor] = []
    layer = QuantizedLinear.of(nn.Linear(64, 64, bias=False), NF4())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert not any(tensor.numel() == 64 * 64 for tensor in kept)


def test_a_layer_is_restored_from_its_state() -> None:
    first, second = (QuantizedLinear.of(nn.Linear(64, 32), NF4()) for _ in range(2))
    assert not torch.equal(first.weight, second.weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.weight, second.weight)


def build(tied: bool = True) -> DecoderModule:
    block = Block((Sublayer(Attention(4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(160))))
    return Decoder(96, 64, (Repeat((block,), 3),), tied=tied).build(seed=0).eval().requires_grad_(False)


@needs_kernel
@pytest.mark.parametrize("format", PACKED, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_are_the_same_and_products_are_within_the_bound(format: NumberFormat, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 27, bias).requires_grad_(False)
    layer, x = QuantizedLinear.of(linear, format), torch.randn(2, 3, 256)
    state, weight = {name: tensor.clone() for name, tensor in layer.state_dict().items()}, layer.weight.double()
    pack_weights(layer)
    assert layer.packing is not None and not layer.can_pack
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in layer.state_dict().items()
    }
    assert torch.equal(layer.weight.double(), weight)
    expected = F.linear(x.double(), weight, linear.bias.double() if bias else None)
    scale = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    bound = F.linear(scale / 2, weight.abs().unflatten(-1, (-1, 32)).sum(-1))
    with torch.no_grad():
        error = (layer(x).double() - expected).abs()
    assert (error <= bound + 1e-4).all() and error.max() > 0
    packed = sum(buffer.nbytes for buffer in layer.buffers())
    more = 1.2 if format == GGUFBlocks("q2_k") else 1.06  # scales of 4 and 6 bits become 8
    assert packed <= more * format.bytes((32, 256))  # 27 outputs fill four tiles
    assert torch.equal(layer(x), QuantizedLinear.of(linear, format)(x))  # gradients are enabled


@needs_kernel
def test_no_packed_layer_rounds_its_inputs_where_gradients_are_enabled() -> None:
    """Neither those before the first trained weight, whose inputs need no gradient, nor those after it."""
    model, ids = build(), torch.arange(12).view(2, 6)
    quantize_linears(model, Integer(8))
    model.get_submodule("stack.blocks.1.sublayers.0.norm").requires_grad_(True)
    expected = model(ids)
    pack_weights(model)
    assert torch.equal(model(ids), expected) and expected.requires_grad
    with torch.no_grad():
        assert not torch.equal(model(ids), expected)


@needs_kernel
def test_a_packed_layer_is_unpacked_once_when_it_moves_to_another_device() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 8), Integer(4, group=32))
    stored = {name: (tensor.shape, tensor.dtype) for name, tensor in layer.stored.items()}
    pack_weights(layer)
    layer.double().float()
    assert layer.packing is not None
    layer.to("meta")
    assert layer.packing is None and "packed" not in dict(layer.named_buffers())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in layer.stored.items()} == stored


@needs_kernel
def test_formats_and_shapes_that_the_kernel_does_not_read_stay_as_they_are() -> None:
    layers = nn.ModuleList(
        [
            QuantizedLinear.of(nn.Linear(64, 8), NF4()),
            QuantizedLinear.of(nn.Linear(48, 8), Integer(8)),
            QuantizedLinear.of(nn.Linear(64, 8), Integer(4, group=16)),
            QuantizedLinear.of(nn.Linear(64, 8), GGUFBlocks("iq4_nl")),
            QuantizedLinear.of(nn.Linear(64, 8).double(), Integer(8)),
        ]
    )
    pack_weights(layers)
    assert [layer.packing for layer in layers] == [None] * 5


@pytest.mark.oldest
@pytest.mark.ledger("eng.quant")
@pytest.mark.parametrize("format", [Integer(8), GGUFBlocks("q8_0")], ids=str)
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_kernel)])
def test_the_engine_generates_with_weights_in_eight_bits(format: NumberFormat, packed: bool) -> None:
    """Equal to the model with the rounded weights up to eight bits of its inputs, to the exact one within 0.1 nats."""
    model, exact, rounded = build(), build(), build()
    assert len(quantize_linears(model, format)) == 3 * 7 + 1  # with the head, which had the matrix of the embedding
    assert model.embedding.weight.equal(exact.embedding.weight)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            rounded.get_submodule(name).weight = nn.Parameter(layer.weight, requires_grad=False)
    if packed:
        pack_weights(model)
    engine = Engine(model, rows=3, capacity=64)
    prompts = [list(range(n)) for n in (40, 3, 9)]
    requests = [engine.submit(prompt, Sampling(max_new=12, temperature=0)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        ids = torch.tensor([[*prompt, *(token.id for token in request.new)]])
        found = torch.tensor([token.logprob for token in request.new])
        for network, bound in ((rounded, 0.06 if packed else 1e-4), (exact, 0.1)):
            expected = network(ids).log_softmax(-1)[0, -13:-1].gather(-1, ids[0, -12:, None])[:, 0]
            assert (found - expected).abs().max() < bound


def test_layers_that_do_not_fit_the_format_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48), nn.Linear(48, 8), nn.Embedding(4, 8))
    assert quantize_linears(model, Integer(4, group=32)) == ["0", "1"]


def test_without_a_kernel_there_is_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(quantized, "why_no_packed_kernel", lambda: "there is no C++ compiler (g++ or clang++)")
    layer = QuantizedLinear.of(nn.Linear(64, 8), Integer(8))
    with pytest.warns(UserWarning, match="slow here: there is no C"):
        pack_weights(layer)
    assert layer.packing is None
