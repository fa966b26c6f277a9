"""A stack of blocks, written as runs: `Repeat((window, window, full), times=4)` tiles three over twelve layers."""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.block import Block, Losses, add
from regard.parts.position.base import Position
from regard.parts.shared_block import tie
from regard.parts.state import FinalState, Memory, State
from regard.parts.tap import Tap
from regard.spec import Spec, require

States = tuple[tuple[State, ...], ...]


@dataclass(frozen=True)
class Repeat(Spec):
    blocks: tuple[Block, ...]
    times: int = 1

    def check(self) -> None:
        require(len(self.blocks) > 0, "repeat: blocks is empty; give at least one Block")
        require(self.times > 0, f"repeat: times={self.times} must be positive")


def unroll(layers: tuple[Repeat, ...]) -> list[Block]:
    """Every block in order of depth."""
    return [block for run in layers for _ in range(run.times) for block in run.blocks]


def tiled(blocks: tuple[Block, ...], depth: int) -> tuple[Repeat, ...]:
    """The blocks over and over, `depth` in all; what does not fit at the end is cut off."""
    times, rest = divmod(depth, len(blocks))
    whole = (Repeat(blocks, times),) if times else ()
    return (*whole, Repeat(blocks[:rest])) if rest else whole


def memories(layers: tuple[Repeat, ...], width: int) -> tuple[tuple[Memory, ...], ...]:
    """What every sublayer of every block remembers, in the nesting in which states are handed to forward."""
    return tuple(block.memory(width) for block in unroll(layers))


def final_states(layers: tuple[Repeat, ...]) -> tuple[tuple[FinalState, ...], ...]:
    """Fresh states for every sublayer, which keep how recurrences end."""
    return tuple(tuple(FinalState() for _ in block.sublayers) for block in unroll(layers))


class Stack(nn.Module):
    def __init__(self, layers: tuple[Repeat, ...], width: int):
        super().__init__()
        self.input = Tap()
        self.blocks = nn.ModuleList(block.build(width) for block in unroll(layers))
        tie(self.blocks)

    def forward(self, x: Tensor, layout: TokenLayout, states: States | None = None) -> tuple[Tensor, Losses]:
        x, total = self.input(x), {}
        layout = layout.with_embeddings(x)
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, losses = block(x, layout, state)
            total = add(total, losses)
        return x, total


def check_shared_bias(position: Position, layers: tuple[Repeat, ...], ahead: tuple[Block, ...] = ()) -> None:
    """Raise SpecError where a stack's bias has a number for other heads than its attentions have."""
    shared = getattr(position, "heads", None)
    blocks = [block for run in layers for block in run.blocks]
    for body in (sublayer.body for block in (*blocks, *ahead) for sublayer in block.sublayers):
        require(
            shared is None or body.bias_heads in (None, shared),
            f"{position.kind}: its table has heads={shared}, but {body.kind} has heads={body.bias_heads}",
        )
