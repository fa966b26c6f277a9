"""The names of our tensors that most weight tables use, and links of whole groups of them."""

from collections.abc import Mapping

from regard.weights.table import Link

BLOCK = "stack.blocks.{i}"
ATTENTION, FEEDFORWARD = f"{BLOCK}.sublayers.0", f"{BLOCK}.sublayers.1"
QKV = tuple(f"{ATTENTION}.body.{proj}_proj.{{leaf}}" for proj in "qkv")
GATE_UP = tuple(f"{FEEDFORWARD}.body.{proj}_proj.{{leaf}}" for proj in ("gate", "up"))


def module_links(theirs: str, names: Mapping[str, str]) -> tuple[Link, ...]:
    """One link per module below `theirs`, for all its tensors; names: module name in the checkpoint -> ours."""
    return tuple(Link(f"{theirs}.{name}.{{leaf}}", f"{ours}.{{leaf}}") for name, ours in names.items())


def attention_links(theirs: str, *names: str, ours: str = f"{ATTENTION}.body") -> tuple[Link, ...]:
    """The projections of queries, keys, values and outputs, which have these four names in the checkpoint."""
    return module_links(theirs, dict(zip(names, (f"{ours}.{proj}_proj" for proj in "qkvo"), strict=True)))
