"""The loop with scripted replies: calls, results, limits, repeated calls, and errors that go to the model."""

import json
from collections.abc import Sequence

import pytest

from regard.agents.calculator import calculator
from regard.agents.loop import AgentLimits, AgentMessage, TraceEvent, run_agent
from regard.agents.tool import AgentTool, Toolbox
from tests.agents.scripted import ScriptedWriter, call, echo


def answered(
    writer: ScriptedWriter, tools: Sequence[AgentTool], limits: AgentLimits | None = None
) -> tuple[list[TraceEvent], list[AgentMessage]]:
    messages: list[AgentMessage] = [{"role": "user", "content": "What is it?"}]
    return list(run_agent(writer, Toolbox(tools), messages, limits)), messages


def multiply(style: str = "hermes") -> str:
    return call("calculator", '{"expression": "6 * 7"}', style)


@pytest.mark.ledger("tool.agent")
@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_a_call_is_run_and_its_result_answered(style: str) -> None:
    writer = ScriptedWriter(multiply(style), lambda messages: f"It is {messages[-1]['content']}.", style=style)
    events, messages = answered(writer, [calculator()])
    assert [event.kind for event in events] == ["question", "reply", "call", "result", "reply", "end"]
    assert events[-1].fields == {"reason": "answer", "answer": "It is 42."}
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "6 * 7"}}
    assert messages[2]["content"] == "42" and messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    for event in events:
        assert json.loads(event.to_json())["event"] == event.kind


@pytest.mark.ledger("tool.call")
def test_errors_go_to_the_model() -> None:
    replies = [
        call("calculator", '{"expression": "1 / 0"}'), call("calculator", '{"wrong": 1}'), call("rm", "{}"),
        "<tool_call>no JSON</tool_call>", "I cannot.",
    ]  # fmt: skip
    events, messages = answered(ScriptedWriter(*replies), [calculator()])
    results = [event.fields for event in events if event.kind == "result"]
    assert all(result["error"] for result in results)
    assert "has no value: division by zero" in results[0]["text"] and "expression is missing" in results[1]["text"]
    assert [result["name"] for result in results] == ["calculator", "calculator", None, None]
    assert all(
        result["text"] == "Error: that is no valid call of a tool. The tools are calculator." for result in results[2:]
    )
    assert events[-1].fields["answer"] == "I cannot."


def test_lone_surrogates_in_a_call_are_replaced() -> None:
    writer = ScriptedWriter(call("echo", '{"text": "pump \\ud83d"}'), "done")
    events, messages = answered(writer, [echo()])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"text": "pump ?"}
    assert messages[2]["content"] == "pump ?" and events[-1].fields["answer"] == "done"
    for event in events:
        event.to_json().encode()
    writer.tokenizer.encode(str(messages))


def test_several_calls_in_one_reply_run_in_order() -> None:
    ran: list[str] = []
    reply = "\n".join(call("echo", json.dumps({"text": str(number)})) for number in range(5))
    events, messages = answered(ScriptedWriter(reply, "Done."), [echo(ran=ran)], AgentLimits(calls=3))
    assert ran == ["0", "1", "2"]
    assert [event.fields["error"] for event in events if event.kind == "result"] == [False] * 3 + [True] * 2
    assert [message["content"] for message in messages if message["role"] == "tool"][:3] == ["0", "1", "2"]


@pytest.mark.ledger("tool.agent")
def test_steps_are_bounded() -> None:
    ran: list[str] = []
    writer = ScriptedWriter(lambda messages: call("echo", json.dumps({"text": str(len(messages))})))
    events, _ = answered(writer, [echo(ran=ran)], AgentLimits(steps=5))
    assert len(ran) == 5 and events[-1].fields == {"reason": "steps", "answer": None} and events[-1].step == 5


def test_tokens_are_bounded() -> None:
    """The scripted writer counts a character as a token."""
    ran: list[str] = []
    writer = ScriptedWriter(lambda messages: call("echo", json.dumps({"text": str(len(messages))})))
    size = len(call("echo", '{"text": "1"}'))
    events, _ = answered(writer, [echo(ran=ran)], AgentLimits(tokens=3 * size + 5))
    assert len(ran) == 3 and events[-1].fields["reason"] == "tokens"
    events, _ = answered(writer, [echo(ran=ran)], AgentLimits(tokens=3 * size))
    assert len(ran) == 6 and events[-1].fields["reason"] == "tokens"


@pytest.mark.ledger("tool.agent")
def test_a_repeated_call_is_not_run_again_and_then_ends_the_loop() -> None:
    ran: list[str] = []
    events, _ = answered(ScriptedWriter(call("echo", '{"text": "a"}')), [echo(ran=ran)])
    assert ran == ["a"] and events[-1].fields["reason"] == "repeated" and events[-1].step == 3
    results = [event.fields for event in events if event.kind == "result"]
    assert [result["error"] for result in results] == [False, True, True] and "was made before" in results[1]["text"]


def test_long_results_are_cut_off() -> None:
    events, messages = answered(ScriptedWriter(call("echo", '{"text": "a"}'), "Done."), [echo("x" * 9999)])
    assert messages[-2]["content"] == "x" * 4000 + "\n(cut off after 4000 of 9999 characters)"


@pytest.mark.ledger("tool.agent")
def test_closing_the_trace_cancels() -> None:
    ran: list[str] = []
    writer = ScriptedWriter(call("echo", '{"text": "a"}'))
    trace = run_agent(writer, Toolbox([echo(ran=ran)]), [{"role": "user", "content": "?"}])
    assert [next(trace).kind for _ in range(3)] == ["question", "reply", "call"]
    trace.close()
    assert ran == []


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        AgentLimits(steps=0)
    with pytest.raises(ValueError, match="two tools have the name 'echo'"):
        Toolbox([echo(), echo()])
    with pytest.raises(ValueError, match="no name of a tool"):
        echo(name="a tool\n")
