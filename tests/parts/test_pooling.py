"""Pooling by a learned query, and by the first token and the mean of the other tokens, equals plain loops."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from regard.layout import TokenLayout
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.pooling import AttentionPooling, pool, pooled_dim
from regard.verification.trial import randomize_weights
from tests.laws import error, layout_with_padding

WIDTH, HEADS = 12, 3
POOLING = AttentionPooling(CrossAttention(HEADS, bias=True), FeedForward(20, "gelu_tanh"), LayerNorm(1e-6))
PADDED = [(left, row) for left in (False, True) for row in range(3)]


def random_states(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def build_pooling() -> nn.Module:
    module = POOLING.build(WIDTH).double()
    randomize_weights(module, seed=1)
    return module


def pool_in_loops(module: nn.Module, x: Tensor) -> Tensor:
    """Pools x (L, D): attention of the learned query to every token, head by head, and the feed-forward layer."""
    attention, head_dim = module.attention, WIDTH // HEADS
    q, heads = attention.q_proj(module.query)[0], []
    for head in range(HEADS):
        part = slice(head * head_dim, head * head_dim + head_dim)
        keys, values = attention.k_proj(x)[:, part], attention.v_proj(x)[:, part]
        weights = [(q[part] @ key / head_dim**0.5).exp() for key in keys]
        heads.append(sum(w / sum(weights) * value for w, value in zip(weights, values, strict=True)))
    z = attention.o_proj(torch.cat(heads))
    return z + module.feedforward.down_proj(
        nn.functional.gelu(module.feedforward.up_proj(module.norm(z)), approximate="tanh")
    )


@pytest.mark.parametrize(("left", "row"), PADDED)
def test_attention_pooling_equals_plain_loops(left: bool, row: int) -> None:
    module, x, layout = build_pooling(), random_states(3, 6), layout_with_padding([1, 4, 6], 6, left)
    assert error(module(x, layout)[row], pool_in_loops(module, x[row, layout.valid[row]])) <= 1e-12


def test_attention_pooling_of_a_packed_row_is_per_document() -> None:
    module, x = build_pooling(), random_states(1, 7)
    layout = TokenLayout(torch.tensor([[0, 1, 2, 0, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 2, 2, 2]]))
    expected = torch.stack([pool_in_loops(module, x[0, part]) for part in (slice(0, 3), slice(3, 4), slice(4, 7))])
    assert error(module(x, layout)[0], expected) <= 1e-12


def test_attention_pooling_equals_torch() -> None:
    module, x = build_pooling(), random_states(2, 5)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    projections = [module.attention.q_proj, module.attention.k_proj, module.attention.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(module.attention.o_proj.state_dict())
    z = theirs(module.query.expand(2, 1, -1), x, x, need_weights=False)[0]
    expected = z + module.feedforward(module.norm(z))
    assert error(module(x, TokenLayout.whole(2, 5)), expected[:, 0]) <= 1e-12


def test_gradients_equal_finite_differences() -> None:
    module, layout = build_pooling(), layout_with_padding([2, 4], 4)
    names, weights = zip(*module.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, values, strict=True)), (x, layout))

    assert torch.autograd.gradcheck(run, (random_states(2, 4).requires_grad_(), *weights), fast_mode=True)


@pytest.mark.parametrize(("left", "row"), PADDED)
def test_cls_mean_equals_plain_loops(left: bool, row: int) -> None:
    """With one token the mean of the other tokens is zero."""
    x, layout = random_states(3, 6), layout_with_padding([1, 4, 6], 6, left)
    first, *others = x[row, layout.valid[row]]
    mean = sum(others) / len(others) if others else torch.zeros(WIDTH)
    found = pool(x, layout, "cls_mean")
    assert found.shape == (3, pooled_dim(WIDTH, "cls_mean")) == (3, 2 * WIDTH)
    assert error(found[row], torch.cat([first, mean])) <= 1e-12
