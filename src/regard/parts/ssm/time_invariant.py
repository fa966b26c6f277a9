"""Time-invariant state spaces as mixers: every channel is a linear system with a state of N numbers.

    x_t = Ā x_{t-1} + B̄ u_t        y_t = C x_t + d u_t        out = W_o σ(y)   or   W_o σ(y) ⊙ sigmoid(W_g σ(y))

A subclass defines A (s4.py). A whole sequence is computed as a convolution and a single token as a step of the
recurrence (kernels/recurrent/state_space). Initial steps Δ are evenly spaced on a log scale, so that channels cover all
time scales. There is no nonlinearity between tokens, and only W_o and W_g mix channels. An encoder's layer may be
bidirectional: the same system is also run from right to left, with its own C.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.kernels.recurrent.implied_map import channel_groups, token_distances
from regard.kernels.recurrent.state_space import state_space
from regard.kernels.recurrent.state_space.kernel import System, flops, kernel
from regard.kernels.recurrent.state_space.transition import Transition
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.state import STATELESS, FixedSize, FixedState, Memory
from regard.parts.tap import MapKind, Tap
from regard.spec import require


@dataclass(frozen=True)
class TimeInvariantSSM(Body):
    mixes: ClassVar[bool] = True
    dense: ClassVar[bool] = False  # whether powers of Ā are full matrices

    state: int = 64  # N per channel: N / 2 pairs of conjugate eigenvalues
    min_step: float = 0.001
    max_step: float = 0.1
    activation: Activation = "gelu"
    gate: bool = True
    bias: bool = False
    bidirectional: bool = False  # set it in encoders

    def check(self) -> None:
        require(
            self.state > 0 and self.state % 2 == 0,
            f"{self.kind}: state={self.state} must be even and positive: eigenvalues come in conjugate pairs",
        )
        require(
            0 < self.min_step <= self.max_step,
            f"{self.kind}: min_step={self.min_step} and max_step={self.max_step} must satisfy 0 < min_step <= max_step",
        )

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    def memory(self, width: int) -> Memory:
        return None if self.bidirectional else FixedSize({"x": (width, self.state)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        kernels = flops(width, self.state, tokens, self.dense, kernels=1 + self.bidirectional)
        return kernels + 2 * tokens * width * width * (1 + self.gate)


class TimeInvariantSSMModule(nn.Module):
    weight_decay = no_muon = ("C", "C_back")  # one row per channel, not a matrix
    attention_taps: tuple[str, ...] = ("v",)
    reads_source = False
    map_kind = MapKind("state space", channels=True)

    def __init__(self, width: int, spec: TimeInvariantSSM):
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(width, 1))  # log Δ
        self.log_decay = nn.Parameter(torch.empty(width, spec.state // 2))  # log -Re λ
        self.turn = nn.Parameter(torch.empty(width, spec.state // 2))  # Im λ: the frequency of the state's rotation
        self.C = nn.Parameter(torch.empty(width, spec.state).normal_())
        self.C_back = nn.Parameter(torch.empty(width, spec.state).normal_()) if spec.bidirectional else None
        self.skip = nn.Parameter(torch.ones(width))
        self.activation = ACTIVATIONS[spec.activation]
        self.o_proj = nn.Linear(width, width, bias=spec.bias)
        self.gate_proj = nn.Linear(width, width, bias=spec.bias) if spec.gate else None
        self.heads = channel_groups(width)  # groups of channels, of the map
        self.v, self.z = Tap(), Tap()  # u and y, (B, L, D)

    @torch.no_grad()
    def initialize(self, spec: TimeInvariantSSM, eigenvalues: Tensor) -> None:
        """Set the same eigenvalues (N/2,) in every channel, and a different step in each."""
        logs = torch.linspace(math.log(spec.min_step), math.log(spec.max_step), len(self.log_step))
        self.log_step.copy_(logs.unsqueeze(-1))
        self.log_decay.copy_((-eigenvalues.real).log())
        self.turn.copy_(eigenvalues.imag)

    @property
    def step(self) -> Tensor:
        """Δ (D, 1), in float64"""
        return self.log_step.double().exp()

    @property
    def eigenvalues(self) -> Tensor:
        """λ (D, N/2), in complex128"""
        return torch.complex(-self.log_decay.double().exp(), self.turn.double())

    def discretise(self) -> tuple[Transition, Tensor]:
        """Ā, and B̄ (D, N), in float64"""
        raise NotImplementedError

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        y = self.activation(self.z(self.convolve(self.v(x), layout, state)))  # (B, L, D)
        out = self.o_proj(y)
        return out if self.gate_proj is None else out * torch.sigmoid(self.gate_proj(y))

    def convolve(self, x: Tensor, layout: TokenLayout, state: FixedState) -> Tensor:
        """y (B, L, D) of the systems of all channels."""
        u = x.to(torch.promote_types(x.dtype, torch.float32))
        system = System(*self.discretise(), self.C.double())
        past = None  # without a state the whole sequence is one convolution
        if state is not STATELESS:
            (past,) = state.read(layout, x=u.new_zeros(len(u), *self.C.shape))  # (B, D, N)
        y, past = state_space(system, u, past, layout.segments, layout.valid)
        if past is not None:
            state.write(layout, x=past)
        if self.C_back is not None:
            segments, valid = (None if marks is None else marks.flip(1) for marks in (layout.segments, layout.valid))
            back = replace(system, c=self.C_back.double())
            y = y + state_space(back, u.flip(1), None, segments, valid)[0].flip(1)
        return (y + self.skip * u).to(x.dtype)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """K_{t-j}, averaged over the channels of each group, and d on the diagonal; it depends on positions only."""
        v = taps["v"]
        dtype, length = torch.promote_types(v.dtype, torch.float32), v.shape[1]
        distance, reads = token_distances(layout.segments, layout.valid, layout.positions)
        system = System(*self.discretise(), self.C.double())
        weights = kernel_map(self.group_means(kernel(system, length, dtype))[heads], distance, reads)
        if self.C_back is not None:
            back = kernel(replace(system, c=self.C_back.double()), length, dtype)
            weights = weights + kernel_map(self.group_means(back)[heads], -distance, reads.mT)
        skip = self.group_means(self.skip.to(dtype))[heads]
        return weights + torch.diag_embed(skip.unsqueeze(-1).expand(len(v), -1, length))

    def group_means(self, x: Tensor) -> Tensor:
        """(D, …) -> (groups, …)"""
        return x.unflatten(0, (self.heads, -1)).mean(1)


def kernel_map(kernels: Tensor, distance: Tensor, reads: Tensor) -> Tensor:
    """Kernels (G, L), distances (B, L, L) and whether the query reads the key -> (B, G, L, L)"""
    return kernels[:, distance.clamp_min(0)].transpose(0, 1) * reads.unsqueeze(1)
