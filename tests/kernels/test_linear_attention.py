"""The chunked computation against the recurrence written out, one token and one number at a time."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels import linear_attention as kernel
from regard.kernels.linear_attention import linear_attention

B, H, E = 2, 2, 3


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(B, H, length, E, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    state = torch.rand(B, H, E, E + 1, generator=generator, dtype=torch.float64).to(dtype)
    return [q.exp(), k.exp(), v, state]


def recurrence(q, k, v, state, segments=None, valid=None) -> tuple[Tensor, Tensor]:
    state, out = state.clone(), torch.zeros_like(v)
    for b in range(B):
        for t in range(q.shape[2]):
            if segments is not None and t and segments[b, t] != segments[b, t - 1]:
                state[b] = 0
            for h in range(H):
                if valid is None or valid[b, t]:
                    state[b, h, :, :-1] += torch.outer(k[b, h, t], v[b, h, t])
                    state[b, h, :, -1] += k[b, h, t]
                out[b, h, t] = (q[b, h, t] @ state[b, h, :, :-1]) / (q[b, h, t] @ state[b, h, :, -1])
    return out, state


def documents(length: int) -> Tensor:
    """Borders inside chunks, at their edges, and documents longer than a chunk."""
    borders = torch.zeros(B, length, dtype=torch.int64)
    for b, places in enumerate([(1, 5, 63, 64, 65, 100), (64, 128)]):
        for place in places:
            borders[b, place:] += 1
    return borders


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("padded", [False, True], ids=["valid", "padded"])
def test_chunks_are_the_recurrence(length: int, packed: bool, padded: bool) -> None:
    q, k, v, state = inputs(length)
    segments = documents(length) if packed else None
    valid = torch.rand(B, length, generator=torch.Generator().manual_seed(1)) > 0.3 if padded else None
    if padded:  # a document that begins with padding has seen nothing there, and its output is not asked for
        valid[:, 0] = True
    found, expected = linear_attention(q, k, v, state, segments, valid), recurrence(q, k, v, state, segments, valid)
    seen = torch.ones(B, length, dtype=torch.bool) if valid is None else valid
    assert (found[0] - expected[0])[seen[:, None, :, None].expand_as(v)].abs().max() < 1e-10
    assert (found[1] - expected[1]).abs().max() < 1e-10
    assert found[0].isfinite().all()


@pytest.mark.parametrize("cut", range(1, 12))
def test_any_split_is_the_whole(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK", 4)
    q, k, v, state = inputs(12)
    whole, last = linear_attention(q, k, v, state)
    first, middle = linear_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], state)
    second, end = linear_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], middle)
    assert (torch.cat([first, second], 2) - whole).abs().max() < 1e-12
    assert (end - last).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_stays_in_its_own_precision(dtype: torch.dtype) -> None:
    q, k, v, state = inputs(5)
    out, after = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), state.float())
    assert out.dtype == after.dtype == torch.float32


def test_autocast_changes_nothing() -> None:
    tensors = inputs(150, torch.float32)
    expected = linear_attention(*tensors, documents(150))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_attention(*tensors, documents(150))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK", 3)
    tensors = [x.requires_grad_() for x in inputs(7)]
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]])
    valid = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    assert gradcheck(lambda *x: linear_attention(*x, segments, valid), tensors, fast_mode=True)


def test_nothing_seen_gives_zero_and_finite_gradients() -> None:
    q, k, v, state = (x.requires_grad_() for x in inputs(3))
    out, _ = linear_attention(q, k, v, torch.zeros_like(state), valid=torch.zeros(B, 3, dtype=torch.bool))
    assert not out.any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))
