"""Layer patterns: a string of terms, each a change to one block, repeated over the depth.

    3*window(256), full(no_position)          three layers with a window, one with full attention and no positions
    window(64), linear                        window attention and linear attention in alternation
    window(256), full + experts(8, 2)         every other layer with experts instead of its feed-forward

A term is a kind of mask, position, mixer or feed-forward, with its fields in parentheses, in order or by name. A mask's
term also takes fields of the attention: window(256, position=rope(base=500), sinks=true). The rest of the block stays;
a new mixer takes over the fields that it shares with the old one (heads, positions). `full` attends to all tokens in an
encoder and to all previous tokens in a decoder.
"""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from regard.kernels.attention.mask import Mask
from regard.models.pattern_parser import LayerTerms, Term, parse
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.position.base import Position
from regard.spec import (
    KINDS,
    REGISTERED,
    Spec,
    SpecError,
    class_of,
    field_types,
    kind_of,
    nearest,
    parse_spec,
    require,
    to_plain_data,
)

ABBREVIATIONS = {"sinks": "sinks_and_window", "linear": "linear_attention", "convolution": "short_convolution"}
ModelSpec = TypeVar("ModelSpec", bound=Spec)


@dataclass(frozen=True)
class Tiled(Spec):
    """In a model's layers, it is replaced by the runs that its pattern makes from the block."""

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
    require(len(layers) > 0, f"{spec.kind} has no layers of its own; write patterns in its stacks")
    require(
        not any(run.tied for run in layers),
        f"{spec.kind}: its layers share weights (tied=True), and a pattern gives each layer its own; set tied=False",
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
    kinds = {
        kind: kind for kind in (*parts, *REGISTERED) if issubclass(class_of(kind, ""), Mask | Position | Body)
    } | ABBREVIATIONS
    require(name in kinds, f"there is no layer {name!r}; {nearest(name, kinds)}")
    return class_of(kinds[name], "")


def sublayer_index(block: Block, cls: type[Spec]) -> int:
    """Index of the sublayer that a term of this class changes: the first that has such a field or is such a body."""
    field = "mask" if issubclass(cls, Mask) else "position" if issubclass(cls, Position) else None

    def fits(sublayer: Sublayer) -> bool:
        body = sublayer.body
        if isinstance(body, CrossAttention):
            return False
        return field in field_types(type(body)) if field else issubclass(cls, Body) and body.mixes == cls.mixes

    found = [index for index, sublayer in enumerate(block.sublayers) if fits(sublayer)]
    has = ", ".join(sublayer.body.kind for sublayer in block.sublayers)
    what = f"has a {field}" if field else "mixes tokens" if getattr(cls, "mixes", False) else "works within a token"
    require(bool(found), f"the block has {has}, and none {what}; use a block with such a sublayer")
    return found[0]


def with_attention_field(body: Body, term: Term, cls: type[Spec]) -> Body:
    """The attention with the mask or position of this term, and with its other fields."""
    field = "mask" if issubclass(cls, Mask) else "position"
    mine, theirs = field_types(cls), field_types(type(body))
    own = Term(term.name, [a for a in term.positional if not isinstance(a, Term)], {})
    other: dict[str, Any] = {}
    for argument in (a for a in term.positional if isinstance(a, Term)):
        require(
            issubclass(class_of(argument.name, term.name), Position),
            f"{term.name}: {argument.name} needs the name of a field, as in field={argument.name}",
        )
        other["position"] = argument
    for name, value in term.named.items():
        require(name in mine or name in theirs, f"{term.name} has no {name!r}; {nearest(name, {*mine, *theirs})}")
        (own.named if name in mine else other)[name] = value
    data = term_data(own, cls)
    old = getattr(body, "mask", None)
    causal = old is None or old.causal
    if cls is class_of("full", "") and causal:
        data = old and {"kind": "causal"}  # None: the model decides
    elif "causal" in mine:
        data = {"causal": causal} | data
    new = body.to_dict() | {name: field_data(value, theirs[name]) for name, value in other.items()} | {field: data}
    return parse_spec(new, term.name)  # ty: ignore[invalid-return-type]


def with_body(body: Body, term: Term, cls: type[Spec]) -> Body:
    """The body of this term, with the fields it shares with the old one; experts take the old one as expert."""
    common = {name: to_plain_data(getattr(body, name)) for name in field_types(type(body)) if name in field_types(cls)}
    common = {name: value for name, value in common.items() if value is not None} | {"expert": body.to_dict()}
    given = term_data(term, cls)
    return parse_spec({name: v for name, v in common.items() if name in field_types(cls)} | given, term.name)  # ty: ignore


def term_data(term: Term, cls: type[Spec]) -> dict[str, Any]:
    """The term as plain data of a spec; positional values fill the fields in order."""
    expected = field_types(cls)
    require(
        len(term.positional) <= len(expected),
        f"{term.name} takes {len(expected)} values ({', '.join(expected) or 'none'}), found {len(term.positional)}",
    )
    given = dict(zip(expected, term.positional, strict=False))
    for name in term.named:
        require(name not in given, f"{term.name}: {name} is given twice")
        require(name in expected, f"{term.name} has no {name!r}; {nearest(name, expected)}")
    return {"kind": kind_of(cls)} | {name: field_data(v, expected[name]) for name, v in (given | term.named).items()}


def field_data(value: Any, hint: Any) -> Any:
    """A term is a string where the field takes one, else a spec."""
    if isinstance(value, list):
        return [field_data(v, hint) for v in value]
    if not isinstance(value, Term):
        return value
    choices = [hint, *typing.get_args(hint)]
    if any(h is str or typing.get_origin(h) is typing.Literal for h in choices):
        return value.name
    return term_data(value, class_of(value.name, value.name))
