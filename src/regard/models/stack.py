"""A stack of blocks, written as runs: `Repeat((window, window, full), times=4)` is twelve layers.

A tied run has the same weights in every repetition (Dehghani et al. 2019, Universal Transformer; Lan et al. 2020,
ALBERT). Its layers are separate modules that share their parameters, so each has its own state and its own hooks, and a
parameter is saved, counted and trained once, under its name in the first repetition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from regard.kernels.attention.mask import Mask
from regard.layout import TokenLayout
from regard.parts.block import Block, Losses, sum_losses
from regard.parts.body import Body
from regard.parts.position.base import Position
from regard.parts.shared_block import tie_shared_blocks
from regard.parts.state import FinalState, Memory, State
from regard.parts.tap import Tap
from regard.spec import Spec, SpecError, require

States = tuple[tuple[State, ...], ...]
AnySpec = TypeVar("AnySpec", bound=Spec)


@dataclass(frozen=True)
class Repeat(Spec):
    blocks: tuple[Block, ...]
    times: int = 1
    tied: bool = False  # the same weights in every repetition

    def check(self) -> None:
        require(len(self.blocks) > 0, "repeat: blocks is empty; add at least one Block")
        require(self.times > 0, f"repeat: times={self.times} must be positive")


def unroll(layers: tuple[Repeat, ...]) -> list[Block]:
    """Every block in order of depth."""
    return [block for run in layers for _ in range(run.times) for block in run.blocks]


def repeat_blocks(blocks: tuple[Block, ...], depth: int) -> tuple[Repeat, ...]:
    """Runs that repeat the blocks in order up to `depth` layers."""
    times, remainder = divmod(depth, len(blocks))
    runs = (Repeat(blocks, times),) if times else ()
    return (*runs, Repeat(blocks[:remainder])) if remainder else runs


def resolve_masks(layers: Any, mask: Mask) -> Any:
    """The layers with this mask in every body whose mask is None.

    A pattern (`Tiled`) is replaced by its runs, because its terms depend on the mask of its block.
    """
    if not isinstance(layers, list | tuple | Spec):
        return layers
    items = [layers] if isinstance(layers, Spec) else layers
    resolved = [replace_bodies(item, lambda body: body.with_default_mask(mask)) for item in items]
    runs = [run for item in resolved for run in (item.unpack() if isinstance(item, Spec) else (item,))]
    return tuple(replace_bodies(run, lambda body: body.with_default_mask(mask)) for run in runs)


def without_default_masks(layers: tuple[Spec, ...], mask: Mask) -> tuple[Spec, ...]:
    """The inverse of `resolve_masks`: mask=None in every body for which the model would choose this mask."""
    return replace_bodies(layers, lambda body: body.without_default_mask(mask))


def replace_bodies(value: Any, change: Callable[[Body], Body]) -> Any:
    """The spec, or tuple of specs, with every body replaced by `change(body)`."""
    if isinstance(value, Body):
        return change(value)
    if isinstance(value, tuple):
        return tuple(replace_bodies(item, change) for item in value)
    if not isinstance(value, Spec):
        return value
    values = field_values(value)
    changed = {name: new for name, old in values.items() if (new := replace_bodies(old, change)) != old}
    return replace(value, **changed) if changed else value


def state_declarations(layers: tuple[Repeat, ...], width: int) -> tuple[tuple[Memory, ...], ...]:
    """The declared state of every sublayer of every block, nested as forward takes the states."""
    return tuple(block.memory(width) for block in unroll(layers))


def final_states(layers: tuple[Repeat, ...]) -> tuple[tuple[FinalState, ...], ...]:
    """A FinalState for every sublayer of every block."""
    return tuple(tuple(FinalState() for _ in block.sublayers) for block in unroll(layers))


def stacks_of(spec: Spec) -> Iterator[tuple[tuple[Repeat, ...], int]]:
    """Layers and width of every stack in a model's spec, without building it."""
    values = field_values(spec)
    if "layers" in values:
        yield values["layers"], values["width"]
    for value in values.values():
        if isinstance(value, Spec):
            yield from stacks_of(value)


