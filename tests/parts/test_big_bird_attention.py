"""BigBird's attention in evaluation equals plain loops, also for padded and packed rows; invalid specs."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.attention import backend
from regard.kernels.attention.mask import Causal
from regard.layout import TokenLayout
from regard.parts.big_bird_attention import BigBirdAttention, BigBirdAttentionModule
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from tests.laws import error, layout_with_padding
from tests.parts.attention_layer import random

WIDTH, LENGTH = 12, 17
SPEC = BigBirdAttention(3, block=2, links=1)  # up to 14 tokens every query attends to all keys


def build() -> BigBirdAttentionModule:
    module = SPEC.build(WIDTH).double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=n)
    return module


def attended_keys(i: int, length: int) -> list[int]:
    """The keys that token i attends to; a key of two selected blocks occurs twice."""
    blocks = [range(n, min(n + 2, length)) for n in range(0, length, 2)]
    query_block, last = i // 2, len(blocks) - 1
    if query_block in (0, last) or length <= 14:
        return [*range(length)]
    selected = {0, query_block - 1, query_block, query_block + 1, last}
    return [j for n in [*sorted(selected), 0] for j in blocks[n]]  # the random block is always the first


def plain_loop(module: BigBirdAttentionModule, x: Tensor) -> Tensor:
    q, k, v = (proj(x).unflatten(-1, (3, -1)) for proj in (module.q_proj, module.k_proj, module.v_proj))  # (L, H, E)
    out = []
    for i in range(len(x)):
        keys = attended_keys(i, len(x))
        weights = torch.einsum("he,jhe->hj", q[i], k[keys]).div(2).softmax(-1)  # √4
        out.append(torch.einsum("hj,jhe->he", weights, v[keys]).flatten())
    return module.o_proj(torch.stack(out))


@pytest.mark.parametrize("length", [1, 13, 14, 15, 16, 17])
@torch.no_grad()
def test_equals_plain_loops(length: int) -> None:
    module, x = build(), random(2, length, WIDTH)
    expected = torch.stack([plain_loop(module, row) for row in x])
    assert error(module(x, TokenLayout.whole(2, length)), expected) <= 1e-12
    module.attend = backend("reference")
    assert error(module(x, TokenLayout.whole(2, length)), expected) <= 1e-12


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@torch.no_grad()
def test_padding_does_not_change_the_last_block(left: bool) -> None:
    module, x, layout = build(), random(3, LENGTH, WIDTH), layout_with_padding([5, 15, LENGTH], LENGTH, left)
    found = module(x, layout)
    for row in range(3):
        assert error(found[row, layout.valid[row]], plain_loop(module, x[row, layout.valid[row]])) <= 1e-12


@torch.no_grad()
def test_every_document_of_a_packed_row_has_its_own_last_block() -> None:
    module, x = build(), random(1, 36, WIDTH)
    positions = torch.cat([torch.arange(16), torch.arange(20)]).unsqueeze(0)
    layout = TokenLayout(positions, torch.tensor([[0] * 16 + [1] * 20]))
    expected = torch.cat([plain_loop(module, x[0, :16]), plain_loop(module, x[0, 16:])])
    assert error(module(x, layout)[0], expected) <= 1e-12


def test_gradients_equal_finite_differences() -> None:
    module, x = build(), random(1, LENGTH, WIDTH).requires_grad_()
    assert gradcheck(lambda x: module(x, TokenLayout.whole(1, LENGTH)), (x,), fast_mode=True)


def test_invalid_specs_and_backends_are_refused() -> None:
    module, x = build(), random(1, LENGTH, WIDTH)
    module.attend = backend("tiled")
    with pytest.raises(ValueError, match="tiled needs a bias that is a function of positions"):
        module(x, TokenLayout.whole(1, LENGTH))
    with pytest.raises(SpecError, match="because the blocks define the mask"):
        BigBirdAttention(3, mask=Causal())
    with pytest.raises(SpecError, match="set the position of the stack instead"):
        BigBirdAttention(3, position=Rope())
    with pytest.raises(SpecError, match="block=0 must be positive"):
        BigBirdAttention(3, block=0)
