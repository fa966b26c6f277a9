"""A weight table: links between their tensor names and ours, used in both directions.

    Link("model.layers.{i}.self_attn.q_proj.{leaf}", "stack.blocks.{i}.sublayers.0.body.q_proj.{leaf}")
    Link("h.{i}.attn.c_attn.{leaf}", ("….q_proj.{leaf}", "….k_proj.{leaf}", "….v_proj.{leaf}"), Transpose(), Split())

`{i}` and `{leaf}` match one component of a dotted name and have the same value on both sides; `{path}` matches one or
more components. `{each}`, on their side only, counts 0, 1, 2 … where one tensor of ours is many of theirs
(`StackTensors`). Our model alone determines which tensors exist, so a table lists no layers and no optional biases.
The shapes of their tensors follow from ours: `write` is run on meta tensors, and everything is checked before the first
byte is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from regard.weights.ops import Op

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Derivation = str | Callable[[tuple[int, ...]], Tensor]  # the name of an equal tensor, or a function of the shape


class WeightsError(ValueError):
    """Tensors that the model cannot take; the message names the file, the tensor, and what was expected and found."""


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

    def prefixed(self, theirs: str, ours: str) -> "Link":
        """The same link with a prefix on the names of each side, for a model inside another."""
        return Link(theirs + self.theirs, tuple(ours + name for name in self.ours), *self.ops)

    def stages(self, ours: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Tensors of the shapes before, between and after the steps of a read: theirs first, ours last."""
        stages = [ours]
        for op in reversed(self.ops):
            stages.append(op.write(stages[-1]))
        return stages[::-1]

    def their_names(self, values: Mapping[str, str], count: int) -> list[str]:
        """Their names of this many tensors, with the placeholders filled in."""
        return [self.theirs.format(**values, each=n) for n in range(count)]

    def read(self, theirs: Sequence[Tensor], stages: list[Sequence[Tensor]]) -> Sequence[Tensor]:
        tensors = theirs
        for op, like in zip(self.ops, stages[1:], strict=True):
            tensors = op.read(tensors, like)
        return tensors

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.stages(ours)[0]