def replace_runs(spec: AnySpec, change: Callable[[Repeat], Repeat]) -> AnySpec:
    """The same model with every run of layers replaced by `change(run)`."""
    values = field_values(spec)
    changed: dict[str, Any] = {
        name: replace_runs(value, change) for name, value in values.items() if isinstance(value, Spec)
    }
    if "layers" in values:
        changed["layers"] = tuple(change(run) for run in values["layers"])
    return replace(spec, **changed)


def without_repeats(spec: AnySpec) -> AnySpec:
    """The same model with times=1 in every run of layers."""
    return replace_runs(spec, lambda run: replace(run, times=1))


def field_values(spec: Spec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


class Stack(nn.Module):
    def __init__(self, layers: tuple[Repeat, ...], width: int):
        super().__init__()
        self.input = Tap()
        self.blocks = nn.ModuleList(block for run in layers for block in build_run(run, width))
        tie_shared_blocks(self.blocks)

    def forward(self, x: Tensor, layout: TokenLayout, states: States | None = None) -> tuple[Tensor, Losses]:
        x, total = self.input(x), {}
        layout = layout.with_embeddings(x)
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, losses = block(x, layout, state)
            total = sum_losses(total, losses)
        return x, total


def build_run(run: Repeat, width: int) -> Iterator[nn.Module]:
    """The blocks of a run in order of depth."""
    first = [block.build(width) for block in run.blocks]
    yield from first
    for _ in range(run.times - 1):
        for block, original in zip(run.blocks, first, strict=True):
            repeated = block.build(width)
            if run.tied:
                share_all_parameters(repeated, original)
            yield repeated


def share_all_parameters(module: nn.Module, original: nn.Module) -> None:
    """Let the module use the parameters of another module of the same structure."""
    for name, parameter in original.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, parameter)


def check_shared_bias(position: Position, layers: tuple[Repeat, ...], ahead: tuple[Block, ...] = ()) -> None:
    """Raise SpecError if an attention ignores the bias of the stack, or has another number of heads than it."""
    heads = getattr(position, "heads", None)
    if heads is None:
        return
    attentions = [body for body in bodies_of(layers, ahead) if body.bias_heads is not None]
    require(len(attentions) > 0, f"{position.kind}: no attention of the stack reads its table; leave position out")
    for body in attentions:
        require(
            body.bias_heads == heads,
            f"{position.kind}: its table has heads={heads}, but {body.kind} has heads={body.bias_heads}; "
            "set the same number in both",
        )
        body_position = getattr(body, "position", position)
        require(
            body_position is position or not body_position.replaces_bias,
            f"{position.kind}: {body.kind} has position={body_position}, which replaces the stack's bias; "
            "choose one of the two",
        )


def check_widths(layers: tuple[Repeat, ...], width: int, ahead: tuple[Block, ...] = ()) -> None:
    """Raise SpecError if a body cannot be built at this width."""
    runs = {f"layers.{i}.blocks": run.blocks for i, run in enumerate(layers)} | {"ahead": ahead}
    for name, blocks in runs.items():
        for i, block in enumerate(blocks):
            for j, sublayer in enumerate(block.sublayers):
                try:
                    sublayer.body.check_width(width)
                except SpecError as error:
                    raise SpecError(error.message, f"{name}.{i}.sublayers.{j}.body") from error


def bodies_of(layers: tuple[Repeat, ...], ahead: tuple[Block, ...] = ()) -> list[Body]:
    """The bodies of all blocks; those of a repeated run are listed once."""
    blocks = [block for run in layers for block in run.blocks]
    return [sublayer.body for block in (*blocks, *ahead) for sublayer in block.sublayers]
