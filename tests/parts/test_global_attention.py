"""Attention with separate projections of global tokens equals plain loops, also for padded and packed rows."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.parts.global_attention import GlobalAttention, GlobalAttentionModule
from regard.spec import SpecError
from tests.laws import error, layout_with_padding
from tests.parts.attention_layer import random

WIDTH, LENGTH = 12, 9
SPEC = GlobalAttention(3, mask=Longformer(2, globals=2), bias=True)


def build(spec: GlobalAttention) -> GlobalAttentionModule:
    module = spec.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n)
    return module


def plain_loop(module: GlobalAttentionModule, x: Tensor) -> Tensor:
    """One sequence (L, D), token by token and head by head."""
    weight, out = module.state_dict(), torch.zeros(len(x), WIDTH, dtype=x.dtype)

    def project(name: str, token: Tensor) -> Tensor:
        return (weight[f"{name}_proj.weight"] @ token + weight[f"{name}_proj.bias"]).view(3, -1)

    for i, token in enumerate(x):
        prefix = "of_globals." if i < 2 else ""
        allowed = [j for j in range(len(x)) if i < 2 or j < 2 or abs(i - j) <= 2]
        q = project(f"{prefix}q", token)
        keys, values = ([project(f"{prefix}{letter}", x[j]) for j in allowed] for letter in "kv")
        heads = []
        for head in range(3):
            scores = torch.stack([q[head] @ k[head] / 2 for k in keys])  # √4
            heads.append(sum(w * v[head] for w, v in zip(scores.softmax(0), values, strict=True)))
        out[i] = weight["o_proj.weight"] @ torch.cat(heads) + weight["o_proj.bias"]
    return out


def test_equals_plain_loops() -> None:
    module, x = build(SPEC), random(2, LENGTH, WIDTH)
    found = module(x, TokenLayout.whole(2, LENGTH))
    assert error(found, torch.stack([plain_loop(module, row) for row in x])) <= 1e-12


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_global_tokens_are_chosen_by_position_not_by_slot(left: bool) -> None:
    module, x, layout = build(SPEC), random(2, LENGTH, WIDTH), layout_with_padding([4, LENGTH], LENGTH, left)
    found = module(x, layout)
    for row in range(2):
        assert error(found[row, layout.valid[row]], plain_loop(module, x[row, layout.valid[row]])) <= 1e-12


def test_every_document_of_a_packed_row_has_its_own_global_tokens() -> None:
    module, x = build(SPEC), random(1, 8, WIDTH)
    layout = TokenLayout(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]), torch.tensor([[0] * 5 + [1] * 3]))
    expected = torch.cat([plain_loop(module, x[0, :5]), plain_loop(module, x[0, 5:])])
    assert error(module(x, layout)[0], expected) <= 1e-12


def test_gradients_equal_finite_differences_and_reach_both_sets_of_projections() -> None:
    module, x = build(SPEC), random(1, 5, WIDTH).requires_grad_()
    assert gradcheck(lambda x: module(x, TokenLayout.whole(1, 5)), (x,), fast_mode=True)
    module(x, TokenLayout.whole(1, 5)).square().sum().backward()
    assert all(p.grad.any() for n, p in module.named_parameters() if not n.endswith("k_proj.bias"))


def test_without_global_tokens_their_projections_are_unused() -> None:
    module, x = build(GlobalAttention(3, mask=Window(2, causal=False))), random(1, LENGTH, WIDTH)
    before = module(x, TokenLayout.whole(1, LENGTH))
    for parameter in module.of_globals.parameters():
        parameter.data.zero_()
    assert torch.equal(module(x, TokenLayout.whole(1, LENGTH)), before)


def test_a_causal_mask_is_refused() -> None:
    with pytest.raises(SpecError, match="mask=.* is causal, but global tokens attend to all"):
        GlobalAttention(3, mask=Longformer(2, causal=True))
