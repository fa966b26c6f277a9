"""Log-likelihoods of texts: which token ids are scored, given which other ids.

A continuation is scored as log p(ids[start:] | ids[:start]), where `ids` encode the context and the continuation
together, and `start` is where they begin to differ from the ids of the context alone. Pieces that are encoded apart
would give tokens at their border that the model never sees in a text: "un" and "able" instead of "unable". White space
at the end of a context belongs to the continuation, as most tokens begin with their space.

The conventions are those of lm-evaluation-harness, so the numbers are comparable:

- The first token of a text is conditioned on the ids that the tokenizer prepends (<s>); if it prepends none, on its BOS
  token, or else its EOS token.
- A row has at most `window` tokens before its last one. A longer context is truncated from the left.
- A text that is longer than the window is scored in consecutive windows; the last is filled with earlier tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer

ChatTurns = Sequence[Mapping[str, str]]
Advance = Callable[[int], None]
BatchItem = TypeVar("BatchItem")
ItemOutput = TypeVar("ItemOutput")


class ScoredRow(NamedTuple):
    """ids[start:] are scored, each given all ids before it."""

    ids: tuple[int, ...]
    start: int
    truncated: bool = False  # ids at the beginning of the context were left out


class Likelihood(NamedTuple):
    logprob: float  # the sum over the scored tokens, in nats
    greedy: bool  # each scored token is the most likely one
    tokens: int  # scored


class ScoredModel(Protocol):
    """A model in this process (local_model.py) or behind a server (remote_model.py)."""

    name: str
    window: int  # tokens that a row may have before its last one; also the limit of a prompt with its output
    start_id: int | None  # before the first token of a text that has no prefix; None: unknown, or there is none

    def encode(self, text: str) -> list[int]:
        """The ids of a text after the tokenizer's prefix ids. Special tokens in the text are plain characters."""
        ...

    def encode_chat(self, messages: ChatTurns) -> list[int]:
        """The ids of a conversation in the chat template, with the beginning of the next answer."""
        ...

    def encode_answered(self, messages: ChatTurns) -> list[int]:
        """The ids of a conversation up to the end of its last message, which is an answer."""
        ...

    def score(self, rows: Sequence[ScoredRow], on_progress: Advance = ...) -> list[Likelihood]:
        """on_progress: called with the number of rows that were scored since the last call."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[int]], max_new: int, stop: Sequence[str], on_progress: Advance = ...
    ) -> list[str]:
        """The greedy continuations of prompts of ids, up to a stop string, which is not part of them."""
        ...


def in_batches(
    run: Callable[[Sequence[BatchItem]], list[ItemOutput]],
    items: Sequence[BatchItem],
    rows: int,
    on_progress: Advance,
) -> list[ItemOutput]:
    """The outputs of `run` for all items, at most `rows` at once."""
    found: list[ItemOutput] = []
    for first in range(0, len(items), rows):
        batch = items[first : first + rows]
        found += run(batch)
        on_progress(len(batch))
    return found


def continuation_row(model: ScoredModel, context: str, continuation: str) -> ScoredRow:
    text = context + continuation
    context = context.rstrip()
    return row_after(model, model.encode(context), model.encode(text), repr(continuation))


def answer_row(model: ScoredModel, messages: ChatTurns, answer: str) -> ScoredRow:
    """The answer of a chat model to a conversation."""
    answered = model.encode_answered([*messages, {"role": "assistant", "content": answer}])
    return row_after(model, model.encode_chat(messages), answered, repr(answer))


def row_after(model: ScoredModel, context: Sequence[int], whole: Sequence[int], what: str) -> ScoredRow:
    """`whole`, scored from the first id that differs from those of the context."""
    start = common_prefix(context, whole)
    if start == len(whole):
        raise ValueError(f"{what} adds no token to its context, so it has no likelihood; give a text that is not empty")
    if start == 0:
        whole, start = [start_of(model), *whole], 1
    cut = max(0, len(whole) - model.window - 1)
    if cut >= start:
        raise ValueError(
            f"{what:.60} has {len(whole) - start} tokens, more than the {model.window} that the model reads; shorten it"
        )
    return ScoredRow(tuple(whole[cut:]), start - cut, cut > 0)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def text_rows(model: ScoredModel, text: str) -> list[ScoredRow]:
    """The windows of a text; every token is scored once. Empty if the text has no tokens."""
    prefix, ids = model.encode(""), model.encode(text)
    if not prefix:
        ids = [start_of(model), *ids]
    rows, begin, end = [], max(1, len(prefix)), model.window + 1
    while begin < len(ids):
        end = min(end, len(ids))
        first = max(0, end - 1 - model.window)
        rows.append(ScoredRow(tuple(ids[first:end]), begin - first))
        begin, end = end, end + model.window
    return rows


def encode_answered(tokenizer: Tokenizer, messages: ChatTurns) -> list[int]:
    """The ids of a conversation that ends with an answer, without what the template writes after it: from the first
    special token after the prompt on. A special token typed in a message is plain characters."""
    conversation = [dict(message) for message in messages]
    ids = encode_chat(tokenizer, conversation, add_generation_prompt=False)
    start, special = common_prefix(encode_chat(tokenizer, conversation[:-1]), ids), set(tokenizer.all_special_ids)
    return ids[: next((i for i in range(start, len(ids)) if ids[i] in special), len(ids))]


def start_of(model: ScoredModel) -> int:
    if model.start_id is None:
        raise ValueError(
            f"{model.name} names no token that begins or ends texts, so the first token of a text has no likelihood; "
            "use a tokenizer with bos or eos, and with a server name it by --tokenizer"
        )
    return model.start_id
