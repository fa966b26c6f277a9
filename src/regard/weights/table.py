"""A weight table: links between foreign tensor names and ours, used in both directions.

    Link("model.layers.{i}.self_attn.q_proj.{leaf}", "stack.blocks.{i}.sublayers.0.body.q_proj.{leaf}")
    Link("h.{i}.attn.c_attn.{leaf}", ("….q_proj.{leaf}", "….k_proj.{leaf}", "….v_proj.{leaf}"), Transpose(), Split())

`{i}` and `{leaf}` match one component of a dotted name and have the same value on both sides; `{path}` matches one or
more components. `{each}`, on the foreign side only, counts 0, 1, 2 … where one tensor of ours corresponds to many
foreign ones (`StackTensors`). The parameters of our model determine which tensors exist, so a table lists no layers and
no optional biases. The foreign shapes follow from ours, by `write` on meta tensors. All names and shapes are checked
before the first tensor is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from regard.weights.ops import Op

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MISMATCH_REMEDY = "use the config and the weights of the same model"
Derivation = str | Callable[[tuple[int, ...]], Tensor]  # the name of an equal tensor, or a function of the shape


class WeightsError(ValueError):
    """Tensors that do not fit the model; the message names the file, the tensor, and the expected and found values."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class Link:
    """A pattern of foreign names, the pattern or patterns of ours, and the operations that convert the tensors."""

    def __init__(self, foreign: str, ours: str | tuple[str, ...], *ops: Op):
        self.foreign = foreign
        self.ours = (ours,) if isinstance(ours, str) else ours
        self.ops = ops

    def prefixed(self, foreign: str, ours: str) -> "Link":
        """The same link with a prefix on the names of each side, for a model inside another."""
        return Link(foreign + self.foreign, tuple(ours + name for name in self.ours), *self.ops)

    def stages(self, ours: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Tensors of the shapes before, between and after the operations of a read: foreign first, ours last."""
        stages = [ours]
        for op in reversed(self.ops):
            stages.append(op.write(stages[-1]))
        return stages[::-1]

    def foreign_names(self, values: Mapping[str, str], count: int) -> list[str]:
        """The foreign names of `count` tensors, with the placeholders filled in."""
        return [self.foreign.format(**values, each=n) for n in range(count)]

    def read(self, foreign: Sequence[Tensor], stages: list[Sequence[Tensor]]) -> Sequence[Tensor]:
        tensors = foreign
        for op, like in zip(self.ops, stages[1:], strict=True):
            tensors = op.read(tensors, like)
        return tensors

    def write(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.stages(ours)[0]


class Table:
    """Links and the exceptions to them.

    prefix            may be missing from all foreign names, as in the file of a base model
    ignored           patterns of foreign names that are skipped
    derived           foreign tensors whose content is known: a copy of another tensor, or a function of the shape.
                      Files may lack them. If the file has a derived tensor that our model does not use, its values
                      must equal the derived ones.
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
        linked = set()
        for name in ours:
            for link in self.links:
                if (values := match_placeholders(link.ours[0], name)) is not None:
                    names = [pattern.format(**values) for pattern in link.ours]
                    linked |= {*names}
                    yield link, values, names
        unlinked = sorted({*ours} - linked)
        if unlinked:
            raise WeightsError(
                f"{unlinked[0]} has no link in this weight table (and {len(unlinked) - 1} more); add one for it"
            )

    def foreign_name(self, name: str) -> str:
        """The foreign name of a tensor of ours that corresponds to one foreign tensor, such as the head."""
        for link in self.links:
            if len(link.ours) == 1 and (values := match_placeholders(link.ours[0], name)) is not None:
                return link.foreign_names(values, 1)[0]
        raise WeightsError(f"{name} has no link in this weight table; add one for it")

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield our names with the converted tensors; `ours` are meta tensors. All checks precede the first read."""
        found = self.canonical_names(found)
        plan = [
            (link, values, names, link.stages([ours[n] for n in names])) for link, values, names in self.matches(ours)
        ]
        expected = {
            name: tuple(tensor.shape)
            for link, values, _, stages in plan
            for name, tensor in zip(link.foreign_names(values, len(stages[0])), stages[0], strict=True)
        }
        absent = [name for name in self.derived if name in expected and name not in found]
        substitutes = {name: self.derive(name, expected[name], found) for name in absent}
        found |= {name: tensor for name, tensor in substitutes.items() if tensor is not None}
        check_tensors(found, expected, (*self.ignored, *self.derived))
        unused = {name: found[name] for name in self.derived if name in found and name not in expected}
        self.check_derived(unused, found)
        for link, values, names, stages in plan:
            foreign = [found[name].read() for name in link.foreign_names(values, len(stages[0]))]
            yield from zip(names, link.read(foreign, stages), strict=True)

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
        derivation = self.derived[name]
        if isinstance(derivation, str):
            return found.get(derivation)
        return StoredTensor("", shape, "F32", partial(derivation, shape))

    def check_derived(self, unused: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> None:
        """Raise WeightsError if a tensor that the model does not use differs from its derived values."""
        for name, tensor in unused.items():
            if equal_up_to_rounding(tensor, self.derive(name, tensor.shape, found)):
                continue
            derivation = self.derived[name]
            if isinstance(derivation, str):
                raise WeightsError(
                    f"{tensor.file}: {name} should equal {derivation} according to the config, but its values differ; "
                    "if this is intended, set tie_word_embeddings to false"
                )
            raise WeightsError(
                f"{tensor.file}: {name} should be the same in every model of this family, but its values differ; "
                "download the file again"
            )

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the foreign names with our tensors, converted."""
        for link, values, names in self.matches(ours):
            foreign = link.write([ours[n] for n in names])
            yield from zip(link.foreign_names(values, len(foreign)), foreign, strict=True)


IDENTITY = Table(Link("{path}", "{path}"))


class Chain:
    """Two tables in sequence: the names in a file -> the names of a family -> ours.

    For a format that renames the tensors of a family (GGUF), `outer` is the table of the renaming. Its links are one to
    one, and a tensor is read when `inner` reads it, so no intermediate copy of the model is kept.
    """

    def __init__(self, outer: Table, inner: Table):
        self.outer, self.inner = outer, inner

    def read(self, found: Mapping[str, StoredTensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.inner.read(rename_stored(self.outer, found, dict(self.inner.write(ours))), ours)

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.outer.write(dict(self.inner.write(ours)))

    def sources(self, ours: Mapping[str, Tensor]) -> dict[str, str]:
        """Our names, each with the name in the file of the only tensor that it is read from; others are left out."""
        in_file = {
            name: link.foreign_names(values, 1)[0]
            for link, values, (name,) in self.outer.matches(dict(self.inner.write(ours)))
        }
        sources = {}
        for link, values, names in self.inner.matches(ours):
            if len(link.stages([ours[name] for name in names])[0]) == 1:
                sources |= dict.fromkeys(names, in_file[link.foreign_names(values, 1)[0]])
        return sources


def rename_stored(
    table: Table, found: Mapping[str, StoredTensor], like: Mapping[str, Tensor]
) -> dict[str, StoredTensor]:
    """The same tensors, unread, under the names of `like`; errors use the names of the file."""
    expected, links = {}, {}
    for link, values, (name,) in table.matches(like):
        (tensor,) = link.stages([like[name]])[0]
        (foreign_name,) = link.foreign_names(values, 1)
        expected[foreign_name], links[name] = tuple(tensor.shape), (link, foreign_name)
    check_tensors(found, expected, table.ignored)
    return {
        name: replace(found[foreign], shape=tuple(like[name].shape), read=partial(read_renamed, link, found[foreign]))
        for name, (link, foreign) in links.items()
    }


def read_renamed(link: Link, tensor: StoredTensor) -> Tensor:
    """The tensor, converted by a link that is one to one, whose operations need no shapes."""
    (converted,) = link.read([tensor.read()], [[]] * (len(link.ops) + 1))
    return converted


def equal_up_to_rounding(tensor: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether both hold the same numbers, up to the rounding of the first tensor's dtype."""
    if other is None or tensor.shape != other.shape or tensor.dtype not in FLOATS:
        return False
    a, b = tensor.read(), other.read()
    rounding = torch.finfo(FLOATS[tensor.dtype]).eps
    return a.shape == b.shape and bool(torch.isclose(a.double(), b.double(), rounding, 1e-6).all())


def check_tensors(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    """Raise WeightsError for the first tensor that is missing, has another shape or dtype, or is not expected."""
    files = ", ".join(sorted({tensor.file for tensor in found.values() if tensor.file}))
    missing = [name for name in expected if name not in found]
    if missing:
        raise WeightsError(
            f"{files}: {missing[0]} {expected[missing[0]]} is missing (and {len(missing) - 1} more); {MISMATCH_REMEDY}"
        )
    for name, shape in expected.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: {name} should be {shape} by the config, found {tensor.shape}; {MISMATCH_REMEDY}"
            )
        if tensor.dtype not in FLOATS:
            raise WeightsError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}; store it as one of {', '.join(FLOATS)}"
            )
    for name, tensor in found.items():
        if name not in expected and not any(match_placeholders(pattern, name) is not None for pattern in ignored):
            raise WeightsError(
                f"{tensor.file}: {name} {tensor.shape} belongs to no part of this model; {MISMATCH_REMEDY}"
            )


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
