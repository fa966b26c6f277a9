"""Linformer: attention to k linear combinations of the tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.linformer import Linformer, LinformerModule
from regard.parts.split_heads import merge_heads, split_heads
from regard.spec import SpecError
from regard.verification.trial import randomize_weights

WIDTH = 12


def build_randomized(spec: Linformer) -> LinformerModule:
    module = spec.build(WIDTH).double().requires_grad_(False)
    randomize_weights(module)
    return module


def project(module: LinformerModule, x: Tensor) -> list[Tensor]:
    return [split_heads(p(x), module.heads) for p in (module.q_proj, module.k_proj, module.v_proj)]


@pytest.mark.ledger("lin.linformer")
@pytest.mark.parametrize("shared", [False, True])
def test_equals_attention_to_combinations_of_tokens(shared: bool) -> None:
    module, x = build_randomized(Linformer(3, 9, 4, shared)), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    q, k, v = project(module, x)
    E = module.k_length[:, :7]
    F_ = E if shared else module.v_length[:, :7]
    weights = (q @ (E @ k).mT / 2).softmax(-1)
    assert weights.shape == (2, 3, 7, 4)
    assert torch.allclose(
        module(x, TokenLayout.whole(2, 7)), module.o_proj(merge_heads(weights @ (F_ @ v))), atol=1e-12
    )


@pytest.mark.ledger("lin.linformer")
def test_with_identity_projections_equals_attention() -> None:
    module, x = build_randomized(Linformer(3, 7, 7)), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    for length_proj in (module.k_length, module.v_length):
        length_proj.copy_(torch.eye(7))
    q, k, v = project(module, x)
    expected = module.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
    assert torch.allclose(module(x, TokenLayout.whole(2, 7)), expected, atol=1e-12)


def test_padding_does_not_change_outputs() -> None:
    module, x = build_randomized(Linformer(3, 9, 4)), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    alone = module(x, TokenLayout.whole(1, 5))
    padded = torch.cat([torch.full_like(x[:, :2], 1e6), x], 1)
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4]])
    layout = TokenLayout(positions, valid=torch.tensor([[False] * 2 + [True] * 5]))
    assert torch.allclose(module(padded, layout)[:, 2:], alone, atol=1e-12)


@pytest.mark.ledger("lin.linformer")
def test_use_in_a_decoder_is_refused() -> None:
    with pytest.raises(SpecError, match="a token would attend to later ones in Linformer"):
        Decoder(5, WIDTH, (Repeat((Block((Sublayer(Linformer(3, 9, 4)),)),)),))


@pytest.mark.ledger("lin.linformer")
def test_longer_sequences_and_invalid_sizes_are_refused() -> None:
    module = build_randomized(Linformer(3, 9, 4))
    with pytest.raises(ValueError, match="a sequence of 10 tokens is longer than length=9; shorten it"):
        module(torch.randn(1, 10, WIDTH, dtype=torch.float64), TokenLayout.whole(1, 10))
    with pytest.raises(SpecError, match="rank=9 is larger than length=8"):
        Linformer(3, 8, 9)
    with pytest.raises(SpecError, match="width=12 is not divisible by heads=5"):
        Linformer(5, 8, 4).build(WIDTH)


def test_linformer_compiles_as_one_graph() -> None:
    module, x, layout = build_randomized(Linformer(3, 9, 4)), torch.randn(2, 7, WIDTH).double(), TokenLayout.whole(2, 7)
    found = torch.compile(module, fullgraph=True, backend="eager")(x, layout)
    assert torch.allclose(found, module(x, layout), atol=1e-12)
