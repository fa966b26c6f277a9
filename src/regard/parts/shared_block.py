"""A block that several layers of a stack share: attention and feed-forward, heard by each layer's own mixer.

    z = F(norm(attention(norm([x ; x₀]))))          x₀: what entered the stack
    out = mixer(norm(x + W z))                      W and the mixer are the layer's own

Layers that give the same number have one block between them, so that attention costs few weights; each may change its
projections by matrices of low rank, P x + B A x, in LoRA's form. What the block says is not added to the stream.
Glorioso et al. 2024 (Zamba, Zamba2).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule
from regard.parts.body import Body
from regard.parts.feedforward import Gated
from regard.parts.norm import Norm, RMSNorm
from regard.parts.state import STATELESS, FixedSize, Memory, State, each
from regard.spec import SpecError, require


@dataclass(frozen=True)
class SharedBlock(Body):
    mixes: ClassVar[bool] = True

    attention: Attention  # over vectors twice as wide as the stream
    feedforward: Gated
    mixer: Body
    number: int = 0
    norm: Norm = RMSNorm()  # before the attention, the feed-forward and the mixer
    attention_rank: int | None = None  # of the layer's own change to queries, keys and values; None: there is none
    rank: int | None = None  # and to the feed-forward

    def check(self) -> None:
        for name in ("attention_rank", "rank"):
            value = getattr(self, name)
            require(value is None or value > 0, f"shared_block: {name}={value} must be positive")
        require(self.mixer.mixes, f"shared_block: {self.mixer.kind} is no mixer; choose one such as mamba2")

    @property
    def causal(self) -> bool:
        return self.attention.causal and self.mixer.causal

    @property
    def bias_heads(self) -> int | None:
        return self.attention.bias_heads

    @property
    def max_exact_cache(self) -> int | None:
        return self.attention.max_exact_cache

    @property
    def max_keys(self) -> int | None:
        return self.attention.max_keys

    def attention_sizes(self, width: int) -> tuple[int, int, int]:
        return self.attention.sizes(2 * width)

    def build(self, width: int) -> nn.Module:
        self.memory(width)  # refuses a mixer that remembers tokens
        return SharedBlockModule(width, self)

    def memory(self, width: int) -> Memory:
        behind = self.mixer.memory(width)
        if not isinstance(behind, FixedSize):
            raise SpecError(
                f"shared_block: {self.mixer.kind} remembers tokens, as its attention does; choose a recurrence instead"
            )
        return *each(self.attention.memory(2 * width)), behind

    def flops(self, width: int, tokens: int, seen: int) -> int:
        heads, kv_heads, head_dim = self.attention.sizes(2 * width)
        parts = (self.attention, 2 * width), (self.feedforward, width), (self.mixer, width)
        out = width * (width - heads * head_dim)  # W, less what the attention's last matrix is narrower
        low = (self.attention_rank or 0) * (6 * width + (heads + 2 * kv_heads) * head_dim)
        low += 2 * (self.rank or 0) * (width + self.feedforward.hidden_dim(width))
        return sum(part.flops(size, tokens, seen) for part, size in parts) + 2 * tokens * (out + low)


class SharedBlockModule(nn.Module):
    def __init__(self, width: int, spec: SharedBlock):
        super().__init__()
        self.spec = spec
        self.block = GlobalModule(width, spec)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.norm = spec.norm.build(width)
        self.mixer = spec.mixer.build(width)

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        return self.mixer(self.norm(x + self.o_proj(self.block(x, layout, state))), layout, state)


class GlobalModule(nn.Module):
    """What is shared, but for the adapters in it."""

    def __init__(self, width: int, spec: SharedBlock):
        super().__init__()
        self.attention_norm = spec.norm.build(2 * width)
        self.attention = AttentionModule(2 * width, spec.attention, out_width=width)
        self.feedforward_norm = spec.norm.build(width)
        self.feedforward = spec.feedforward.build(width)
        if spec.attention_rank is not None:
            for name in ("q_proj", "k_proj", "v_proj"):
                adapt(self.attention, name, nn.Linear(2 * width, spec.attention_rank, bias=False))
        if spec.rank is not None:
            down = nn.Linear(width, spec.rank, bias=False)  # one for both
            for name in ("gate_proj", "up_proj"):
                adapt(self.feedforward, name, down)

    def forward(self, x: Tensor, layout: TokenLayout, state: State) -> Tensor:
        embeddings = x if layout.inputs.embeddings is None else layout.inputs.embeddings
        z = self.attention(self.attention_norm(torch.cat([x, embeddings], -1)), layout, state)  # (B, L, D)
        return self.feedforward(self.feedforward_norm(z))


class Adapted(nn.Module):
    """P x + B A x: a shared projection P, and a change of low rank that is not."""

    def __init__(self, base: nn.Linear, down: nn.Linear):
        super().__init__()
        self.base = base
        self.adapter = nn.Sequential(down, nn.Linear(down.out_features, base.out_features, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def adapt(module: nn.Module, name: str, down: nn.Linear) -> None:
    base = getattr(module, name)
    assert isinstance(base, nn.Linear), f"{name} is no linear layer: {base}"
    setattr(module, name, Adapted(base, down))


def tie(blocks: nn.Module) -> None:
    """Give all shared blocks of one number the weights of the first."""
    first: dict[int, SharedBlockModule] = {}
    for module in blocks.modules():
        if isinstance(module, SharedBlockModule):
            one, other = first.setdefault(module.spec.number, module), module
            require(
                one.spec == replace(other.spec, mixer=one.spec.mixer),
                f"shared_block: number={one.spec.number} is given to blocks that differ; give each its own",
            )
            share(other.block, one.block)


def share(module: nn.Module, first: nn.Module) -> None:
    for name, parameter in first.named_parameters(recurse=False):
        setattr(module, name, parameter)
    for name, child in first.named_children():
        if name != "adapter":
            share(module.get_submodule(name), child)
