"""A model as a tree of its parts, drawn from the spec: blocks that repeat are folded, and every part has its costs.

    part_tree(spec, length)["stacks"][0]["runs"][0]      {"times": 30, "first": 0, "blocks": [{"sublayers": …}]}

A part has its kind, its name in the model (which the lens takes too), the class and source of its module, the shapes of
its weights, and at a chosen length its FLOPs per token and the bytes of its cache. Parameters are counted once, at
their first use, so a tied head has none.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any

from torch import nn

from regard.kernels.attention.mask import Mask
from regard.models.base import Model, build_on_meta
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.heads import Hidden
from regard.models.stack import Repeat, without_repeats
from regard.parts.block import Block
from regard.parts.body import Body
from regard.parts.norm import NoNorm
from regard.parts.position.base import NoPosition
from regard.planning.cost import body_cache_bytes
from regard.planning.flops import body_flops, embedding_projection_size, head_flops
from regard.planning.model_plan import plan
from regard.planning.parameters import stacks
from regard.spec import Spec

ABSENT = nn.Identity | Hidden
# Children of a stack's module that have no spec of their own: their kind in the tree
PLAIN_KINDS = {"embedding": "embedding", "widen": "projection", "narrow": "projection", "head": "unembedding"}


def part_tree(spec: Model, length: int, dtype: str = "float32") -> dict[str, Any]:
    """dtype: format of the cache and the weights."""
    return Drawing(spec, length, dtype).tree()


class Drawing:
    def __init__(self, spec: Model, length: int, dtype: str):
        self.spec, self.length, self.dtype = spec, length, dtype
        self.short = build_on_meta(without_repeats(spec))  # each run once: only its shapes are read
        self.counted: set[nn.Parameter] = set()

    def tree(self) -> dict[str, Any]:
        numbers = plan(self.spec, self.length, 1, self.dtype)
        drawn = [self.stack(name, stack) for name, stack in stacks(self.spec).items()]
        others = [
            self.part(name, module, getattr(self.spec, name, None))
            for name, module in self.short.named_children()
            if "" not in stacks(self.spec) and name not in stacks(self.spec) and not isinstance(module, ABSENT)
        ]
        return {
            "kind": self.spec.kind,
            "length": self.length,
            "dtype": self.dtype,
            "totals": {
                "parameters": numbers.parameters,
                "active": numbers.count.active,
                "flops": numbers.forward_flops,
                "cache": numbers.kv_bytes(),
                "state": numbers.state_bytes,
                "weights": numbers.weight_bytes(),
            },
            "stacks": drawn,
            "others": others,
            "sources": sources(self.short),
        }

    def stack(self, name: str, spec: Decoder | Encoder) -> dict[str, Any]:
        module = self.short.get_submodule(name)
        prefix = f"{name}." if name else ""
        before, after, runs = [], [], []
        for child_name, child in module.named_children():
            if child_name == "stack":
                runs = list(self.runs(f"{prefix}stack.blocks", spec, child.get_submodule("blocks")))
            elif child_name != "ahead" and not isinstance(child, ABSENT):
                own = getattr(spec, child_name, None)
                own = own if isinstance(own, Spec) else None
                if isinstance(own, NoPosition | NoNorm):
                    continue
                part = self.part(prefix + child_name, child, own, PLAIN_KINDS.get(child_name, child_name))
                part["flops"] = self.plain_flops(child_name, spec)
                (after if runs else before).append(part)
        ahead = [
            self.block(f"{prefix}ahead.{i}", block, module.get_submodule(f"ahead.{i}"), spec)
            for i, block in enumerate(getattr(spec, "ahead", ()))
        ]
        sizes = {"name": name, "kind": spec.kind, "width": spec.width, "layers": len(spec.blocks)}
        return sizes | {"before": before, "runs": runs, "after": after, "ahead": ahead}

    def runs(self, path: str, spec: Decoder | Encoder, blocks: nn.Module) -> Iterator[dict[str, Any]]:
        """The runs of layers; in a run, equal blocks after each other are one entry with their number."""
        built, first = iter(blocks.children()), 0
        for run in spec.layers:
            entries: list[dict[str, Any]] = []
            for offset, (block, module) in enumerate(zip(run.blocks, built, strict=False)):
                if offset and block == run.blocks[offset - 1]:
                    entries[-1]["times"] += 1
                    self.counted.update(module.parameters())
                    continue
                layer = first + offset
                entries.append(self.block(f"{path}.{layer}", block, module, spec) | {"layer": layer, "times": 1})
            yield {"times": run.times, "tied": run.tied, "first": first, "layers": layers_of(run), "blocks": entries}
            first += layers_of(run)

    def block(self, path: str, spec: Block, module: nn.Module, stack: Decoder | Encoder) -> dict[str, Any]:
        sublayers = []
        for i, sublayer in enumerate(spec.sublayers):
            place = f"sublayers.{i}"
            parts = [
                (name, getattr(sublayer, name), module.get_submodule(f"{place}.{name}"))
                for name in ("norm", "body", "after")
            ]
            sublayers.append(
                {
                    name: self.part(f"{path}.{place}.{name}", child, own, stack=stack)
                    for name, own, child in parts
                    if own is not None and not isinstance(own, NoNorm)
                }
            )
            if sublayer.scale is not None:
                sublayers[-1]["scale"] = self.scale(f"{path}.{place}", module.get_submodule(place))
        drawn = {"name": path, "style": spec.style, "keep": spec.keep, "share": spec.share, "sublayers": sublayers}
        if spec.norm is not None:
            drawn["norm"] = self.part(f"{path}.norm", module.get_submodule("norm"), spec.norm)
        return drawn

    def part(
        self,
        name: str,
        module: nn.Module,
        spec: Spec | None,
        kind: str | None = None,
        stack: Decoder | Encoder | None = None,
    ) -> dict[str, Any]:
        new = [parameter for parameter in module.parameters() if parameter not in self.counted]
        self.counted.update(new)
        part = {
            "name": name,
            "kind": kind if spec is None else spec.kind,
            "class": class_name(type(module)),
            "parameters": sum(parameter.numel() for parameter in dict.fromkeys(new)),
            "weights": {name: list(parameter.shape) for name, parameter in module.named_parameters()},
            "settings": {} if spec is None else settings(spec),
            "inner": [] if spec is None else list(inner_parts(spec)),
            "flops": 0,
            "cache": 0,
        }
        if isinstance(spec, Body) and stack is not None:
            part["flops"] = body_flops(spec, stack.width, self.length, self.length) // self.length
            if isinstance(stack, Decoder):  # an encoder reads its whole input at once
                part["cache"] = body_cache_bytes(spec, stack.width, self.length, self.dtype)
        return part

    def scale(self, name: str, sublayer: nn.Module) -> dict[str, Any]:
        """The learned vector that multiplies the output of a body (LayerScale), a parameter of the sublayer."""
        size = sublayer.get_parameter("scale").numel()
        return {
            **self.part(name, nn.Identity(), None, "layer_scale"),
            "class": class_name(type(sublayer)),
            "parameters": size,
            "weights": {"scale": [size]},
        }

    def plain_flops(self, child: str, spec: Decoder | Encoder) -> int:
        """Per token, of a module beside the blocks. The head of an encoder is not counted, as in flops.py."""
        if child == "widen":
            return 2 * embedding_projection_size(spec)
        if child == "head" and isinstance(spec, Decoder):
            return head_flops(spec, 1) - 2 * embedding_projection_size(spec)
        return 2 * embedding_projection_size(spec) if child == "narrow" else 0


def layers_of(run: Repeat) -> int:
    return run.times * len(run.blocks)


def settings(spec: Spec) -> dict[str, Any]:
    """The plain values of a spec; those that are None are left out."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    plain = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
    return plain | {name: list(value) for name, value in values.items() if is_numbers(value)}


