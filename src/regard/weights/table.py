"""A weight table: links between their names and ours, walked in both directions.

    Link("model.layers.{i}.self_attn.q_proj.{leaf}", "stack.blocks.{i}.sublayers.0.body.q_proj.{leaf}")
    Link("h.{i}.attn.c_attn.{leaf}", ("….q_proj.{leaf}", "….k_proj.{leaf}", "….v_proj.{leaf}"), Transpose(), Split())

`{i}` and `{leaf}` stand for one step of a dotted name each, the same on both sides; `{path}` for any number of steps;
`{each}`, on their side alone, for 0, 1, 2 … where one tensor of ours is many of theirs (`Stack`: experts). What tensors
there are is said by our model alone; a table never lists layers or asks whether there is a bias. The shapes that theirs
must have are our shapes sent through the steps on the meta device, checked before a byte is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from regard.weights.ops import Op

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Known = str | Callable[[tuple[int, ...]], Tensor]


class WeightsError(ValueError):
    """Tensors that are not what the model needs: the message names file, key, expected and found."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class Link:
    def __init__(self, theirs: str, ours: str | tuple[str, ...], *ops: Op):
        self.theirs = theirs
        self.ours = (ours,) if isinstance(ours, str) else ours
        self.ops = ops

    def inside(self, theirs: str, ours: str) -> "Link":
        """The same link of a model that is a part of another, where its names begin so."""
        return Link(theirs + self.theirs, tuple(ours + name for name in self.ours), *self.ops)

    def shapes(self, ours: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Meta tensors after every step of a read: theirs first, ours last."""
        chain = [ours]
        for op in reversed(self.ops):
            chain.append(op.write(chain[-1]))
        return chain[::-1]

    def names(self, values: Mapping[str, str], theirs: Sequence[Tensor]) -> list[str]:
        """Their names of these tensors of theirs."""
        return [self.theirs.format(**values, each=n) for n in range(len(theirs))]

    def read(self, theirs: Sequence[Tensor], chain: list[Sequence[Tensor]]) -> Sequence[Tensor]:
        tensors = theirs
        for op, like in zip(self.ops, chain[1:], strict=True):
            tensors = op.read(tensors, like)
        return tensors

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        for op in reversed(self.ops):
            ours = op.write(ours)
        return ours


class Table:
    """`prefix` may be missing from all of their names (a base model's file); `ignored` are names that carry nothing.

    What a name holds may be `known`: a copy of another name's tensor, or what a function gives for its shape. Where our
    model needs it, a file may lack it; where it does not, a file may have it, and is refused unless it holds just that.
    `beginnings` and `endings` are other spellings of a name's first steps and of its last one, which only reading knows
    (BERT's first files: gamma, beta).
    """

    def __init__(
        self,
        *links: Link,
        prefix: str = "",
        ignored: tuple[str, ...] = (),
        known: Mapping[str, Known] | None = None,
        beginnings: Mapping[str, str] | None = None,
        endings: Mapping[str, str] | None = None,
    ):
        self.links, self.prefix, self.ignored = links, prefix, ignored
        self.known, self.beginnings, self.endings = known or {}, beginnings or {}, endings or {}

    def walk(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[Link, dict[str, str], list[str]]]:
        """Every link that these names of ours make: the link, what its placeholders stand for, our names."""
        reached = set()
        for name in ours:
            for link in self.links:
                if (values := placeholders(link.ours[0], name)) is not None:
                    names = [pattern.format(**values) for pattern in link.ours]
                    reached |= {*names}
                    yield link, values, names
        left = sorted({*ours} - reached)
        if left:
            raise WeightsError(f"{left[0]} has no place in this weight table (and {len(left) - 1} more)")

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their tensors as ours, one after the other; `ours` are meta tensors. Names and shapes are checked first."""
        found = self.respelled(found)
        if self.prefix and not any(name.startswith(self.prefix) for name in found):
            found = {self.prefix + name: tensor for name, tensor in found.items()}
        chains = [
            (link, values, names, link.shapes([ours[n] for n in names])) for link, values, names in self.walk(ours)
        ]
        wanted = {
            name: tuple(tensor.shape)
            for link, values, _, chain in chains
            for name, tensor in zip(link.names(values, chain[0]), chain[0], strict=True)
        }
        lacking = [name for name in self.known if name in wanted and name not in found]
        stand_ins = {name: self.known_of(name, wanted[name], found) for name in lacking}
        found = {**found, **{name: tensor for name, tensor in stand_ins.items() if tensor is not None}}
        check(found, wanted, (*self.ignored, *self.known))
        for name, known in self.known.items():
            spare = found.get(name) if name not in wanted else None
            if spare is not None and not same(spare, self.known_of(name, spare.shape, found)):
                copy, remedy = isinstance(known, str), "; if they are meant, set tie_word_embeddings to false"
                what = f"is a copy of {known} by the config" if copy else "is the same in every such model"
                raise WeightsError(f"{spare.file}: {name} {what}, but holds other numbers{remedy if copy else ''}")
        for link, values, names, chain in chains:
            theirs = [found[name].read() for name in link.names(values, chain[0])]
            yield from zip(names, link.read(theirs, chain), strict=True)

    def respelled(self, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """By the names that the links have."""
        spelled: dict[str, str] = {}
        for theirs, tensor in found.items():
            name = self.usual(theirs)
            if name in spelled:
                raise WeightsError(f"{tensor.file}: {spelled[name]} and {theirs} are two spellings of one name")
            spelled[name] = theirs
        return {name: found[theirs] for name, theirs in spelled.items()}

    def usual(self, name: str) -> str:
        for other, ours in self.beginnings.items():
            if name.startswith(other):
                name = ours + name.removeprefix(other)
        path, dot, last = name.rpartition(".")
        return path + dot + self.endings.get(last, last)

    def known_of(self, name: str, shape: tuple[int, ...], found: Mapping[str, StoredTensor]) -> StoredTensor | None:
        """What a known name holds; None where it would be a copy of what the file lacks too."""
        known = self.known[name]
        return found.get(known) if isinstance(known, str) else StoredTensor("", shape, "F32", lambda: known(shape))

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Our tensors as theirs."""
        for link, values, names in self.walk(ours):
            theirs = link.write([ours[n] for n in names])
            yield from zip(link.names(values, theirs), theirs, strict=True)


IDENTITY = Table(Link("{path}", "{path}"))


def same(some: StoredTensor, other: StoredTensor | None) -> bool:
    """The same numbers, but for the rounding of the dtype that they are stored in."""
    if other is None or some.shape != other.shape or some.dtype not in FLOATS:
        return False
    one, two = some.read(), other.read()
    rounding = torch.finfo(FLOATS[some.dtype]).eps
    return one.shape == two.shape and bool(torch.isclose(one.double(), two.double(), rounding, 1e-6).all())


def check(found: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]) -> None:
    files = ", ".join(sorted({tensor.file for tensor in found.values() if tensor.file}))
    missing = [name for name in wanted if name not in found]
    if missing:
        raise WeightsError(f"{files}: {missing[0]} {wanted[missing[0]]} is missing (and {len(missing) - 1} more)")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise WeightsError(f"{tensor.file}: {name} should be {shape} by the config, found {tensor.shape}")
        if tensor.dtype not in FLOATS:
            raise WeightsError(f"{tensor.file}: {name} is stored as {tensor.dtype}; read are {', '.join(FLOATS)}")
    for name, tensor in found.items():
        if name not in wanted and not any(placeholders(pattern, name) is not None for pattern in ignored):
            raise WeightsError(f"{tensor.file}: {name} {tensor.shape} belongs to no part of this model")


def placeholders(pattern: str, name: str) -> dict[str, str] | None:
    """`h.{i}.{leaf}` against `h.3.bias` -> {i: 3, leaf: bias}; None when the name does not fit."""
    fits = compiled(pattern).fullmatch(name)
    return fits.groupdict() if fits else None


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", pattern)  # text, placeholder, text, placeholder, …, text
    texts = [re.escape(text) for text in parts[::2]]
    groups = [f"(?P<{name}>{'.+' if name == 'path' else '[^.]+'})" for name in parts[1::2]] + [""]
    return re.compile("".join(text + group for text, group in zip(texts, groups, strict=True)))
