"""The loop of an agent: the model calls tools, reads their results and goes on, until it answers.

    messages ─▶ writer ─▶ reply ─▶ no call: the answer
        ▲                   └────▶ calls ─▶ toolbox ─▶ results, as data ─┐
        └────────────────────────────────────────────────────────────────┘

It ends after a number of steps or tokens, or if the model repeats a call for the third time. Only tools of the toolbox
run, whatever a result or the model says: a call is looked up by its name, and its arguments are validated. What is
wrong with a call goes to the model as its result.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from regard.agents.tool import Toolbox, ToolFailure
from regard.text.tool_styles import STYLES, ToolCall
from regard.text.tools import call_id, parse_tool_calls

AgentMessage = dict[str, Any]


class Reply(NamedTuple):
    text: str
    tokens: int
    cut_off: bool = False  # it reached the limit of tokens


class Writer(Protocol):
    """A model that writes the next message of a conversation."""

    style: str  # in which it calls tools (regard/text/tool_styles.py)

    def write(self, messages: Sequence[AgentMessage], tools: Toolbox, max_new: int) -> Reply: ...

    def as_data(self, text: str) -> str:
        """The text of a result, in which nothing can begin or end a message."""
        ...


@dataclass(frozen=True)
class AgentLimits:
    steps: int = 8  # replies of the model
    tokens: int = 4096  # of all replies
    calls: int = 8  # in one reply
    repeats: int = 2  # of the same call; the next one ends the loop
    result: int = 4000  # characters of a result that the model reads

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class TraceEvent:
    """kind: question, reply, call, result or end. The fields of an end are `reason` and `answer`."""

    kind: str
    step: int
    fields: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"event": self.kind, "step": self.step, **self.fields}, ensure_ascii=False)


def run_agent(
    writer: Writer, tools: Toolbox, messages: list[AgentMessage], limits: AgentLimits | None = None
) -> Iterator[TraceEvent]:
    """The trace of an answer to the last message. Replies and results are appended to `messages`.

    The reason of the end is `answer`, `steps`, `tokens` or `repeated`; only `answer` has an answer. Closing the
    iterator cancels.
    """
    limits = limits or AgentLimits()
    yield TraceEvent("question", 0, {"text": messages[-1]["content"], "tools": tools.names})
    spent, seen = 0, Counter[str]()
    for step in range(1, limits.steps + 1):
        if spent >= limits.tokens:
            yield end(step, "tokens")
            return
        reply = writer.write(messages, tools, limits.tokens - spent)
        spent += reply.tokens
        yield TraceEvent("reply", step, {"text": reply.text, "tokens": reply.tokens})
        if reply.cut_off:
            messages.append({"role": "assistant", "content": reply.text})
            yield end(step, "tokens")
            return
        found = parse_tool_calls(reply.text, writer.style, tools.names)
        if not found.calls and not begins_call(reply.text, writer.style):
            messages.append({"role": "assistant", "content": reply.text})
            yield end(step, "answer", reply.text.strip())
            return
        if not found.calls:
            refusal = f"Error: that is no valid call of a tool. The tools are {', '.join(tools.names)}."
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": refusal}]
            yield TraceEvent("result", step, {"name": None, "error": True, "text": refusal})
            continue
        calls = [identified(call) for call in found.calls]
        messages.append({"role": "assistant", "content": found.text, "tool_calls": calls})
        for number, call in enumerate(calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            key = json.dumps([name, arguments], sort_keys=True)
            yield TraceEvent("call", step, {"name": name, "arguments": arguments})
            text, failed = result_of(tools, name, arguments, number, seen[key], limits)
            seen[key] += 1
            text = writer.as_data(shortened(text, limits.result))
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
            yield TraceEvent("result", step, {"name": name, "error": failed, "text": text})
        if max(seen.values()) > limits.repeats:
            yield end(step, "repeated")
            return
    yield end(limits.steps, "steps")


def result_of(
    tools: Toolbox, name: str, arguments: dict[str, Any], number: int, repeated: int, limits: AgentLimits
) -> tuple[str, bool]:
    """The text of a result, and whether it is an error."""
    try:
        if number >= limits.calls:
            raise ToolFailure(f"a reply has at most {limits.calls} calls; call it again")
        if repeated:
            raise ToolFailure("this call was made before, and its result is above; go on, or call another tool")
        return tools.run(name, arguments), False
    except ToolFailure as error:
        return f"Error: {error}", True


def begins_call(text: str, style: str) -> bool:
    """Whether a reply without a valid call was meant as one."""
    found = STYLES[style]
    bare = found.bare is not None and text.lstrip().startswith(found.bare)
    return found.begin in text or (bare and any(key in text for key in ('"arguments"', '"parameters"')))


def identified(call: ToolCall) -> dict[str, Any]:
    # twice, because strings of JSON may have lone surrogates, and UTF-8 does not
    text = json.dumps(json.loads(call.arguments), ensure_ascii=False).encode("utf-8", "replace")
    function = {"name": call.name, "arguments": json.loads(text)}
    return {"id": call_id(), "type": "function", "function": function}


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + f"\n(cut off after {limit} of {len(text)} characters)"


def end(step: int, reason: str, answer: str | None = None) -> TraceEvent:
    return TraceEvent("end", step, {"reason": reason, "answer": answer})
