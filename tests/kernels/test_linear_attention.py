"""Linear attention equals its quadratic form: causal and bidirectional, normalized or not, documents and padding."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.recurrent.linear_attention import bidirectional_linear_attention, linear_attention

B, H, E = 2, 2, 3


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(B, H, length, E, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    state = torch.rand(B, H, E, E + 1, generator=generator, dtype=torch.float64).to(dtype)
    return [q.exp(), k.exp(), v, state]


def documents(length: int) -> Tensor:
    """Document boundaries inside chunks and at their edges, and documents longer than a chunk."""
    segments = torch.zeros(B, length, dtype=torch.int64)
    for b, starts in enumerate([(1, 5, 63, 64, 65, 100), (64, 128)]):
        for start in starts:
            segments[b, start:] += 1
    return segments


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_the_quadratic_form(packed: bool, padded: bool, causal: bool) -> None:
    q, k, v, state = inputs(150)
    segments = documents(150) if packed else None
    valid = torch.rand(B, 150, generator=torch.Generator().manual_seed(1)) > 0.3 if padded else None
    weights = (q @ k.mT).tril() if causal else q @ k.mT  # (B, H, L, L)
    if segments is not None:
        weights = weights * (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)
    if valid is not None:
        weights = weights * valid[:, None, None]
    total = weights.sum(-1, keepdim=True)
    expected = (weights @ v / total).where(total > 0, 0.0)
    if causal:
        found, _ = linear_attention(q, k, v, torch.zeros_like(state), segments, valid)
    else:
        found = bidirectional_linear_attention(q, k, v, segments, valid)
    assert (found - expected).abs().max() < 1e-11
    if causal:
        unnormalized, _ = linear_attention(q, k, v, torch.zeros_like(v[:, :, :E]), segments, valid, normalize=False)
    else:
        unnormalized = bidirectional_linear_attention(q, k, v, segments, valid, normalize=False)
    assert (unnormalized - weights @ v).abs().max() < 1e-11 * weights.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_and_output_stay_in_float32(dtype: torch.dtype) -> None:
    q, k, v, state = inputs(5)
    out, last_state = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), state.float())
    assert (
        out.dtype
        == last_state.dtype
        == bidirectional_linear_attention(q.to(dtype), k.to(dtype), v.to(dtype)).dtype
        == torch.float32
    )


def test_gradcheck() -> None:
    tensors = [x.requires_grad_() for x in inputs(7)]
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]])
    valid = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    assert gradcheck(lambda *x: linear_attention(*x, segments, valid), tensors, fast_mode=True)
    assert gradcheck(lambda *x: bidirectional_linear_attention(*x, segments, valid), tensors[:3], fast_mode=True)


def test_without_valid_keys_the_output_is_zero_with_finite_gradients() -> None:
    q, k, v, state = (x.requires_grad_() for x in inputs(3))
    out, _ = linear_attention(q, k, v, torch.zeros_like(state), valid=torch.zeros(B, 3, dtype=torch.bool))
    assert not out.any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))
