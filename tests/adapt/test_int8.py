"""Linear layers with weights in eight bits, alone and in the engine."""

import pytest
import torch
from torch import nn

from regard.adapt.int8 import MAX_ROWS, Int8Linear, quantize_int8
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope


def build(tied: bool = True) -> DecoderModule:
    block = Block((Sublayer(Attention(4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(160))))
    return Decoder(96, 64, (Repeat((block,), 3),), tied=tied).build(seed=0).eval().requires_grad_(False)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.oldest
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (MAX_ROWS,), (MAX_ROWS + 1,), (0,)])
def test_the_product_is_that_of_the_rounded_weights(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 40, bias=bias).requires_grad_(False)
    linear.weight[3] = 0
    layer, x = Int8Linear(linear), torch.randn(*shape, 48)
    weight = layer.weight.double() * layer.scale.double().unsqueeze(1)
    assert ((weight - linear.weight).abs() <= 0.501 * layer.scale.unsqueeze(1)).all()
    y, expected = layer(x), nn.functional.linear(x.double(), weight, linear.bias.double() if bias else None)
    assert y.shape == expected.shape and y.dtype == torch.float32
    assert y.numel() == 0 or relative_error(y, expected) <= 4e-3  # activations and products are rounded to bfloat16


def test_few_and_many_rows_are_rounded_alike() -> None:
    torch.manual_seed(0)
    layer, x = Int8Linear(nn.Linear(48, 40).requires_grad_(False)), torch.randn(MAX_ROWS + 1, 48)
    few, many = layer(x[:MAX_ROWS]), layer(x)[:MAX_ROWS]
    assert (few == many).float().mean() > 0.98  # sums in another order are rounded to another bfloat16 now and then


@pytest.mark.ledger("eng.quant")
def test_the_engine_generates_with_weights_in_eight_bits() -> None:
    """Equal to the model with the rounded weights up to bfloat16, and to the exact one within a tenth of a nat."""
    model, exact, rounded = build(), build(), build()
    assert len(quantize_int8(model)) == 3 * 7 + 1  # with the head, which had the matrix of the embedding
    assert model.embedding.weight.equal(exact.embedding.weight)
    for name, layer in model.named_modules():
        if isinstance(layer, Int8Linear):
            weight = nn.Parameter(layer.weight * layer.scale.unsqueeze(1), requires_grad=False)
            rounded.get_submodule(name).weight = weight  # the embedding keeps its own
    engine = Engine(model, rows=3, capacity=64)
    prompts = [list(range(n)) for n in (40, 3, 9)]
    requests = [engine.submit(prompt, Sampling(max_new=12, temperature=0)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        ids = torch.tensor([[*prompt, *(token.id for token in request.new)]])
        found = torch.tensor([token.logprob for token in request.new])
        for network, bound in ((rounded, 0.03), (exact, 0.1)):
            expected = network(ids).log_softmax(-1)[0, -13:-1].gather(-1, ids[0, -12:, None])[:, 0]
            assert 0 < (found - expected).abs().max() < bound


def test_weights_take_a_quarter_of_the_memory() -> None:
    model = build(tied=False)
    before = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    quantize_int8(model)
    after = sum(module.weight.nbytes for module in model.modules() if isinstance(module, Int8Linear))
    assert after * 4 == before and not any(isinstance(module, nn.Linear) for module in model.modules())
