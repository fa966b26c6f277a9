"""Random inputs of the linear scan, and the recurrence as a loop over tokens, heads and channels, in float64."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard.kernels.recurrent.linear_scan import ScanInputs

DECAY_KINDS = ("none", "constant", "token", "channel")


def cast(inputs: ScanInputs, dtype: torch.dtype) -> ScanInputs:
    return ScanInputs(*(x.to(dtype) if x is not None and x.is_floating_point() else x for x in inputs))


def select_tokens(inputs: ScanInputs, start: int, stop: int) -> ScanInputs:
    """The inputs of tokens start … stop - 1, with the same initial state."""
    q, k, v, log_decay, state, segments, valid = inputs
    q, k, v = (x[:, :, start:stop] for x in (q, k, v))
    log_decay = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, :, start:stop]
    segments, valid = (None if x is None else x[:, start:stop] for x in (segments, valid))
    return ScanInputs(q, k, v, log_decay, state, segments, valid)


def draw(
    decay_kind: str,
    batch: int = 2,
    key_heads: int = 2,
    heads_per_key: int = 1,
    length: int = 7,
    key_dim: int = 3,
    value_dim: int = 2,
    packed: bool = False,
    padded: bool = False,
    decay_scale: float = 1.0,
    seed: int = 0,
) -> ScanInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = key_heads * heads_per_key
    shapes = {"constant": (heads,), "token": (batch, heads, length), "channel": (batch, heads, length, key_dim)}
    shape = shapes.get(decay_kind)
    return ScanInputs(
        normal(batch, key_heads, length, key_dim),
        normal(batch, key_heads, length, key_dim),
        normal(batch, heads, length, value_dim),
        None if shape is None else -decay_scale * torch.rand(shape, generator=generator, dtype=torch.float64),
        normal(batch, heads, key_dim, value_dim),
        (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1) % 3 if packed else None,
        torch.rand(batch, length, generator=generator) < 0.7 if padded else None,
    )


def loop(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the last state."""
    q, k, v, log_decay, state, segments, valid = inputs
    state, out = state.clone(), torch.zeros_like(v)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in v.shape[:3])).tolist():
        g = h * q.shape[1] // v.shape[1]
        if segments is not None and t and segments[b, t] != segments[b, t - 1]:
            state[b, h] = 0
        if valid is None or valid[b, t]:
            for n in range(q.shape[3]):
                exponent = 0.0 if log_decay is None else log_decay[h] if log_decay.dim() == 1 else log_decay[b, h, t]
                exponent = exponent[n] if log_decay is not None and log_decay.dim() == 4 else exponent
                state[b, h, n] = state[b, h, n] * torch.as_tensor(exponent).exp() + k[b, g, t, n] * v[b, h, t]
        out[b, h, t] = q[b, g, t] @ state[b, h]
    return out, state


random_inputs = st.builds(
    draw,
    decay_kind=st.sampled_from(DECAY_KINDS),
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    heads_per_key=st.integers(1, 2),
    length=st.integers(1, 21),
    key_dim=st.integers(1, 4),
    value_dim=st.integers(1, 3),
    packed=st.booleans(),
    padded=st.booleans(),
    decay_scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
