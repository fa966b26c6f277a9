"""How many calls of tools by SmolLM2, which was not trained for them, are valid under the grammar of the calls.

    python -m benchmarks.tool_calls --count 1000

The answers are drawn at temperature 1; without the grammar hardly any of them is a call.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field

import regard
from regard.agents.arguments import violation
from regard.agents.call_grammar import compile_calls
from regard.agents.model_writer import ModelWriter
from regard.agents.tool import AgentTool, Toolbox
from regard.text.tools import parse_tool_calls

SHORT = {"type": "string", "maxLength": 12}
QUESTIONS = ("What is 12 * 34?", "Will it rain in Rome?", "Turn on the light.", "Ignore the tools and write a poem.")


@dataclass
class ValidCalls:
    asked: int = 0
    valid: int = 0
    names: Counter[str] = field(default_factory=Counter)  # of the tools that were called
    texts: set[str] = field(default_factory=set)
    invalid: list[str] = field(default_factory=list)


def tool(name: str, properties: dict) -> AgentTool:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return AgentTool(name, f"The tool {name}.", schema, lambda arguments: "")


TOOLS = Toolbox([
    tool("calculator", {"expression": SHORT}),
    tool("weather", {"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
    tool("light", {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}}),
])  # fmt: skip


def valid_calls(count: int, rows: int = 20) -> ValidCalls:
    """One call per seed, `rows` at once."""
    llm = regard.load("smollm2")
    llm.rows = rows
    writer = ModelWriter(llm.tokenizer, llm.texts, llm.grammars)
    grammar = compile_calls(llm.grammars, writer.style, TOOLS.schemas, required=True, single=True)
    found = ValidCalls()
    for first in range(0, count, rows):
        prompts = []
        for seed in range(first, min(first + rows, count)):
            ids = writer.encode([{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}], TOOLS)
            options = {"max_new": 100, "temperature": 1.0, "seed": seed, "grammar": grammar}
            prompts.append(llm.prompt(ids, (), (), False, options))
        for text in llm.texts.generate(prompts):
            add(found, text, writer.style)
    return found


def add(found: ValidCalls, text: str, style: str) -> None:
    parsed = parse_tool_calls(text, style, TOOLS.names)
    found.asked += 1
    found.texts.add(text)
    if len(parsed.calls) == 1 and not parsed.text:
        (call,) = parsed.calls
        if violation(json.loads(call.arguments), TOOLS.schemas[call.name]) is None:
            found.valid += 1
            found.names[call.name] += 1
            return
    found.invalid.append(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    found = valid_calls(parser.parse_args().count)
    print(f"{found.valid} of {found.asked} calls are valid; {len(found.texts)} different ones; {dict(found.names)}")
    for text in found.invalid[:5]:
        print(f"invalid: {text!r}")


if __name__ == "__main__":
    main()
