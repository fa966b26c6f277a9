"""Layer patterns: a string of terms, each a change to one block, repeated over the depth.

    3*window(256), full(no_position)          three layers with a window, one with full attention and no positions
    window(64), linear                        window attention and linear attention in alternation
    window(256), full + experts(8, 2)         every other layer with experts instead of its feed-forward

A term is a kind of mask, position, mixer or feed-forward, with its fields in parentheses, in order or by name. A mask's
term also takes fields of the attention: window(256, position=rope(base=500), sinks=true). The other parts of the block
are unchanged; a new mixer copies the fields that it has in common with the old one (heads, positions). `full` attends
to all tokens in an encoder and to all previous tokens in a decoder.
"""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from regard.kernels.attention.mask import Mask
from regard.kinds import KINDS
from regard.models.pattern_parser import LayerTerms, Term, parse
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.position.base import Position
from regard.spec import (
    REGISTERED,
    Spec,
    SpecError,
    class_of,
    field_types,
    kind_of,
    parse_spec,
    require,
    suggest_name,
    to_plain_data,
)

ABBREVIATIONS = {"sinks": "sinks_and_window", "linear": "linear_attention", "convolution": "short_convolution"}
ModelSpec = TypeVar("ModelSpec", bound=Spec)


@dataclass(frozen=True)
class Tiled(Spec):
    """A pattern in a model's `layers`; the model replaces it by what `tile(block, pattern, depth)` returns."""

    block: Block
    pattern: str
    depth: int

    def check(self) -> None:
        self.unpack()

    def unpack(self) -> tuple[Repeat, ...]:
        return tile(self.block, self.pattern, self.depth)


def tile(block: Block, pattern: str, depth: int) -> tuple[Repeat, ...]:
    """The layers of the pattern, repeated up to `depth`."""
    require(depth > 0, f"tiled: depth={depth} must be positive")
    blocks = tuple(b for layer in parse(pattern) for b in [apply_terms(block, layer, pattern)] * layer.times)
    return repeat_blocks(blocks, depth)


def retile(spec: ModelSpec, pattern: str) -> ModelSpec:
    """The same model and depth with this pattern, applied to its first block with attention."""
    layers: tuple[Repeat, ...] = getattr(spec, "layers", ())
    require(len(layers) > 0, f"{spec.kind} has no field `layers`; apply the pattern to one of its stacks")
    require(
        not any(run.tied for run in layers),
        f"{spec.kind}: its layers share weights (tied=True), but those of a pattern do not; set tied=False",
    )
    blocks = [block for run in layers for block in run.blocks]
    base = next(
        (block for block in blocks if any("mask" in field_types(type(s.body)) for s in block.sublayers)), blocks[0]
    )
    depth = sum(run.times * len(run.blocks) for run in layers)
    return dataclasses.replace(spec, layers=tile(base, pattern, depth))


def apply_terms(block: Block, layer: LayerTerms, pattern: str) -> Block:
    try:
        for term in layer.terms:
            block = apply_term(block, term)
    except SpecError as error:
        raise SpecError(f"pattern {pattern!r}: {error}") from None
    return block


def apply_term(block: Block, term: Term) -> Block:
    """The block with the mask, position, mixer or feed-forward of this term."""
    cls = layer_class(term.name)
    index = sublayer_index(block, cls)
    body = block.sublayers[index].body
    new = with_attention_field(body, term, cls) if issubclass(cls, Mask | Position) else with_body(body, term, cls)
    sublayers = list(block.sublayers)
    sublayers[index] = dataclasses.replace(sublayers[index], body=new)
    return dataclasses.replace(block, sublayers=tuple(sublayers))


def layer_class(name: str) -> type[Spec]:
    """The class of a term."""
    parts = [kind for kind, path in KINDS.items() if path.startswith(("regard.kernels.", "regard.parts."))]
    parts += [kind for kind, cls in REGISTERED.items() if cls.kind_table == "parts"]
    kinds = {kind: kind for kind in parts if issubclass(class_of(kind, ""), Mask | Position | Body)} | ABBREVIATIONS
    require(name in kinds, f"there is no mask, position, mixer or feed-forward {name!r}; {suggest_name(name, kinds)}")
    return class_of(kinds[name], "")


