r"""The grammar of tool calls: an output calls offered tools only, with arguments that are valid for their schemas.

    required    the output is calls and nothing else
    otherwise   the output is text, calls, or both, as far as the style of the model's family has them

    hermes      I look. <tool_call>\n{"name": "search", "arguments": {"query": "pump"}}\n</tool_call>
    llama3      {"name": "search", "parameters": {"query": "pump"}}
    mistral     [{"name": "search", "arguments": {"query": "pump"}}]        only if required

The style is that of the chat template (regard/text/tool_styles.py), so that a call that is generated is also parsed.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

from regard.engine.grammar import MAX_LENGTH, Grammar, GrammarCompiler, PlainText, Tag, enforced_json
from regard.text.tool_styles import STYLES

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def compile_calls(
    compiler: GrammarCompiler,
    style: str,
    schemas: Mapping[str, Mapping[str, Any]],
    required: bool = False,
    single: bool = False,
) -> Grammar:
    """schemas: of the arguments, by the names of the tools. single: at most one call."""
    found = STYLES[style]
    syntax = found.syntax
    tags = [Tag(name, syntax.before(name), dict(schema), syntax.after) for name, schema in schemas.items()]
    if not required and found.bare is None:
        return compiler.tags(tags, trigger=found.begin, single=single)
    text = None
    if not required and found.bare is not None:  # calls only at the beginning of the output
        text = PlainText(found.bare[0] + found.begin[0], (found.begin,))
    return compiler.tags(
        tags, separator=syntax.separator, opening=syntax.opening, closing=syntax.closing, single=single,
        otherwise=text,
    )  # fmt: skip


def compile_tools(compiler: GrammarCompiler, style: str, schemas: Mapping[str, Mapping[str, Any]]) -> Grammar | None:
    """The grammar of calls of tools that other programs may have, or None if it cannot be compiled.

    The arguments are validated before a tool runs, also those that the grammar does not enforce.
    """
    try:
        return compile_calls(compiler, style, enforceable(compiler, schemas))
    except ValueError as error:
        warnings.warn(f"the arguments of all tools are only validated, not enforced: {error}", stacklevel=2)
        return None


def enforceable(compiler: GrammarCompiler, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of tools, with ANY_OBJECT in place of each that a grammar cannot enforce.

    A schema is compiled alone, because only that shows whether the grammar library supports its patterns. Those with
    which all together would exceed MAX_LENGTH characters, or twice the time limit of one, become ANY_OBJECT too.
    """
    deadline = time.monotonic() + 2 * compiler.seconds
    smallest = len(enforced_json(ANY_OBJECT, "any object"))
    found, room = {}, MAX_LENGTH - smallest * len(schemas)
    for name, schema in schemas.items():
        try:
            if time.monotonic() > deadline:
                raise ValueError("the schemas of the tools before it took too long to compile")
            compiler.json_schema(dict(schema))
            excess = len(enforced_json(dict(schema), name)) - smallest
            if excess > room:
                raise ValueError(f"the schemas of all tools have more than {MAX_LENGTH:,} characters")
            found[name], room = schema, room - excess
        except ValueError as error:
            warnings.warn(f"the arguments of the tool {name!r} are only validated, not enforced: {error}", stacklevel=2)
            found[name] = ANY_OBJECT
    return found
