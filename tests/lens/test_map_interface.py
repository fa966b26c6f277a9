"""Attention maps of every model and attention: weights times values are the output, or an error states the reason."""

import pytest
import torch
from torch import Tensor, nn

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.reference import per_head
from regard.layout import TokenLayout
from regard.lens import attention_heads, attention_maps, named_attention_maps, record
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from regard.parts.latent_attention import LatentAttention
from regard.parts.linformer import Linformer
from regard.parts.native_sparse_attention import NativeSparse
from regard.parts.patches import Patches
from regard.parts.scored_attention import ScoredAttention
from regard.verification.trial import randomize_weights

IDS = torch.randint(31, (12,), generator=torch.Generator().manual_seed(3))
NSA = NativeSparse(2, length=4, stride=2, block=4, select=3, window=4)


def build(spec: Decoder | Encoder | EncoderDecoder) -> nn.Module:
    model = spec.build(seed=0).double().eval()
    randomize_weights(model)
    return model.requires_grad_(False)


def stack(*bodies: Body) -> tuple[Repeat, ...]:
    return (Repeat((Block(tuple(Sublayer(body) for body in bodies)),)),)


def decoder(*bodies: Body) -> Decoder:
    return Decoder(31, 16, stack(*bodies))


def encoder(*bodies: Body) -> Encoder:
    return Encoder(Tokens(31), 16, stack(*bodies))