def is_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(isinstance(item, int | float) for item in value)


def inner_parts(spec: Spec) -> Iterator[dict[str, Any]]:
    """The specs in the fields of a spec: positions, masks, norms of queries, routers, experts …"""
    for field in fields(spec):
        value = getattr(spec, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Spec) and not isinstance(item, NoPosition | NoNorm):
                yield {
                    "field": field.name,
                    "kind": item.kind,
                    "mask": isinstance(item, Mask),
                    "settings": settings(item),
                    "inner": list(inner_parts(item)),
                }


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def sources(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The file, line and forward of the class of every module in the model, by the name of the class."""
    return {class_name(cls): source_of(cls) for cls in dict.fromkeys(type(module) for module in model.modules())}


@lru_cache(maxsize=512)
def source_of(cls: type[nn.Module]) -> dict[str, Any]:
    """`about` is the docstring of its file: the equation, and the paper.

    A class without a forward (a position) is shown whole; one whose file is missing has no source.
    """
    shown: Any = cls if cls.forward is nn.Module.forward else inspect.unwrap(cls.forward)
    about = inspect.getdoc(sys.modules[cls.__module__]) if cls.__module__.startswith("regard.") else inspect.getdoc(cls)
    found = {"class": cls.__qualname__, "file": shown.__module__.replace(".", "/") + ".py", "about": about}
    try:
        lines, line = inspect.getsourcelines(shown)
    except (OSError, TypeError):
        return found | {"line": None, "source": None}
    return found | {"line": line, "source": textwrap.dedent("".join(lines))}
