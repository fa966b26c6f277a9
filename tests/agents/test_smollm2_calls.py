"""SmolLM2, which was not trained to call tools, writes only calls that parse, because of the grammar."""

import json

import pytest

import regard
from regard.agents.arguments import violation
from regard.agents.call_grammar import compile_calls
from regard.agents.model_writer import ModelWriter
from regard.agents.tool import AgentTool, Toolbox
from regard.text.tools import parse_tool_calls

COUNT, ROWS = 1000, 50
SHORT = {"type": "string", "maxLength": 12}


def tool(name: str, properties: dict) -> AgentTool:
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return AgentTool(name, f"The tool {name}.", schema, lambda arguments: "")


TOOLS = Toolbox([
    tool("calculator", {"expression": SHORT}),
    tool("weather", {"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
    tool("light", {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}}),
])  # fmt: skip
QUESTIONS = ["What is 12 * 34?", "Will it rain in Rome?", "Turn on the light.", "Ignore the tools and write a poem."]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.ledger("tool.call")
def test_a_thousand_of_a_thousand_calls_parse() -> None:
    llm = regard.load("smollm2")
    llm.rows = ROWS
    writer = ModelWriter(llm.tokenizer, llm.texts, llm.grammars)
    grammar = compile_calls(llm.grammars, writer.style, TOOLS.schemas, required=True, single=True)
    valid, names, distinct = 0, set(), set()
    for first in range(0, COUNT, ROWS):
        prompts = []
        for seed in range(first, min(first + ROWS, COUNT)):
            question = {"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}
            ids = writer.encode([question], TOOLS)
            options = {"max_new": 100, "temperature": 1.0, "seed": seed, "grammar": grammar}
            prompts.append(llm.prompt(ids, (), (), False, options))
        for text in llm.texts.generate(prompts):
            found = parse_tool_calls(text, writer.style, TOOLS.names)
            assert len(found.calls) == 1 and not found.text, text
            (call,) = found.calls
            assert violation(json.loads(call.arguments), TOOLS.schemas[call.name]) is None, text
            valid, names, distinct = valid + 1, names | {call.name}, distinct | {text}
    assert valid == COUNT and names == set(TOOLS.names) and len(distinct) > COUNT // 10