def sublayer_index(block: Block, cls: type[Spec]) -> int:
    """Index of the sublayer that a term of this class changes: the first that has such a field or is such a body."""
    field = "mask" if issubclass(cls, Mask) else "position" if issubclass(cls, Position) else None

    def fits(sublayer: Sublayer) -> bool:
        body = sublayer.body
        if isinstance(body, CrossAttention):
            return False
        return field in field_types(type(body)) if field else issubclass(cls, Body) and body.mixes == cls.mixes

    indices = [index for index, sublayer in enumerate(block.sublayers) if fits(sublayer)]
    kinds = ", ".join(sublayer.body.kind for sublayer in block.sublayers)
    missing = f"has a {field}" if field else "mixes tokens" if getattr(cls, "mixes", False) else "is a feed-forward"
    require(bool(indices), f"the block has {kinds}, and none {missing}; use a block with such a sublayer")
    return indices[0]


def with_attention_field(body: Body, term: Term, cls: type[Spec]) -> Body:
    """The attention with the mask or position of this term, and with the term's fields of the attention."""
    field = "mask" if issubclass(cls, Mask) else "position"
    part_fields, body_fields = field_types(cls), field_types(type(body))
    part = Term(term.name, [a for a in term.positional if not isinstance(a, Term)], {})
    changed: dict[str, Any] = {}
    for argument in (a for a in term.positional if isinstance(a, Term)):
        require(
            issubclass(class_of(argument.name, term.name), Position),
            f"{term.name}: {argument.name} needs the name of a field, as in field={argument.name}",
        )
        changed["position"] = argument
    for name, value in term.named.items():
        require(
            name in part_fields or name in body_fields,
            f"{term.name} has no {name!r}; {suggest_name(name, {*part_fields, *body_fields})}",
        )
        (part.named if name in part_fields else changed)[name] = value
    data = term_data(part, cls)
    old_mask = getattr(body, "mask", None)
    causal = old_mask is None or old_mask.causal
    if cls is class_of("full", "") and causal:
        data = old_mask and {"kind": "causal"}  # None: the model chooses the mask
    elif "causal" in part_fields:
        data = {"causal": causal} | data
    changed_data = {name: field_data(value, body_fields[name]) for name, value in changed.items()}
    return parse_spec(body.to_dict() | changed_data | {field: data}, term.name)  # ty: ignore[invalid-return-type]


def with_body(body: Body, term: Term, cls: type[Spec]) -> Body:
    """The body of this term, with the fields that it has in common with the old body; experts wrap the old body."""
    fields = field_types(cls)
    copied = {name: to_plain_data(getattr(body, name)) for name in field_types(type(body)) if name in fields}
    copied = {name: value for name, value in copied.items() if value is not None}
    if "expert" in fields:
        copied["expert"] = body.to_dict()
    return parse_spec(copied | term_data(term, cls), term.name)  # ty: ignore[invalid-return-type]


def term_data(term: Term, cls: type[Spec]) -> dict[str, Any]:
    """The term as plain data of a spec; positional values fill the fields in order."""
    expected = field_types(cls)
    require(
        len(term.positional) <= len(expected),
        f"{term.name} takes {len(expected)} values ({', '.join(expected) or 'none'}), found {len(term.positional)}",
    )
    positional = dict(zip(expected, term.positional, strict=False))
    for name in term.named:
        require(name not in positional, f"{term.name}: {name} is given twice; remove one")
        require(name in expected, f"{term.name} has no {name!r}; {suggest_name(name, expected)}")
    values = positional | term.named
    return {"kind": kind_of(cls)} | {name: field_data(value, expected[name]) for name, value in values.items()}


def field_data(value: Any, hint: Any) -> Any:
    """The value as plain data; a term becomes a string if the field takes strings, else a spec."""
    if isinstance(value, list):
        return [field_data(v, hint) for v in value]
    if not isinstance(value, Term):
        return value
    choices = [hint, *typing.get_args(hint)]
    if any(h is str or typing.get_origin(h) is typing.Literal for h in choices):
        return value.name
    return term_data(value, class_of(value.name, value.name))
