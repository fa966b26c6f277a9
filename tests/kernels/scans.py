"""Random scans, and the recurrence written out, one token, head and number at a time, in float64."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("none", "constant", "token", "channel")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    state: Tensor
    segments: Tensor | None = None
    valid: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(x.to(dtype) if x is not None and x.is_floating_point() else x for x in self))

    def tokens(self, start: int, stop: int) -> "Case":
        """Only these, with the same state before them."""
        q, k, v, decay, state, segments, valid = self
        decay = decay if decay is None or decay.dim() == 1 else decay[:, :, start:stop]
        packed = None if segments is None else segments[:, start:stop]
        known = None if valid is None else valid[:, start:stop]
        return Case(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], decay, state, packed, known)


def draw(
    kind: str,
    batch: int = 2,
    groups: int = 2,
    shared: int = 1,
    length: int = 7,
    keys: int = 3,
    values: int = 2,
    packed: bool = False,
    padded: bool = False,
    strength: float = 1.0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = groups * shared
    shape = {"constant": (heads,), "token": (batch, heads, length), "channel": (batch, heads, length, keys)}
    return Case(
        normal(batch, groups, length, keys),
        normal(batch, groups, length, keys),
        normal(batch, heads, length, values),
        None if kind == "none" else -strength * torch.rand(shape[kind], generator=generator, dtype=torch.float64),
        normal(batch, heads, keys, values),
        (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1) % 3 if packed else None,
        torch.rand(batch, length, generator=generator) < 0.7 if padded else None,
    )


def loop(case: Case) -> tuple[Tensor, Tensor]:
    q, k, v, decay, state, segments, valid = case
    state, out = state.clone(), torch.zeros_like(v)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in v.shape[:3])).tolist():
        g = h * q.shape[1] // v.shape[1]
        if segments is not None and t and segments[b, t] != segments[b, t - 1]:
            state[b, h] = 0
        if valid is None or valid[b, t]:
            for n in range(q.shape[3]):
                fades = 0.0 if decay is None else decay[h] if decay.dim() == 1 else decay[b, h, t]
                fades = fades[n] if decay is not None and decay.dim() == 4 else fades
                state[b, h, n] = state[b, h, n] * torch.as_tensor(fades).exp() + k[b, g, t, n] * v[b, h, t]
        out[b, h, t] = q[b, g, t] @ state[b, h]
    return out, state


cases = st.builds(
    draw,
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shared=st.integers(1, 2),
    length=st.integers(1, 21),
    keys=st.integers(1, 4),
    values=st.integers(1, 3),
    packed=st.booleans(),
    padded=st.booleans(),
    strength=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
