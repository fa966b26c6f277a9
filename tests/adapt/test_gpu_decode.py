"""Decode steps of the optimized copy equal those of the model, in Triton's interpreter or on a GPU."""

from functools import partial

import pytest
import torch
from torch import nn

from regard.adapt.gpu_decode import (
    CompiledModule,
    DecodeAttention,
    DecodeGated,
    DecodeLinear,
    optimize_for_gpu_decode,
)
from regard.adapt.quantized import QuantizedLinear, quantize_linears
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.formats.base import NumberFormat
from regard.formats.integers import Integer
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, Gated, SwiGLU
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.rope import Rope
from tests.kernels.triton_device import DEVICE

LLAMA = Block((Sublayer(Attention(4, kv_heads=2, head_dim=32, position=Rope())), Sublayer(SwiGLU(96))))
QWEN = Block(
    (
        Sublayer(Attention(4, kv_heads=1, head_dim=32, position=Rope(), qk_norm=RMSNorm(), bias=True)),
        Sublayer(Gated(96, "gelu_tanh", bias=True)),
    )
)
WITHOUT_POSITIONS = Block((Sublayer(Attention(2, head_dim=32)), Sublayer(Gated(96, "gelu"))))
OTHERS = Block(  # attention in pages but with a cap, and a feed-forward layer without a gate
    (
        Sublayer(Attention(2, head_dim=32, position=Rope(), softcap=30.0), LayerNorm()),
        Sublayer(FeedForward(96), LayerNorm()),
    )
)
WINDOW = Block((Sublayer(Attention(2, head_dim=32, position=Rope(), mask=Window(5))), Sublayer(SwiGLU(96))))
EXPERTS = Block((Sublayer(Attention(2, head_dim=32, position=Rope())), Sublayer(Experts(4, 2, SwiGLU(32, bias=True)))))
BLOCKS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "no positions": WITHOUT_POSITIONS,
    "others": OTHERS,
    "window": WINDOW,
    "experts": EXPERTS,
}