def input_and_output(model: nn.Module, name: str, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The input and the output of a module in a forward of the model."""
    recorded: list[Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, output: recorded.extend([args[0], output]))
    model(*inputs)
    handle.remove()
    return recorded[0], recorded[1]


@pytest.mark.parametrize("layout_name", ["whole", "padded"])
def test_encoder_maps_times_values_are_the_output(layout_name: str) -> None:
    model = build(encoder(Attention(4, 2, mask=Full())))
    layout = TokenLayout.whole(1, 12)
    layout = layout if layout_name == "whole" else TokenLayout(layout.positions, valid=layout.positions < 9)
    with record(model, "*.body.?") as recorded:
        model(IDS[None], layout)
    (weights,) = attention_maps(model, IDS, layout)
    q, v, z = (recorded[f"stack.blocks.0.sublayers.0.body.{tap}"] for tap in "qvz")
    assert (weights @ per_head(v, q)[0] - z[0]).abs().max() <= 1e-12
    assert attention_heads(model) == (4,)


def test_rows_of_vision_encoder_maps_sum_to_one() -> None:
    model = build(Encoder(Patches((4, 4), (8, 8)), 16, stack(Attention(2, mask=Full()))))
    (weights,) = attention_maps(model, torch.randn(3, 8, 8, dtype=torch.float64))
    assert weights is not None and weights.shape[0] == 2 and weights.shape[1] == weights.shape[2] >= 4
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_encoder_decoder_maps_times_values_are_the_outputs() -> None:
    spec = EncoderDecoder(encoder(Attention(2, mask=Full())), decoder(Attention(4), CrossAttention(2)))
    model, source, ids = build(spec), IDS[None, :7], IDS[None]
    with record(model, "*.body.?") as recorded:
        model(source, ids)
    maps = named_attention_maps(model, source, ids)
    assert [tuple(weights.shape) for weights in maps.values()] == [(1, 2, 7, 7), (1, 4, 12, 12), (1, 2, 12, 7)]
    for name, weights in maps.items():
        assert (
            weights @ per_head(recorded[f"{name}.v"], recorded[f"{name}.q"]) - recorded[f"{name}.z"]
        ).abs().max() <= 1e-12
    with pytest.raises(ValueError, match=r"named_attention_maps\(model, \*inputs\), or .* \.source, \.target"):
        attention_maps(model, IDS)
    assert torch.equal(maps["source.stack.blocks.0.sublayers.0.body"][0], attention_maps(model.source, source[0])[0])


@pytest.mark.parametrize("score", ["additive", "dot", "general", "scaled"])
@pytest.mark.parametrize("source", [False, True])
def test_scored_attention_maps_times_states_are_the_output(score: str, source: bool) -> None:
    body = ScoredAttention(heads=2, score=score, source=source)
    if source:
        spec = EncoderDecoder(encoder(Attention(2, mask=Full())), decoder(body))
        model, inputs, name = build(spec), (IDS[None, :7], IDS[None]), "target.stack.blocks.0.sublayers.0.body"
        with record(model, "source.norm") as recorded:
            model(*inputs)
        states = recorded["source.norm"]
    else:
        model, inputs, name = build(decoder(body)), (IDS[None],), "stack.blocks.0.sublayers.0.body"
        states = input_and_output(model, name, *inputs)[0]
    weights = named_attention_maps(model, *inputs)[name]
    context = (weights @ states.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(-2)
    assert (model.get_submodule(name).o_proj(context) - input_and_output(model, name, *inputs)[1]).abs().max() <= 1e-12


def test_global_attention_has_one_map_for_all_tokens() -> None:
    """Global tokens have separate projections; one map has the rows of global and of other tokens."""
    model = build(encoder(GlobalAttention(2, mask=Longformer(2))))
    (weights,) = attention_maps(model, IDS)
    body = "stack.blocks.0.sublayers.0.body"
    with record(model, [f"{body}.v", f"{body}.of_globals.v"]) as recorded:
        model(IDS[None])
    of_globals, others = (weights @ recorded[f"{body}{part}.v"][0] for part in (".of_globals", ""))
    z = torch.where(torch.arange(12)[:, None] < 1, of_globals, others)
    module = model.get_submodule(body)
    assert (
        module.o_proj(z.transpose(0, 1).flatten(-2)) - input_and_output(model, body, IDS[None])[1]
    ).abs().max() <= 1e-12


def test_attention_without_a_map_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="NativeSparseModule.* gated sum of three attentions"):
        attention_maps(build(decoder(NSA)), IDS)
    with pytest.raises(ValueError, match="combinations of tokens"):
        attention_maps(build(encoder(Linformer(2, 16, 4))), IDS)
    mixed = build(Decoder(31, 16, (*stack(Attention(2)), *stack(NSA))))
    assert attention_heads(mixed) == (2, 0)
    with pytest.warns(UserWarning, match=r"no attention map of stack.blocks.1.*gated sum"):
        first, second = attention_maps(mixed, IDS)
    assert first is not None and second is None


class Uniform(nn.Module):
    """An attention that is defined outside the package and not registered."""

    heads, attention_taps, reads_source = 1, (), False

    def forward(self, x: Tensor, layout: TokenLayout, *state: object) -> Tensor:
        return x

    def attention_map(self, taps: dict[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        length = layout.positions.shape[1]
        return torch.full((1, 1, length, length), 1 / length)[:, heads]


def test_a_user_defined_attention_has_a_map() -> None:
    model = build(decoder(Attention(2)))
    model.stack.blocks[0].sublayers[0].body = Uniform()
    (weights,) = attention_maps(model, IDS)
    assert weights is not None and weights.unique().tolist() == [pytest.approx(1 / 12)]


def test_taps_of_a_latent_decode_step_equal_those_of_the_whole_sequence() -> None:
    """A decode step uses the absorbed form; if it is recorded, its taps are those of the expanded form."""
    model = build(decoder(LatentAttention(4, 6, 4, 4)))
    body = "stack.blocks.0.sublayers.0.body"
    store = Contiguous(model.spec.memory(), rows=1, capacity=12, dtype=torch.float64)
    first, last = TokenLayout.whole(1, 11), TokenLayout(torch.tensor([[11]]))
    with record(model, f"{body}.?") as whole:
        expected = model(IDS[None])
    model(IDS[None, :11], first, store.begin_forward(first))
    with record(model, f"{body}.?") as step:
        logits = model(IDS[None, 11:], last, store.begin_forward(last))
    assert (logits[:, 0] - expected[:, -1]).abs().max() <= 1e-9
    for tap in "qkvz":
        of_step, of_whole = step[f"{body}.{tap}"], whole[f"{body}.{tap}"]
        of_whole = of_whole if tap in "kv" else of_whole[:, :, -1:]
        assert of_step.shape == of_whole.shape and (of_step - of_whole).abs().max() <= 1e-9
    layout = last.with_keys(torch.arange(12).expand(1, 12))
    weights = model.get_submodule(body).attention_map({name: step[f"{body}.{name}"] for name in "qk"}, layout)
    assert (weights[0, :, 0] - attention_maps(model, IDS)[0][:, -1]).abs().max() <= 1e-9
