"""Shared blocks: their equation, weights shared by layers, adapters per layer, and weights saved and counted once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoint import load, save
from regard.checkpoint.model_folder import count_parameters
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import NoNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.shared_block import SharedBlock
from regard.parts.ssm.mamba2 import Mamba2
from regard.spec import SpecError
from regard.verification.trial import randomize_weights

WIDTH = 12
SHARED = SharedBlock(
    Attention(3, position=Rope()), Gated(20, "gelu"), Mamba2(4, 6), norm=RMSNorm(1e-5), attention_rank=2, rank=3
)


def decoder(*bodies: SharedBlock, times: int = 1) -> Decoder:
    blocks = tuple(Block((Sublayer(body, NoNorm()),)) for body in bodies)
    return Decoder(31, WIDTH, (Repeat(blocks, times),))


def layer_bodies(model: nn.Module) -> list[nn.Module]:
    return [block.sublayers[0].body for block in model.stack.blocks]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def block_equation(module: nn.Module, x: Tensor, embeddings: Tensor) -> Tensor:
    """The equation with three heads of width eight, one query at a time."""
    block = module.block
    z = rms(torch.cat([x, embeddings], -1), block.attention_norm.weight)
    q, k, v = (
        (z @ (proj.base.weight + proj.adapter[1].weight @ proj.adapter[0].weight).T).unflatten(-1, (3, 8))
        for proj in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj)
    )
    attended = torch.zeros_like(q)
    for t in range(x.shape[1]):
        scores = torch.einsum("bhe,bshe->bhs", q[:, t], k[:, : t + 1]) / 8**0.5
        attended[:, t] = torch.einsum("bhs,bshe->bhe", scores.softmax(-1), v[:, : t + 1])
    z = rms(attended.flatten(-2) @ block.attention.o_proj.weight.T, block.feedforward_norm.weight)
    gate, up = (
        z @ (proj.base.weight + proj.adapter[1].weight @ proj.adapter[0].weight).T
        for proj in (block.feedforward.gate_proj, block.feedforward.up_proj)
    )
    z = (F.gelu(gate) * up) @ block.feedforward.down_proj.weight.T
    return module.mixer(rms(x + z @ module.o_proj.weight.T, module.norm.weight), TokenLayout.whole(*x.shape[:2]))


def test_equals_the_equation() -> None:
    module = replace(SHARED, attention=Attention(3)).build(WIDTH).double().requires_grad_(False)
    randomize_weights(module)
    x, embeddings = torch.randn(2, 2, 9, WIDTH, dtype=torch.float64)
    found = module(x, TokenLayout.whole(2, 9).with_embeddings(embeddings))
    assert torch.allclose(found, block_equation(module, x, embeddings), rtol=1e-10, atol=1e-10)


def test_a_shared_block_receives_the_embeddings_of_the_stack() -> None:
    model = decoder(SHARED, SHARED).build(seed=0).eval()
    inputs = []
    for body in layer_bodies(model):
        body.block.register_forward_pre_hook(lambda _, args: inputs.append(args[1].inputs.embeddings))
    tokens = torch.arange(8)[None]
    model(tokens)
    assert len(inputs) == 2
    assert all(torch.equal(embeddings, model.embedding(tokens)) for embeddings in inputs)


def test_layers_share_weights_and_have_their_own_adapters() -> None:
    first, second, another_block = layer_bodies(decoder(SHARED, SHARED, replace(SHARED, number=1)).build(seed=0))
    first_parameters = dict(first.named_parameters())
    for name, parameter in second.named_parameters():
        shared = name.startswith("block.") and "adapter" not in name
        assert (parameter is first_parameters[name]) == shared, name
    assert not {id(p) for p in another_block.parameters()} & {id(p) for p in first.parameters()}


def test_shared_weights_are_saved_and_counted_once(tmp_path: Path) -> None:
    spec = decoder(SHARED, times=12)
    model = spec.build(seed=0).eval()
    assert count_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    first, *_, last = layer_bodies(loaded)
    assert last.block.attention.q_proj.base.weight is first.block.attention.q_proj.base.weight
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens))


def test_different_blocks_with_the_same_number_are_refused() -> None:
    with pytest.raises(SpecError, match="shared_block: number=0 is used by blocks that differ"):
        decoder(SHARED, replace(SHARED, rank=None)).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": Attention(3)}, "attention has no state of fixed size"),
        ({"mixer": Gated(4)}, "gated does not mix tokens"),
        ({"rank": 0}, "rank=0 must be positive"),
    ],
    ids=str,
)
def test_invalid_specs_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=f"shared_block: {message}"):
        replace(SHARED, **changes).build(WIDTH)