def build(block: Block, tied: bool = False, width: int = 48) -> DecoderModule:
    with torch.device(DEVICE):
        model = Decoder(64, width, (Repeat((block,), 2, tied=tied),)).build(seed=0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # weights of norms and biases too
    return model.eval().requires_grad_(False)


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds per operation of a program, so it gets few programs."""
    from regard.kernels import triton_decode_linear, triton_quantized_linear

    def choose(tokens: int, *sizes: object) -> triton_decode_linear.Tiles:
        tiles = triton_decode_linear.Tiles
        return tiles(128, 128, 4, programs=2) if tokens == 1 else tiles(128, 64, 4, 2)

    def choose_quantized(tokens: int, outputs: int, width: int, *sizes: object) -> triton_decode_linear.Tiles:
        return triton_decode_linear.Tiles(128, width if tokens == 1 else 64, 4, 2, programs=2)

    monkeypatch.setattr(triton_decode_linear, "choose_tiles", choose)
    monkeypatch.setattr(triton_quantized_linear, "choose_quantized_tiles", choose_quantized)


@pytest.fixture
def no_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the modules and runs the operations of the graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.parametrize(
    "name, rows, store_type", [(n, r, Paged) for n in BLOCKS for r in (1, 3)] + [("llama", 1, Contiguous)]
)
@torch.inference_mode()
def test_decode_steps_equal_those_of_the_model(
    name: str, rows: int, store_type: type, large_tiles: None, no_code_generation: None
) -> None:
    torch.manual_seed(0)
    model = build(BLOCKS[name])
    lengths = [7, 1, 4][:rows]
    prompts = torch.randint(64, (rows, max(lengths)), device=DEVICE)
    steps = torch.randint(64, (6, rows, 1), device=DEVICE)
    results = []
    for network in (model, optimize_for_gpu_decode(model)):
        store = store_type(model.spec.memory(), rows, 40, torch.float32, DEVICE, slack=2)  # rings wrap around
        for row in range(rows):
            store.reserve(row, 40)
        layout = TokenLayout.padded(lengths, DEVICE)
        logits = [network(prompts, layout, store.begin_forward(layout))[:, 0]]
        for i, tokens in enumerate(steps):
            valid = torch.tensor([[b != 1 or i < 3] for b in range(rows)], device=DEVICE)  # a row that ends
            layout = TokenLayout(torch.tensor([[n + i] for n in lengths], device=DEVICE), valid=valid)
            step = network(tokens, layout, store.begin_forward(layout, check=False))[:, 0]
            logits.append(step.masked_fill(~valid, 0))
        results.append(torch.stack(logits))
    assert (results[0] - results[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("name, format", [("llama", Integer(4, False, 32, "float16")), ("qwen", Integer(8))], ids=str)
@torch.inference_mode()
def test_quantized_sublayers_equal_those_of_the_model(name: str, format: NumberFormat, large_tiles: None) -> None:
    torch.manual_seed(0)
    model = build(BLOCKS[name], width=64)
    quantize_linears(model.stack, format)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy, results, lengths = optimize_for_gpu_decode(model), [], [5, 3]
    assert kinds(copy) == [DecodeAttention, DecodeGated] * 2 + [DecodeLinear]
    prompts, step = torch.randint(64, (2, 5), device=DEVICE), torch.randint(64, (2, 1), device=DEVICE)
    for network in (model, copy):
        for rows in (2, 1):
            store = Paged(model.spec.memory(), rows, 16, torch.float32, DEVICE)
            for row in range(rows):
                store.reserve(row, 16)
            layout = TokenLayout.padded(lengths[:rows], DEVICE)
            results.append(network(prompts[:rows], layout, store.begin_forward(layout))[:, 0])
            layout = TokenLayout(torch.tensor([[n] for n in lengths[:rows]], device=DEVICE))
            results.append(network(step[:rows], layout, store.begin_forward(layout))[:, 0])
    for expected, found in zip(results[:4], results[4:], strict=True):
        assert (expected - found).abs().max() <= (2e-2 if found.is_cuda else 1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} changed"
    attention = copy.stack.blocks[0].sublayers[0]
    body = model.stack.blocks[0].sublayers[0].body
    assert attention.qkv.codes.untyped_storage().data_ptr() == body.k_proj.codes.untyped_storage().data_ptr()


def test_sublayers_of_several_formats_are_not_fused() -> None:
    model = build(LLAMA, width=64)
    body = model.stack.blocks[0].sublayers[0].body
    body.k_proj = QuantizedLinear.of(body.k_proj, Integer(8))
    body = model.stack.blocks[1].sublayers[1].body
    body.gate_proj, body.up_proj = (
        QuantizedLinear.of(layer, Integer(bits)) for layer, bits in ((body.gate_proj, 4), (body.up_proj, 8))
    )
    found = kinds(optimize_for_gpu_decode(model))
    assert [kind for kind in found if kind is not DecodeLinear] == [
        CompiledModule, DecodeGated, DecodeAttention, CompiledModule,
    ]  # fmt: skip


def test_the_model_keeps_its_tensors_and_shares_them_with_the_copy() -> None:
    model = build(LLAMA)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = optimize_for_gpu_decode(model)
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    body = model.stack.blocks[0].sublayers[0].body
    assert body.q_proj.weight.untyped_storage().data_ptr() == body.v_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        body.k_proj.weight.fill_(7.0)
    attention = copy.stack.blocks[0].sublayers[0]
    assert isinstance(attention, DecodeAttention) and (attention.qkv[128:192] == 7.0).all()


def kinds(model: nn.Module) -> list[type]:
    found = (DecodeAttention, DecodeGated, DecodeLinear, CompiledModule)
    return [type(module) for module in model.modules() if isinstance(module, found)]


def test_which_modules_are_replaced() -> None:
    assert kinds(optimize_for_gpu_decode(build(LLAMA))) == [DecodeAttention, DecodeGated] * 2 + [DecodeLinear]
    assert set(kinds(optimize_for_gpu_decode(build(OTHERS)))) == {CompiledModule, DecodeLinear}
    assert kinds(build(LLAMA)) == []


def test_layers_with_tied_weights_share_one_stack() -> None:
    attention = [
        m for m in optimize_for_gpu_decode(build(LLAMA, tied=True)).modules() if isinstance(m, DecodeAttention)
    ]
    assert len(attention) == 2 and attention[0].qkv is attention[1].qkv
