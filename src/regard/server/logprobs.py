"""Log-probabilities in OpenAI's two formats: an entry per token for chat, parallel lists for completions.

JSON has no `-inf`, the log-probability of a token with probability 0; OpenAI writes -9999.
"""

import math

from regard.engine.request import Token
from regard.server.generation import TextDelta
from regard.text.tokenizer import Tokenizer
from regard.text.vocabulary import byte_decoder

LOWEST_LOGPROB = -9999.0


def clamp_logprob(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def entry(id: int, logprob: float, tokenizer: Tokenizer, with_id: bool = False) -> dict:
    text = tokenizer.decode_token(id)
    is_text = text == tokenizer.decode([id], special=True)  # else a part of a character, shown by its vocabulary entry
    encoded = text.encode() if is_text else part_of_character(text, tokenizer)
    token = {"token": text, "logprob": clamp_logprob(logprob), "bytes": None if encoded is None else list(encoded)}
    return {"id": id} | token if with_id else token


def entry_with_alternatives(token: Token, tokenizer: Tokenizer, with_ids: bool) -> dict:
    alternatives = [entry(id, logprob, tokenizer, with_ids) for id, logprob in token.top_logprobs]
    facts = {}
    if with_ids and token.rank is not None:
        facts["rank"] = token.rank
    if with_ids and token.entropy is not None and math.isfinite(token.entropy):
        facts["entropy"] = token.entropy
    return entry(token.id, token.logprob, tokenizer, with_ids) | facts | {"top_logprobs": alternatives}


def part_of_character(token: str, tokenizer: Tokenizer) -> bytes | None:
    try:
        return byte_decoder(tokenizer)(token)
    except ValueError:  # the bytes of this kind of vocabulary are not known
        return None


def chat_logprobs(deltas: list[TextDelta], tokenizer: Tokenizer, with_ids: bool = False) -> dict:
    """`content`: every token with its alternatives. With ids, as the ids of the choice, also the stop token."""
    tokens = [token for delta in deltas for token in (delta.all_tokens if with_ids else delta.tokens)]
    return {"content": [entry_with_alternatives(token, tokenizer, with_ids) for token in tokens]}


def completion_logprobs(
    deltas: list[TextDelta],
    tokenizer: Tokenizer,
    prompt: tuple[list[int], list[Token]] | None = None,
    start: int = 0,
    with_ids: bool = False,
) -> dict:
    """Parallel lists over tokens, the stop token included, as clients that take the last token for a new one expect.

    A token that is part of a character has an offset inside its delta, or at its end.

    prompt: ids that precede the deltas, and the tokens of all but the first, which has no log-probability. start: the
    length of the text before the deltas. with_ids: adds `content`, the same tokens with their ids in the format of
    chats; in the lists, alternatives with the same text are one.
    """
    texts, offsets, offset = [], [], 0
    ids, prompt_tokens = prompt or ([], [])
    special_ids = frozenset(tokenizer.all_special_ids if ids else ())
    for id in ids:
        texts.append(tokenizer.decode_token(id))
        offsets.append(min(offset, start))
        offset += 0 if id in special_ids else len(texts[-1])  # the echoed text has no special tokens
    new = [(delta, delta.all_tokens) for delta in deltas]
    for delta, delta_tokens in new:
        offset = start + delta.offset
        for token in delta_tokens:
            texts.append(tokenizer.decode_token(token.id))
            offsets.append(min(offset, start + delta.offset + len(delta.text)))
            offset += len(texts[-1])
    tokens = [*prompt_tokens, *(token for _, delta_tokens in new for token in delta_tokens)]
    first = [None] if ids else []
    lists = {
        "tokens": texts,
        "token_logprobs": first + [clamp_logprob(token.logprob) for token in tokens],
        "top_logprobs": first
        + [
            {tokenizer.decode_token(id): clamp_logprob(logprob) for id, logprob in reversed(token.top_logprobs)}
            for token in tokens
        ],
        "text_offset": offsets,
    }
    if with_ids:
        unscored = [entry(id, 0.0, tokenizer, True) | {"logprob": None, "top_logprobs": []} for id in ids[:1]]
        lists["content"] = unscored + [entry_with_alternatives(token, tokenizer, True) for token in tokens]
    return lists
