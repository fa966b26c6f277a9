"""The names of our modules that most weight tables use, and links for groups of modules."""

from collections.abc import Mapping

from regard.weights.table import Link

BLOCK = "stack.blocks.{i}"
ATTENTION, FEEDFORWARD = f"{BLOCK}.sublayers.0", f"{BLOCK}.sublayers.1"
QKV = tuple(f"{ATTENTION}.body.{proj}_proj.{{leaf}}" for proj in "qkv")
GATE_UP = tuple(f"{FEEDFORWARD}.body.{proj}_proj.{{leaf}}" for proj in ("gate", "up"))


def module_links(prefix: str, names: Mapping[str, str]) -> tuple[Link, ...]:
    """One link per module, for all its tensors; `names` maps the foreign names, after the prefix, to ours."""
    return tuple(Link(f"{prefix}.{name}.{{leaf}}", f"{ours}.{{leaf}}") for name, ours in names.items())


def attention_links(prefix: str, *names: str, ours: str = f"{ATTENTION}.body") -> tuple[Link, ...]:
    """The projections of queries, keys, values and outputs; `names` are their four foreign names."""
    return module_links(prefix, dict(zip(names, (f"{ours}.{proj}_proj" for proj in "qkvo"), strict=True)))
