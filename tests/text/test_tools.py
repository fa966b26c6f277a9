"""Tool calls are found in every style; what is no call of an offered tool stays text; streams equal the whole."""

import json
import random
import time

import pytest

from regard.text.tool_stream import ToolStream
from regard.text.tool_styles import STYLES, ToolCall, tool_style
from regard.text.tools import parse_tool_calls

TOOLS = ("add", "find weather", "now")
ADD = ToolCall("add", '{"a": 1, "b": [2, "x"]}')
NOW = ToolCall("now", "{}")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
HERMES_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}'
CASES = [
    ("hermes", HERMES, "", [ADD]),
    ("hermes", f"I add.\n\n{HERMES}\n{HERMES_NOW}\n", "I add.", [ADD, NOW]),
    ("hermes", f"First {HERMES} then {HERMES_NOW}.", "First then.", [ADD, NOW]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [ADD]),  # the model forgot the end
    ("hermes", "a < b, <tool> and <tool_call", "a < b, <tool> and <tool_call", []),
    ("hermes", "<tool_call>not JSON</tool_call> x", "<tool_call>not JSON</tool_call> x", []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),  # not offered
    ("hermes", '<tool_call>["add"]</tool_call>', '<tool_call>["add"]</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": 3}', '<tool_call>{"name": "now", "arguments": 3}', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [ToolCall("add", '{"a": 1}')]),
    ("hermes", "  plain text \n", "  plain text \n", []),
    ("llama3", LLAMA, "", [ADD]),
    ("llama3", f"\n<|python_tag|>{LLAMA}; " + '{"name": "now", "parameters": {}}', "", [ADD, NOW]),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3", f"{LLAMA} and more", "and more", [ADD]),
    ("llama3", f'{LLAMA}; {{"name": "now"}}', "", [ADD, NOW]),
    ("llama3", f'{LLAMA}; {{"name": "rm"}}', '; {"name": "rm"}', [ADD]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>}\\""}, "id": "}"}</tool_call>.', ".",
     [ToolCall("add", '{"a": "</tool_call>}\\""}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments":{ "a" :1}}\n</tool_call>', "", [ToolCall("add", '{ "a" :1}')]),
    ("llama3", f"I answer: {LLAMA}", f"I answer: {LLAMA}", []),
    ("llama3", "{" * 100_000, "{" * 100_000, []),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"name": "now"}]', "", [ADD, NOW]),
    ("mistral", '[{"name": "now", "arguments": {}}]', "", [NOW]),  # the marker is a special token, not decoded
    ("mistral", 'Wait. [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}', "Wait.", [NOW, ADD]),
    ("mistral", '[{"name": "now", "arguments": {}} , {"name": "now"}] end', ', {"name": "now"}] end', [NOW]),
    ("mistral", "[TOOL_CALLS]now{}", "[TOOL_CALLS]now{}", []),
    ("mistral", "[1, 2] is a list [TOOL", "[1, 2] is a list [TOOL", []),
    ("mistral", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "expected", "calls"), CASES, ids=lambda value: str(value)[:30])
def test_calls_are_separated_from_text(style: str, text: str, expected: str, calls: list[ToolCall]) -> None:
    found = parse_tool_calls(text, style, TOOLS)
    assert found.text == expected and list(found.calls) == calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in found.calls)


@pytest.mark.parametrize(("style", "text", "expected", "calls"), CASES, ids=lambda value: str(value)[:30])
def test_a_stream_equals_the_whole(style: str, text: str, expected: str, calls: list[ToolCall]) -> None:
    rng = random.Random(0)
    for size in (1, 2, 3, 7) if len(text) < 1000 else (5000,):
        found = read(ToolStream(style, TOOLS), split(text, size, rng))
        assert found == (expected, calls)


def split(text: str, size: int, rng: random.Random) -> list[str]:
    pieces, position = [], 0
    while position < len(text):
        pieces.append(text[position : (position := position + rng.randint(1, size))])
    return pieces


