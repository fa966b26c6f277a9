"""A writer that gives replies from a list, or computes them from the messages, instead of a model."""

from collections.abc import Callable, Sequence

from regard.agents.loop import AgentMessage, Reply
from regard.agents.tool import AgentTool, Toolbox, text_arguments
from regard.text.tokenizer import Tokenizer
from regard.text.tool_results import as_data, marks_of
from regard.text.tool_styles import STYLES
from regard.text.train import byte

CHATML = """\
{%- if tools -%}
{{- "<|im_start|>system\\n<tools>" ~ tools | tojson ~ "</tools> answer by <tool_call><|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{{- "<|im_start|>user\\n<tool_response>\\n" ~ message.content ~ "\\n</tool_response><|im_end|>\\n" -}}
{%- else -%}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}{{ "<|im_end|>\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}"""


def chatml() -> Tokenizer:
    """A tokenizer whose roles are special tokens, and whose tool markers are added tokens that are not."""
    tokenizer = byte(["<|im_start|>", "<|im_end|>"])
    tokenizer.core.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = CHATML
    return tokenizer


class ScriptedWriter:
    def __init__(self, *replies: str | Callable[[Sequence[AgentMessage]], str], style: str = "hermes"):
        self.replies, self.style, self.read = list(replies), style, []
        self.tokenizer = chatml()

    def write(self, messages: Sequence[AgentMessage], tools: Toolbox, max_new: int) -> Reply:
        self.read.append([dict(message) for message in messages])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        text = reply if isinstance(reply, str) else reply(messages)
        return Reply(text[:max_new], min(len(text), max_new), len(text) > max_new)

    def as_data(self, text: str) -> str:
        return as_data(text, marks_of(self.tokenizer))


def call(name: str, arguments: str, style: str = "hermes") -> str:
    syntax = STYLES[style].syntax
    return f"{syntax.opening}{syntax.before(name)}{arguments}{syntax.after}{syntax.closing}"


def echo(result: str = "", name: str = "echo", ran: list[str] | None = None) -> AgentTool:
    """Returns `result`, or else its argument. `ran` lists what was given to it."""

    def run(arguments: dict[str, str]) -> str:
        if ran is not None:
            ran.append(arguments["text"])
        return result or arguments["text"]

    return AgentTool(name, "Returns a text.", text_arguments(text="any"), run)
