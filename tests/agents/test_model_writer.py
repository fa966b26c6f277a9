"""The model of an agent offers the tools of other programs, whatever their schemas are."""

from typing import Any

import pytest

from regard.agents.model_writer import ModelWriter
from regard.agents.tool import AgentTool, Toolbox
from regard.engine.grammar import GrammarCompiler
from tests.agents.scripted import call, chatml, echo

IDS = range(256)  # of bytes


@pytest.mark.parametrize("pattern", ["^(?!.*x)y$", "a{5,2}", r"\bword\b", "\ud800"])
def test_a_pattern_that_no_grammar_enforces_concerns_its_tool_only(pattern: str) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": pattern}}}
    tools = Toolbox([echo(), AgentTool("odd", "", schema, lambda arguments: "")])
    writer = ModelWriter(chatml(), None, GrammarCompiler([bytes([id]) for id in IDS] + [b""], [256]))
    with pytest.warns(UserWarning, match="the arguments of the tool 'odd' are only validated, not enforced: the"):
        grammar = writer.grammar(tools)
    assert grammar is not None
    assert accepted(grammar, call("odd", '{"any": 1}')) and accepted(grammar, call("echo", '{"text": "x"}'))
    assert not accepted(grammar, call("echo", '{"any": 1}'))


def test_schemas_that_are_too_long_together_concern_the_last_tools_only() -> None:
    """Servers may list a hundred tools; a grammar has a limit."""

    def tool(name: str, letters: int) -> AgentTool:
        schema = {"type": "object", "properties": {"kind": {"enum": [name * letters]}}, "required": ["kind"]}
        return AgentTool(name, "", schema, lambda arguments: "")

    tools = Toolbox([tool("a", 40_000), tool("b", 40_000), tool("c", 1)])
    writer = ModelWriter(chatml(), None, GrammarCompiler([bytes([id]) for id in IDS] + [b""], [256]))
    with pytest.warns(UserWarning, match="tool 'b' are only validated, .* all tools have more than 65,536") as warned:
        grammar = writer.grammar(tools)
    assert len(warned) == 1 and grammar is not None
    assert accepted(grammar, call("c", '{"kind": "c"}')) and accepted(grammar, call("b", '{"any": 1}'))
    assert not accepted(grammar, call("a", '{"any": 1}')) and not accepted(grammar, call("c", '{"any": 1}'))


def accepted(grammar: Any, text: str) -> bool:
    matcher = grammar.matcher()
    for byte in text.encode():
        if not matcher.allowed()[byte // 32] >> byte % 32 & 1:
            return False
        matcher.accept(byte)
    return True


def test_a_schema_that_is_nested_deeply_is_shortened() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    tools = Toolbox([AgentTool("deep", "", {"type": "object", "properties": {"a": schema}}, lambda arguments: "")])
    writer = ModelWriter(chatml(), None, None)
    text = writer.tokenizer.decode(writer.encode([{"role": "user", "content": "?"}], tools))
    assert '"deep"' in text and 50 < text.count('"items"') < 400
