"""A whole stack in one kernel: as exact as its single layers, bitwise the same in any batch, and refused elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.adapt.packed_decode import PackedStack, fuse_packed_stack
from regard.adapt.quantized import QuantizedLinear, pack_weights, quantize_linears
from regard.engine.caches import parse_cache
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.runner import reads_pages
from regard.engine.stores.paged import Paged
from regard.formats.base import NumberFormat
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.integers import Integer
from regard.kernels.attention.patterns.window import Window
from regard.kernels.packed import why_no_packed_kernel
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated, SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition
from regard.parts.position.rope import Rope

pytestmark = pytest.mark.skipif(why_no_packed_kernel() is not None, reason=why_no_packed_kernel() or "")
ATTENTION, GATED = Attention(8, kv_heads=2, head_dim=32, position=Rope()), SwiGLU(288)
FORMATS = [GGUFBlocks("q8_0"), GGUFBlocks("q4_0"), GGUFBlocks("q5_1"), Integer(8), Integer(4, group=32)]


def spec(attention: Attention = ATTENTION, gated: Gated = GATED, **options) -> Decoder:
    block = Block((Sublayer(attention, **options), Sublayer(gated)))
    return Decoder(96, 160, (Repeat((block,), 2),))


def build(model: Decoder, format: NumberFormat = FORMATS[0], pack: bool = True) -> DecoderModule:
    built = model.build(seed=0).eval().requires_grad_(False)
    quantize_linears(built, format)
    if pack:
        pack_weights(built)
    return built


def fuse(model: DecoderModule) -> DecoderModule:
    fused = fuse_packed_stack(model)
    assert fused is not None
    return fused


@torch.no_grad()
def hidden(model: DecoderModule, tokens: Tensor, chunks: Sequence[int], valid: Tensor | None = None) -> Tensor:
    """(B, L) tokens in forwards of so many of them -> (B, L, D)"""
    rows, length = tokens.shape
    dtype = next(model.parameters()).dtype
    store, outputs, start = Paged(model.spec.memory(), rows, 64, dtype), [], 0
    for row in range(rows):
        store.reserve(row, length)
    for chunk in chunks:
        positions = torch.arange(start, start + chunk).expand(rows, -1)
        layout = TokenLayout(positions, valid=None if valid is None else valid[:, start : start + chunk])
        states = store.begin_forward(layout, check=False)
        outputs.append(model.hidden(tokens[:, start : start + chunk], layout, states))
        start += chunk
    store.check()
    return torch.cat(outputs, 1)


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("position", [Rope(), Rope(1e5), NoPosition()], ids=str)
def test_hidden_states_are_as_exact_as_those_of_single_layers(format: NumberFormat, position) -> None:
    """The error of rounding x to eight bits, which a wrong operation exceeds by far."""
    model = build(spec(replace(ATTENTION, position=position)), format)
    exact = spec(replace(ATTENTION, position=position)).build(seed=0).eval().requires_grad_(False)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            exact.get_submodule(name).weight = nn.Parameter(layer.weight, requires_grad=False)
    tokens, chunks = ids(2, 40), (7, *(1,) * 33)  # three blocks of the store
    expected = hidden(exact.double(), tokens, chunks)
    found, single = (hidden(m, tokens, chunks) for m in (fuse(model), model))
    errors = [float((y.double() - expected).norm() / expected.norm()) for y in (found, single)]
    assert 0 < errors[0] < 1.2 * errors[1] < 0.03


def test_a_token_does_not_depend_on_the_batch_the_chunks_and_the_threads() -> None:
    model, tokens = fuse(build(spec())), ids(3, 12)
    steps = hidden(model, tokens, [1] * 12)
    assert torch.equal(hidden(model, tokens, [5, 1, 6]), steps)
    assert torch.equal(torch.cat([hidden(model, row[None], [1] * 12) for row in tokens]), steps)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(hidden(model, tokens, [1] * 12), steps)
    finally:
        torch.set_num_threads(threads)


def test_tokens_that_are_not_valid_change_nothing() -> None:
    model, tokens = fuse(build(spec())), ids(3, 8)
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[1] = False
    found, expected = hidden(model, tokens, [4, 1, 3], valid), hidden(model, tokens, [4, 1, 3])
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and found.isfinite().all()


def test_a_number_that_is_not_finite_spoils_its_row_only() -> None:
    model, tokens = fuse(build(spec())), ids(3, 4)
    expected = hidden(model, tokens, [1] * 4)
    model.embedding.weight[95] = torch.nan
    tokens[1, 2] = 95
    tokens[0][tokens[0] == 95], tokens[2][tokens[2] == 95] = 0, 0
    found = hidden(model, tokens, [1] * 4)
    assert found[1, 2:].isnan().all() and found[[0, 2]].isfinite().all()
    assert torch.equal(found[1, :2], expected[1, :2])


def test_long_inputs_and_gradients_use_the_ordinary_modules() -> None:
    model, tokens = build(spec()), ids(2, 20)
    assert torch.equal(hidden(fuse(model), tokens, [20]), hidden(model, tokens, [20]))
    assert torch.equal(fuse(model)(tokens), model(tokens))  # without a store, and with gradients enabled


@pytest.mark.parametrize(
    "other",
    [
        spec(replace(ATTENTION, bias=True)),
        spec(replace(ATTENTION, qk_norm=RMSNorm())),
        spec(replace(ATTENTION, clip=3.0)),
        spec(replace(ATTENTION, softcap=10.0)),
        spec(replace(ATTENTION, sinks=True)),
        spec(replace(ATTENTION, gate="head")),
        spec(replace(ATTENTION, mask=Window(8))),
        spec(replace(ATTENTION, position=Alibi())),
        spec(replace(ATTENTION, position=Rope(share=0.5))),
        spec(replace(ATTENTION, position=Rope(layout="interleaved"))),
        spec(gated=Gated(288, "gelu")),
        spec(gated=SwiGLU(288, limit=2.0)),
        spec(gated=SwiGLU(272)),  # rows of 272 numbers are not packed
        spec(scale=0.1),
        spec(norm=RMSNorm(around_one=True)),
        spec(norm=RMSNorm(1e-3)),
        Decoder(96, 160, (Repeat((Block((Sublayer(ATTENTION), Sublayer(GATED)), share=0.5),)),)),
        Decoder(96, 160, (Repeat((Block((Sublayer(GATED), Sublayer(ATTENTION))),)),)),
        Decoder(96, 160, tuple(Repeat((Block((Sublayer(a), Sublayer(GATED))),)) for a in (ATTENTION, Attention(4)))),
    ],
    ids=lambda model: str(model.layers)[:60],
)  # fmt: skip
def test_stacks_of_another_kind_are_not_fused(other: Decoder) -> None:
    assert fuse_packed_stack(build(other)) is None


def test_stacks_that_are_not_packed_are_not_fused() -> None:
    assert fuse_packed_stack(build(spec(), pack=False)) is None
    model = build(spec())
    model.get_submodule("stack.blocks.1.sublayers.0.body.q_proj").unpack()  # ty: ignore[call-non-callable]
    assert fuse_packed_stack(model) is None


@pytest.mark.parametrize("store", ["paged", "contiguous"])
def test_stores_without_plain_pages_are_not_read(store: str) -> None:
    engine = Engine(build(spec()), rows=2, capacity=64, store=store)
    assert reads_pages(engine.store) == (store == "paged")
    assert parse_cache("int8") is not None
    assert not reads_pages(Engine(build(spec()), rows=2, capacity=64, cache="int8").store)


def test_a_prepared_engine_generates_the_tokens_of_an_ordinary_one() -> None:
    model = build(spec())
    prompts = [ids(1, n)[0].tolist() for n in (40, 3, 9)]
    found = []
    for compile in (True, False):
        engine = Engine(model, rows=2, capacity=64, compile=compile)
        assert isinstance(engine.runner.model.stack, PackedStack) == compile
        requests = [engine.submit(prompt, Sampling(max_new=12, temperature=0)) for prompt in prompts]
        while not engine.idle:
            engine.step()
        found.append([[token.logprob for token in request.new] for request in requests])
    assert (torch.tensor(found[0]) - torch.tensor(found[1])).abs().max() < 0.05