class Table:
    """Links and the exceptions to them.

    prefix            may be missing from all of their names, as in the file of a base model
    ignored           patterns of their names that are skipped
    derived           their tensors whose content is known: a copy of another tensor, or a function of the shape. A file
                      may lack them. One that our model does not need is refused if it holds anything else.
    prefix_aliases    other prefixes that a read accepts, and the prefix that the links have
    leaf_aliases      other last components that a read accepts: BERT's first files have gamma and beta
    """

    def __init__(
        self,
        *links: Link,
        prefix: str = "",
        ignored: tuple[str, ...] = (),
        derived: Mapping[str, Derivation] | None = None,
        prefix_aliases: Mapping[str, str] | None = None,
        leaf_aliases: Mapping[str, str] | None = None,
    ):
        self.links, self.prefix, self.ignored = links, prefix, ignored
        self.derived, self.prefix_aliases, self.leaf_aliases = derived or {}, prefix_aliases or {}, leaf_aliases or {}

    def matches(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[Link, dict[str, str], list[str]]]:
        """Each link that applies to these names of ours: the link, the values of its placeholders, our names."""
        reached = set()
        for name in ours:
            for link in self.links:
                if (values := match_placeholders(link.ours[0], name)) is not None:
                    names = [pattern.format(**values) for pattern in link.ours]
                    reached |= {*names}
                    yield link, values, names
        left = sorted({*ours} - reached)
        if left:
            raise WeightsError(f"{left[0]} has no link in this weight table (and {len(left) - 1} more); add one for it")

    def their_name(self, name: str) -> str:
        """Their name of a tensor of ours that is one tensor of theirs, such as the head."""
        for link in self.links:
            if len(link.ours) == 1 and (values := match_placeholders(link.ours[0], name)) is not None:
                return link.their_names(values, 1)[0]
        raise WeightsError(f"{name} has no link in this weight table; add one for it")

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield our names with their tensors, converted; `ours` are meta tensors. All checks precede the first read."""
        found = self.canonical_names(found)
        plan = [
            (link, values, names, link.stages([ours[n] for n in names])) for link, values, names in self.matches(ours)
        ]
        wanted = {
            name: tuple(tensor.shape)
            for link, values, _, stages in plan
            for name, tensor in zip(link.their_names(values, len(stages[0])), stages[0], strict=True)
        }
        absent = [name for name in self.derived if name in wanted and name not in found]
        substitutes = {name: self.derive(name, wanted[name], found) for name in absent}
        found |= {name: tensor for name, tensor in substitutes.items() if tensor is not None}
        check_tensors(found, wanted, (*self.ignored, *self.derived))
        self.check_derived({name: found[name] for name in self.derived if name in found and name not in wanted}, found)
        for link, values, names, stages in plan:
            theirs = [found[name].read() for name in link.their_names(values, len(stages[0]))]
            yield from zip(names, link.read(theirs, stages), strict=True)

    def canonical_names(self, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The same tensors under the names that the links have."""
        originals: dict[str, str] = {}
        for original, tensor in found.items():
            name = self.canonical_name(original)
            if name in originals:
                raise WeightsError(
                    f"{tensor.file}: {originals[name]} and {original} are two spellings of one name; remove one of them"
                )
            originals[name] = original
        absent = self.prefix and not any(name.startswith(self.prefix) for name in originals)
        prefix = self.prefix if absent else ""
        return {prefix + name: found[original] for name, original in originals.items()}

    def canonical_name(self, name: str) -> str:
        for alias, prefix in self.prefix_aliases.items():
            if name.startswith(alias):
                name = prefix + name.removeprefix(alias)
        path, dot, leaf = name.rpartition(".")
        return path + dot + self.leaf_aliases.get(leaf, leaf)

    def derive(self, name: str, shape: tuple[int, ...], found: Mapping[str, StoredTensor]) -> StoredTensor | None:
        """The content of a derived tensor; None for a copy of a tensor that the file lacks too."""
        how = self.derived[name]
        return found.get(how) if isinstance(how, str) else StoredTensor("", shape, "F32", lambda: how(shape))

    def check_derived(self, spare: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> None:
        """Raise where a derived tensor that the model does not need holds other numbers."""
        for name, tensor in spare.items():
            if equal_up_to_rounding(tensor, self.derive(name, tensor.shape, found)):
                continue
            how = self.derived[name]
            if isinstance(how, str):
                rule = f"is a copy of {how} by the config, but holds other numbers; if they are meant, set"
                raise WeightsError(f"{tensor.file}: {name} {rule} tie_word_embeddings to false")
            raise WeightsError(f"{tensor.file}: {name} is the same in every such model, but holds other numbers")

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield their names with our tensors, converted."""
        for link, values, names in self.matches(ours):
            theirs = link.write([ours[n] for n in names])
            yield from zip(link.their_names(values, len(theirs)), theirs, strict=True)


IDENTITY = Table(Link("{path}", "{path}"))


class Chain:
    """Two tables in a row: the names of a file -> the names of a family -> ours.

    A format that renames the tensors of a family (GGUF) then needs a table of the renaming only. The links of `outer`
    are one to one, and a tensor is read when `inner` reads it, so no intermediate copy of the model is kept.
    """

    def __init__(self, outer: Table, inner: Table):
        self.outer, self.inner = outer, inner

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.inner.read(rename_stored(self.outer, found, dict(self.inner.write(ours))), ours)

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.outer.write(dict(self.inner.write(ours)))


def rename_stored(
    table: Table, found: Mapping[str, StoredTensor], like: Mapping[str, Tensor]
) -> dict[str, StoredTensor]:
    """The same tensors, unread, under the names of `like`; errors use the names of the file."""
    wanted, links = {}, {}
    for link, values, (name,) in table.matches(like):
        (tensor,) = link.stages([like[name]])[0]
        (theirs,) = link.their_names(values, 1)
        wanted[theirs], links[name] = tuple(tensor.shape), (link, theirs)
    check_tensors(found, wanted, table.ignored)
    return {
        name: replace(found[theirs], shape=tuple(like[name].shape), read=partial(read_one, link, found[theirs]))
        for name, (link, theirs) in links.items()
    }


def read_one(link: Link, tensor: StoredTensor) -> Tensor:
    (converted,) = link.read([tensor.read()], [[]] * (len(link.ops) + 1))  # one to one: no step needs a shape
    return converted


def equal_up_to_rounding(tensor: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether both hold the same numbers, up to the rounding of the first one's dtype."""
    if other is None or tensor.shape != other.shape or tensor.dtype not in FLOATS:
        return False
    a, b = tensor.read(), other.read()
    rounding = torch.finfo(FLOATS[tensor.dtype]).eps
    return a.shape == b.shape and bool(torch.isclose(a.double(), b.double(), rounding, 1e-6).all())


def check_tensors(
    found: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    """Raise for the first tensor that is missing, has the wrong shape or dtype, or has no use."""
    files = ", ".join(sorted({tensor.file for tensor in found.values() if tensor.file}))
    missing = [name for name in wanted if name not in found]
    if missing:
        raise WeightsError(f"{files}: {missing[0]} {wanted[missing[0]]} is missing (and {len(missing) - 1} more)")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise WeightsError(f"{tensor.file}: {name} should be {shape} by the config, found {tensor.shape}")
        if tensor.dtype not in FLOATS:
            raise WeightsError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}; store it as one of {', '.join(FLOATS)}"
            )
    for name, tensor in found.items():
        if name not in wanted and not any(match_placeholders(pattern, name) is not None for pattern in ignored):
            raise WeightsError(f"{tensor.file}: {name} {tensor.shape} belongs to no part of this model")


def match_placeholders(pattern: str, name: str) -> dict[str, str] | None:
    """`h.{i}.{leaf}` against `h.3.bias` -> {i: 3, leaf: bias}; None if the name does not match."""
    match = compile_pattern(pattern).fullmatch(name)
    return match.groupdict() if match else None


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", pattern)  # text, placeholder, text, placeholder, …, text
    texts = [re.escape(text) for text in parts[::2]]
    groups = [f"(?P<{name}>{'.+' if name == 'path' else '[^.]+'})" for name in parts[1::2]] + [""]
    return re.compile("".join(text + group for text, group in zip(texts, groups, strict=True)))
