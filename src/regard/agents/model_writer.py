"""The model of an agent: it writes the next reply of a conversation under the grammar of the tools' calls.

Tools are offered in the form of the chat template; for a template without tools, in the system message.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

from regard.agents.call_grammar import compile_tools
from regard.agents.loop import AgentMessage, Reply
from regard.agents.tool import Toolbox
from regard.engine.grammar import Grammar, GrammarCompiler
from regard.text.chat import encode_chat
from regard.text.detokenizer import TextStream
from regard.text.generic_tools import GENERIC_STYLE, with_generic_tools
from regard.text.tokenizer import Tokenizer
from regard.text.tool_results import as_data, escaped_strings, marks_of
from regard.text.tool_styles import STYLES, tool_style
from regard.text_generation import Prompt, SamplingOptions, TextGenerator, checked_sampling


class ModelWriter:
    """on_text: called with each piece of a reply. sampling: `temperature`, `seed` and other fields of `Sampling`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TextGenerator,
        grammars: GrammarCompiler,
        on_text: Callable[[str], None] = lambda text: None,
        **sampling: Unpack[SamplingOptions],
    ):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template, so it cannot call tools; use a chat model")
        self.tokenizer, self.texts, self.grammars = tokenizer, texts, grammars
        self.on_text, self.sampling = on_text, sampling
        found = tool_style(tokenizer.chat_template)
        self.has_tools, self.style = found is not None, found or GENERIC_STYLE
        self.compiled: tuple[Toolbox, Grammar | None] | None = None

    def write(self, messages: Sequence[AgentMessage], tools: Toolbox, max_new: int) -> Reply:
        ids = self.encode(messages, tools)
        room = self.texts.engine.capacity - len(ids)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, but the model reads {self.texts.engine.capacity}; ask for "
                "less, or use a model with a longer context"
            )
        options: SamplingOptions = {
            "temperature": 0.0, **self.sampling, "max_new": min(max_new, room), "grammar": self.grammar(tools),
        }  # fmt: skip
        sampling = checked_sampling(options, self.tokenizer.stop_ids)
        prompt = Prompt(ids, sampling, self.texts.engine.submit, lambda request: TextStream(self.tokenizer))
        request = self.texts.submit(prompt)
        pieces = []
        for _, text in self.texts.stream(request, prompt.text_stream(request)):
            pieces.append(text)
            self.on_text(text)
        return Reply("".join(pieces), len(request.new), request.finish == "length")

    def encode(self, messages: Sequence[AgentMessage], tools: Toolbox) -> list[int]:
        """The ids of a conversation. Descriptions of tools may come from another program; they are data too."""
        if not tools.tools:
            return encode_chat(self.tokenizer, list(messages))
        offered = escaped_strings(tools.for_template(), self.as_data)
        if self.has_tools:
            return encode_chat(self.tokenizer, list(messages), tools=offered)
        return encode_chat(self.tokenizer, with_generic_tools(messages, offered))

    def as_data(self, text: str) -> str:
        return as_data(text, marks_of(self.tokenizer))

    def grammar(self, tools: Toolbox) -> Grammar | None:
        """None without tools, and for calls that begin with a special token, which no grammar generates."""
        if self.compiled is None or self.compiled[0] is not tools:
            grammar = None
            if tools.tools and not STYLES[self.style].special:
                grammar = compile_tools(self.grammars, self.style, tools.schemas)
            self.compiled = (tools, grammar)
        return self.compiled[1]
