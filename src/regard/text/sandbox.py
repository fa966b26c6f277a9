"""A Jinja sandbox with bounds: what a template from a downloaded model may cost.

Jinja's immutable sandbox keeps a template away from the insides of Python objects, but not from running for an hour or
filling the memory. Here every pass of a loop, every call and every filter reads the clock; numbers handed to them,
the product of the sizes they work on, and the size of what is built are bounded: no step can be long or large.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LARGEST = 4_000_000  # characters of output or of any text on the way, and any number given to a function
WORK = 16 * LARGEST  # product of the sizes that one step combines, as in text.replace(old, new)
UNSIZED = 100_000  # items of what tells no length: the longest range that Jinja allows
ITEM = 8  # characters that an item of a list costs at least, in memory or written out
SECONDS = 2.0


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment renders one template once: the clock starts when it is made."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag], finalize=self._sized
        )
        self.deadline = time.monotonic() + SECONDS
        del self.filters["format"], self.globals["lipsum"]  # "%999999999d"|format(1): the cost hides inside a text
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._json
        self.filters |= {"_ticking": self._ticking, "_sized": self._sized, "_joined": self._joined}

    def generate_bounded(self, source: str, variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self.from_string(source).generate(variables):
            self._tick()
            size += len(piece)
            if size > LARGEST:
                raise SecurityError(f"the template wrote more than {LARGEST} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Loops, `~` and lists have no hook of their own: route them through filters."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _through("_ticking", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_through("_joined", *concat.nodes)]
        for items in list(tree.find_all((nodes.List, nodes.Tuple))):
            if getattr(items, "ctx", "load") == "load":
                items.items = [_through("_sized", item) for item in items.items]
        for pair in list(tree.find_all(nodes.Pair)):
            pair.value = _through("_sized", pair.value)
        return tree

    def wrap_str_format(self, value: Any) -> None:
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("format", "format_map") and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check((getattr(function, "__self__", None), *args, *kwargs.values()))
        return self._sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("templates may not format texts with %; use ~ to join texts")
        self._check((left, right))
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"{left} ** {right} is too large")
        if operator == "*":
            self._check_size(_size(left) * right if _size(left) else _size(right) * left if _size(right) else 0)
        return self._sized(self.binop_table[operator](left, right))

    def _bounded(self, function: Callable) -> Callable:
        @functools.wraps(function)  # keeps Jinja's marks that say whether it wants the context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check((*args, *kwargs.values()))
            return self._sized(function(*args, **kwargs))

        return bounded

    def _json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, where Jinja's own escapes for HTML; in pieces, since each line of it may be indented far."""
        self._check((value, indent, *(separators or ())))
        pieces, size = [], 0
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        for piece in encoder.iterencode(value):
            size += len(piece)
            self._check_size(size)
            pieces.append(piece)
        self._tick()
        return "".join(pieces)

    def _ticking(self, items: Iterable) -> Iterator:
        for item in items:
            self._tick()
            yield item

    def _sized(self, value: Any) -> Any:
        self._check_size(_size(value))
        return value

    def _joined(self, *parts: Any) -> str:
        self._check_size(sum(map(_size, parts)))
        return "".join(map(str, parts))

    def _check(self, values: Iterable[Any]) -> None:
        self._tick()
        values = list(values)
        if any(_is_number(value) and abs(value) > LARGEST for value in values):
            raise SecurityError(f"a template may not work with numbers above {LARGEST}")
        if math.prod(max(1, _length(value)) for value in values) > WORK:
            raise SecurityError("a step of the template is too large")

    def _check_size(self, size: float) -> None:
        if size > LARGEST:
            raise SecurityError(f"a text in the template is longer than {LARGEST}")

    def _tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the template ran for more than {SECONDS} seconds")


class GenerationTag(Extension):
    """`{% generation %}`: templates mark what the model itself said, for training; rendered as if it were not there."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _length(value: Any) -> int:
    if isinstance(value, Context):  # what filters are handed by Jinja
        return 0
    return len(value) if isinstance(value, Sized) else UNSIZED if isinstance(value, Iterable) else 0


def _size(value: Any) -> int:
    """About the characters of its text, nested items included; counting stops where it is too much in any case."""
    size, inside = 0, [value]
    while inside and size <= LARGEST:
        part = inside.pop()
        part = part._Namespace__attrs if isinstance(part, Namespace) else part  # it writes out what it holds
        size += _length(part) * (1 if isinstance(part, str) else ITEM)
        if isinstance(part, list | tuple | dict):
            inside.extend(part.values() if isinstance(part, dict) else part)
    return size


def _through(filter: str, value: nodes.Node, *more: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, filter, list(more), [], None, None)
