"""Chats that are answered from documents: the sources that a search finds go before the last question.

    {"messages": […, {"role": "user", "content": "Who repairs the pump?"}]}
    -> {"choices": [{"message": {"content": "Mister Jensen [1].", …}, "citations": [1]}], "sources": [{"number": 1, …}]}

A stream has the sources in its first chunk, and the citations of a choice beside its finish_reason. The text of a
source is data: special tokens in it are plain characters, and it cannot close its element in the prompt
(text/source_prompt.py). The search runs in a thread of its own, which also opens the index.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from regard.server.chat_schema import ChatBody, Message
from regard.server.errors import ApiError
from regard.server.served_model import ServedModel
from regard.server.tool_calls import OfferedTools
from regard.text.source_prompt import PromptSource, cited_sources, question_messages

NEW_TOKENS = 256  # that are kept for an answer without max_tokens
SPARE = 16  # for other borders of tokens where texts meet

CountTokens = Callable[[str], int]
FindSources = Callable[[str, CountTokens, int], list[PromptSource]]  # question, tokens of a text, budget


class Grounding:
    """open_search: opens an index, and returns the search in it; both run in this object's thread."""

    def __init__(self, open_search: Callable[[], FindSources]):
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self.find = self.thread.submit(open_search).result()

    async def sources(
        self, served: ServedModel, body: ChatBody, tools: OfferedTools | None
    ) -> list[PromptSource] | None:
        """None: the request is answered without a search. tools: they take a part of the prompt."""
        last = body.messages[-1]
        is_question = last.role == "user" and not last.images and bool(text_of(last).strip())
        if body.search is False or (body.search is None and not is_question):
            return None
        if not is_question:
            message = "search needs a question, the text of a user, as the last message; omit search, or add one"
            raise ApiError(400, message, code="invalid_value", param="search")
        used = await served.encode_chat(grounded(body.messages, []), True, tools, body.chat_template_kwargs)
        room = served.capacity - len(used) - (body.max_tokens or NEW_TOKENS) - SPARE
        budget = min(served.capacity // 2, room)
        if budget < 1:
            return []

        def count(text: str) -> int:
            return len(served.tokenizer.encode(text))

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.find, text_of(last), count, budget)


def text_of(message: Message) -> str:
    return str(message.for_template()["content"])


def grounded(messages: Sequence[Message], sources: Sequence[PromptSource]) -> list[Message]:
    """The conversation with the sources before its last question, and what to do with them after its system message."""
    *before, last = messages
    system, question = question_messages(text_of(last), sources)
    if before and before[0].role in ("system", "developer"):
        system["content"] = f"{text_of(before.pop(0))}\n\n{system['content']}"
    return [
        Message(role="system", content=system["content"]),
        *before,
        Message(role="user", content=question["content"]),
    ]


def citations(text: str, sources: Sequence[PromptSource]) -> list[int]:
    return [source.number for source in cited_sources(text, sources)]