def read(stream: ToolStream, texts: list[str]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a stream, whose pieces are joined."""
    text, calls = "", []
    for delta in [*map(stream.push, texts), stream.finish()]:
        text += delta.text
        for name, arguments in delta.pieces:
            calls.append([name, ""]) if name is not None else None
            calls[-1][1] += arguments
    return text, [ToolCall(*call) for call in calls]


@pytest.mark.parametrize(
    ("style", "call"),
    [
        ("hermes", HERMES),
        ("llama3", LLAMA),
        ("mistral", '[{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}'),
    ],
)
def test_arguments_are_returned_as_they_are_generated(style: str, call: str) -> None:
    stream, arguments = ToolStream(style, TOOLS), ADD.arguments
    begin = call.index(arguments)
    head = [stream.push(char) for char in call[: begin + 1]]
    assert [piece for delta in head for piece in delta.pieces] == [("add", ""), (None, "{")]
    for char in arguments[1:]:
        assert stream.push(char).pieces == ((None, char),)
    rest = [*map(stream.push, call[begin + len(arguments) :]), stream.finish()]
    assert all(delta == ("", ()) for delta in rest)


def test_a_call_that_is_cut_off_stays_one_in_a_stream() -> None:
    """Its pieces cannot be withdrawn. In a whole output it stays text."""
    cut = HERMES[: HERMES.index("[2")]
    assert read(ToolStream("hermes", TOOLS), list(cut)) == ("", [ToolCall("add", '{"a": 1, "b": ')])
    assert parse_tool_calls(cut, "hermes", TOOLS) == (cut, ())


@pytest.mark.parametrize("cut", [1, 5, len("\n</tool_call>") - 1])
def test_a_marker_that_is_cut_off_is_no_text(cut: int) -> None:
    whole = HERMES.removesuffix("\n</tool_call>") + "\n</tool_call>"
    assert read(ToolStream("hermes", TOOLS), list(whole[:-cut])) == read(ToolStream("hermes", TOOLS), list(whole))


def test_whitespace_after_a_marker_takes_linear_time() -> None:
    stream, start = ToolStream("mistral", TOOLS), time.process_time()
    for piece in ("[TOOL_CALLS]", *[" \n" * 1000] * 20):
        stream.push(piece)
    assert time.process_time() - start < 1  # minutes if the time is quadratic


@pytest.mark.parametrize("text", [f"I add. {HERMES} then {HERMES_NOW}.", f"I add. {HERMES_NOW.replace(', ', ',  ')} x"])
def test_nothing_follows_a_single_call(text: str) -> None:
    rng = random.Random(0)
    for size in (1, 4, 1000):
        found, calls = read(ToolStream("hermes", TOOLS, single=True), split(text, size, rng))
        assert found == "I add." and len(calls) == 1


def test_text_is_returned_as_soon_as_it_cannot_be_a_call() -> None:
    stream = ToolStream("hermes", TOOLS)
    assert [stream.push(piece).text for piece in ("Hello", " ", "wor", "ld <", "b> <tool")] == [
        "Hello", "", " wor", "ld", " <b>",
    ]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_random_text_is_never_lost(style: str) -> None:
    rng = random.Random(3)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "{",
        "}",
        '[{"',
        '"name"',
        " ",
        "\n",
        "x",
        ";",
        LLAMA,
    ]
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 9)))
        found = parse_tool_calls(text, style, TOOLS)
        assert read(ToolStream(style, TOOLS), list(text)) == (found.text, list(found.calls))
        if not found.calls:
            assert found.text == text


def test_the_style_is_found_in_the_chat_template() -> None:
    assert tool_style("{{ tools }} … <tool_call>\n{{ tool_call }} …") == "hermes"
    assert tool_style('{{ tools }} {"name": function name, "parameters": …}') == "llama3"
    assert tool_style("{{ tools }} [TOOL_CALLS]") == "mistral"
    assert tool_style("{{ tools }} <tool_call>\n<function=name>") is None  # in XML, which no parser here reads
    assert tool_style("{{ messages }}") is tool_style(None) is None
