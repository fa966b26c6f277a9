"""One forward, the map of any layer on demand, and no trace on the model's modules."""

import torch

from regard.lens import (
    RecordedAttention,
    attention_layers,
    attention_maps,
    named_attention_maps,
    recorded_attention,
)
from regard.lens.recorded_attention import copy_with_shared_tensors
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.position.rope import Rope
from tests.laws import MODELS, build


def test_the_map_of_each_layer_equals_attention_maps(make_model) -> None:
    model, ids = make_model(), [3, 1, 4, 1, 5]
    recorded = RecordedAttention(model, ids)
    for layer, expected in enumerate(attention_maps(model, ids)):
        found = recorded.weights(layer)
        assert (found is None) == (expected is None)
        if found is not None:
            assert torch.equal(found, expected)
    assert recorded.nbytes > 0


def test_the_copy_shares_the_weights_and_has_no_hooks(make_model) -> None:
    model = make_model()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    copy = copy_with_shared_tensors(model)
    assert [parameter.data_ptr() for parameter in copy.parameters()] == pointers
    assert not {id(module) for module in copy.modules()} & {id(module) for module in model.modules()}
    recorded = RecordedAttention(model, [1, 2])
    assert not seen and recorded.weights(0) is not None
    assert len(model._forward_hooks) == 1
    assert not any(module._forward_hooks for module in model.modules() if module is not model)


def test_some_heads_and_rows_equal_those_of_the_whole_map(make_model) -> None:
    model, ids = make_model(), [3, 1, 4, 1, 5, 9, 2]
    recorded = RecordedAttention(model, ids)
    for layer in range(3):
        if (whole := recorded.weights(layer)) is not None:
            part = recorded.weights(layer, slice(1, 3), slice(0, 7, 3))
            torch.testing.assert_close(part, whole[1:3, 0:7:3])


def test_an_encoder_decoder_has_layers_of_both_stacks_and_of_the_source() -> None:
    def stack(*bodies):
        return (Repeat((Block(tuple(map(Sublayer, bodies))),), 2),)

    heads = Attention(heads=4, position=Rope())
    source = Encoder(Tokens(31), width=16, layers=stack(heads, SwiGLU(24)))
    target = Decoder(vocab=31, width=16, layers=stack(heads, CrossAttention(heads=2), SwiGLU(24)))
    model = EncoderDecoder(source, target).build(seed=1)
    layers = attention_layers(model)
    assert [(layer.stack, layer.index, layer.heads) for layer in layers] == [
        ("encoder", 0, 4), ("encoder", 1, 4), ("decoder", 0, 4), ("decoder", 1, 4), ("cross", 0, 2), ("cross", 1, 2),
    ]  # fmt: skip
    ids, output = [3, 1, 4, 1, 5], [2, 7, 1]
    recorded = RecordedAttention(model, ids, output)
    expected = named_attention_maps(model, torch.tensor([ids]), torch.tensor([output]))
    shapes = [tuple(weights.shape) for i in range(6) if (weights := recorded.weights(i)) is not None]
    assert shapes == [(4, 5, 5)] * 2 + [(4, 3, 3)] * 2 + [(2, 3, 5)] * 2
    torch.testing.assert_close(recorded.weights(5), expected["target.stack.blocks.1.sublayers.1.body"][0])
    torch.testing.assert_close(recorded.weights(5, rows=slice(1, 2)), recorded.weights(5)[:, 1:2])
    assert layers[4].mixers[0].causal is False and layers[2].mixers[0].causal


def test_layers_that_share_a_block_have_a_map_each() -> None:
    block = Block((Sublayer(Attention(heads=2, position=Rope())), Sublayer(SwiGLU(24))))
    model = Decoder(vocab=31, width=16, layers=(Repeat((block,), 3, tied=True),)).build(seed=1)
    recorded = RecordedAttention(model, [1, 2, 3])
    for layer, expected in enumerate(attention_maps(model, [1, 2, 3])):
        torch.testing.assert_close(recorded.weights(layer), expected)


def test_parts_of_an_implied_map_do_not_keep_the_whole_map(monkeypatch) -> None:
    recorded, concatenate = RecordedAttention(build(MODELS["linear"]), [1, 2, 3, 4, 5]), torch.cat
    whole, sizes = recorded.weights(0), []

    def watch(tensors, *args):
        sizes.extend((x.untyped_storage().nbytes(), x.nbytes) for x in tensors if x.shape == (1, 2, 5))
        return concatenate(tensors, *args)

    monkeypatch.setattr(recorded_attention, "MAX_WEIGHTS", 25)  # one head at a time
    monkeypatch.setattr(recorded_attention.torch, "cat", watch)
    torch.testing.assert_close(recorded.weights(0, rows=slice(1, 3)), whole[:, 1:3])
    assert len(sizes) == len(whole) and all(held == needed for held, needed in sizes)
