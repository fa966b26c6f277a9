"""The WKV recurrence of RWKV equals its softmax form: any split, any size of keys, documents and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from regard.kernels.recurrent import wkv as wkv_module
from regard.kernels.recurrent.wkv import EMPTY, Sums, WKVInputs, wkv

F = 3


def empty_state(batch: int, dtype: torch.dtype = torch.float64) -> Sums:
    zeros = torch.zeros(batch, F, dtype=dtype)
    return Sums(zeros, zeros, zeros + EMPTY)


def draw(batch: int, length: int, packed: bool, padded: bool, key_scale: float, seed: int) -> WKVInputs:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, length, F, generator=generator, dtype=torch.float64)
    w, u = torch.randn(2, F, generator=generator, dtype=torch.float64)
    segments = (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1) if packed else None
    valid = torch.rand(batch, length, generator=generator) < 0.7 if padded else None
    return WKVInputs(key_scale * k, v, -w.exp(), u, empty_state(batch), segments, valid)


def softmax_form(k: Tensor, v: Tensor, w: Tensor, u: Tensor, segments: Tensor | None, valid: Tensor | None) -> Tensor:
    """Each output as a softmax over the previous tokens and the token itself."""
    out = torch.zeros_like(v)
    for b in range(k.shape[0]):
        for t in range(k.shape[1]):
            previous = [
                j
                for j in range(t)
                if (valid is None or valid[b, j]) and (segments is None or segments[b, j] == segments[b, t])
            ]
            ages = torch.arange(len(previous) - 1, -1, -1).unsqueeze(-1)
            scores = torch.cat([k[b, previous] + ages * w, (k[b, t] + u)[None]])
            out[b, t] = (scores.softmax(0) * torch.cat([v[b, previous], v[b, t][None]])).sum(0)
    return out


random_inputs = st.builds(
    draw,
    st.integers(1, 2),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.5, 3.0, 200.0]),
    st.integers(0, 99),
)


@given(random_inputs, st.sampled_from([5, 24, 1024]))
def test_wkv_equals_the_softmax_form(inputs: WKVInputs, portion: int) -> None:
    k, v, w, u, _, segments, valid = inputs
    expected = softmax_form(k, v, w, u, segments, valid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wkv_module, "PORTION", portion)
        found, _ = wkv(inputs)
    assert (found - expected).abs().max() < 1e-10


@given(random_inputs, st.integers(1, 74))
def test_split_equals_whole(inputs: WKVInputs, cut: int) -> None:
    k, v, w, u, state, segments, valid = inputs
    cut = cut % k.shape[1]
    if cut == 0:
        return
    if segments is not None:
        segments[:, cut] = segments[:, cut - 1]  # the second call continues the document of its state
    whole, last_state = wkv(inputs)
    outs = []
    for part in (slice(0, cut), slice(cut, None)):
        part_layout = (None if x is None else x[:, part] for x in (segments, valid))
        out, state = wkv(WKVInputs(k[:, part], v[:, part], w, u, state, *part_layout))
        outs.append(out)
    assert (torch.cat(outs, 1) - whole).abs().max() < 1e-10
    scale = (last_state.peak - state.peak).exp()  # the sums are relative to the peaks
    assert (last_state.weight * scale - state.weight).abs().max() < 1e-10


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wkv_module, "CHUNK", 4)
    k, v, w, u, state, segments, valid = draw(2, 10, True, True, 1.0, 0)
    initial_state = Sums(
        torch.randn_like(w).expand(2, -1), torch.rand_like(w).expand(2, -1) + 1, torch.zeros(2, F).double()
    )
    leaves = [x.clone().requires_grad_() for x in (k, v, w, u, *initial_state)]

    def run(k: Tensor, v: Tensor, w: Tensor, u: Tensor, *state: Tensor) -> Tensor:
        return wkv(WKVInputs(k, v, w, u, Sums(*state), segments, valid))[0]

    assert gradcheck(run, leaves, fast_mode=True)


def test_large_keys_do_not_overflow_in_float32() -> None:
    k, v, w, u, _, segments, valid = draw(2, 70, True, True, 1e4, 1)
    in_float32 = [x.float().requires_grad_() for x in (k, v, w, u)]
    out, state = wkv(WKVInputs(*in_float32, empty_state(2, torch.float32), segments, valid))
    assert (out - softmax_form(k, v, w, u, segments, valid)).abs().max() < 1e-3
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in in_float32)
    assert all(x.isfinite().all() for x in state)
