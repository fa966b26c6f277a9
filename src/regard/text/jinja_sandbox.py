"""A Jinja sandbox with limits on time and memory, for chat templates of downloaded models.

Jinja's immutable sandbox keeps a template from the internals of Python objects, but not from running for an hour or
filling the memory. Here every loop iteration, call and filter checks a deadline. Numbers passed to functions, the
product of the sizes of an operation's arguments, and the size of every result are bounded, so no single operation can
be long or large.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import CodeType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SIZE = 4_000_000  # characters of the output or of any intermediate value; also the largest number
MAX_WORK = 16 * MAX_SIZE  # product of the sizes of an operation's arguments, as in text.replace(old, new)
UNSIZED_LENGTH = 100_000  # assumed length of an iterable without len(): the longest range that Jinja allows
ITEM_SIZE = 8  # smallest size of a list item, in characters
TIME_LIMIT = 2.0  # seconds of processor time, so that load on the machine does not matter


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template, once: the time limit starts at construction."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=self._check_result,
        )
        self.deadline = time.thread_time() + TIME_LIMIT
        del self.filters["format"], self.globals["lipsum"]  # "%999999999d"|format(1): the size is in the format string
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._tojson
        self.filters |= {"_iterate": self._iterate, "_check_result": self._check_result, "_concat": self._concat}

    def render_bounded(self, source: str, variables: dict[str, Any]) -> str:
        template = Template.from_code(self, compile_template(source), self.make_globals(None))
        chunks, size = [], 0
        for chunk in template.generate(variables):
            self._check_time()
            size += len(chunk)
            if size > MAX_SIZE:
                raise SecurityError(f"the template wrote more than {MAX_SIZE} characters")
            chunks.append(chunk)
        return "".join(chunks)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja has no hooks for loops, `~` and literals: wrap them in filters."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _apply_filter("_iterate", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_apply_filter("_concat", *concat.nodes)]
        for literal in list(tree.find_all((nodes.List, nodes.Tuple))):
            if getattr(literal, "ctx", "load") == "load":
                literal.items = [_apply_filter("_check_result", item) for item in literal.items]
        for pair in list(tree.find_all(nodes.Pair)):
            pair.value = _apply_filter("_check_result", pair.value)
        return tree

    def wrap_str_format(self, value: Any) -> None:
        return None  # str.format is forbidden below

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("format", "format_map") and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_arguments((getattr(function, "__self__", None), *args, *kwargs.values()))
        return self._check_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("a template may not format strings with %; concatenate them with ~")
        self._check_arguments((left, right))
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"{left} ** {right} is too large; exponents are at most 64")
        if operator == "*":
            self._check_size(_size(left) * right if _size(left) else _size(right) * left if _size(right) else 0)
        return self._check_result(self.binop_table[operator](left, right))

    def _bounded(self, function: Callable) -> Callable:
        @functools.wraps(function)  # keeps the attributes by which Jinja passes the context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments((*args, *kwargs.values()))
            return self._check_result(function(*args, **kwargs))

        return bounded

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without the HTML escapes of Jinja's own filter; in chunks, because every line may have a long indent."""
        self._check_arguments((value, indent, *(separators or ())))
        chunks, size = [], 0
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        for chunk in encoder.iterencode(value):
            size += len(chunk)
            self._check_size(size)
            chunks.append(chunk)
        self._check_time()
        return "".join(chunks)

    def _iterate(self, items: Iterable) -> Iterator:
        for item in items:
            self._check_time()
            yield item

    def _check_result(self, value: Any) -> Any:
        self._check_size(_size(value))
        return value

    def _concat(self, *parts: Any) -> str:
        self._check_size(sum(map(_size, parts)))
        return "".join(map(str, parts))

    def _check_arguments(self, values: Iterable[Any]) -> None:
        self._check_time()
        values = list(values)
        if any(_is_number(value) and abs(value) > MAX_SIZE for value in values):
            raise SecurityError(f"the template uses a number above {MAX_SIZE}")
        if math.prod(max(1, _length(value)) for value in values) > MAX_WORK:
            raise SecurityError(
                f"the arguments of an operation in the template are too large: the product of their lengths is above "
                f"{MAX_WORK}"
            )

    def _check_size(self, size: float) -> None:
        if size > MAX_SIZE:
            raise SecurityError(f"a value in the template has more than {MAX_SIZE} characters")

    def _check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise SecurityError(f"the template ran for more than {TIME_LIMIT} seconds")


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> CodeType:
    """The code of a template, for any environment; compiling takes longer than rendering."""
    return BoundedEnvironment().compile(source)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; when rendering, only its content matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _length(value: Any) -> int:
    if isinstance(value, Context):  # Jinja passes it to some filters
        return 0
    return len(value) if isinstance(value, Sized) else UNSIZED_LENGTH if isinstance(value, Iterable) else 0


def _size(value: Any) -> int:
    """The approximate length of str(value), nested items included; counting stops above MAX_SIZE."""
    size, parts = 0, [value]
    while parts and size <= MAX_SIZE:
        part = parts.pop()
        part = part._Namespace__attrs if isinstance(part, Namespace) else part  # str() of it contains all attributes
        size += _length(part) * (1 if isinstance(part, str) else ITEM_SIZE)
        if isinstance(part, list | tuple | dict):
            parts.extend(part.values() if isinstance(part, dict) else part)
    return size


def _apply_filter(name: str, value: nodes.Node, *more: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, list(more), [], None, None)
