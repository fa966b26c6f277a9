"""Log-probabilities in OpenAI's two formats: an entry per token for chat, parallel lists for completions.

JSON has no `-inf`, the log-probability of a token with probability 0; OpenAI writes -9999.
"""

from regard.engine.request import Token
from regard.server.generation import TextDelta
from regard.text.tokenizer import Tokenizer
from regard.text.vocabulary import byte_decoder

LOWEST_LOGPROB = -9999.0


def clamp_logprob(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def entry(id: int, logprob: float, tokenizer: Tokenizer) -> dict:
    text = tokenizer.decode_token(id)
    is_text = text == tokenizer.decode([id], special=True)  # else a part of a character, shown by its vocabulary entry
    encoded = text.encode() if is_text else part_of_character(text, tokenizer)
    return {"token": text, "logprob": clamp_logprob(logprob), "bytes": None if encoded is None else list(encoded)}


def part_of_character(token: str, tokenizer: Tokenizer) -> bytes | None:
    try:
        return byte_decoder(tokenizer)(token)
    except ValueError:  # the bytes of this kind of vocabulary are not known
        return None


def chat_logprobs(deltas: list[TextDelta], tokenizer: Tokenizer) -> dict:
    """`content`: every token with its alternatives."""
    return {
        "content": [
            entry(token.id, token.logprob, tokenizer)
            | {"top_logprobs": [entry(id, logprob, tokenizer) for id, logprob in token.top_logprobs]}
            for delta in deltas
            for token in delta.tokens
        ]
    }


def completion_logprobs(
    deltas: list[TextDelta],
    tokenizer: Tokenizer,
    prompt: tuple[list[int], list[Token]] | None = None,
    start: int = 0,
) -> dict:
    """Parallel lists over tokens, the stop token included, as clients that take the last token for a new one expect.

    A token that is part of a character has an offset inside its delta, or at its end.

    prompt: ids that precede the deltas, and the tokens of all but the first, which has no log-probability. start: the
    length of the text before the deltas.
    """
    texts, offsets, offset = [], [], 0
    ids, prompt_tokens = prompt or ([], [])
    special_ids = frozenset(tokenizer.all_special_ids if ids else ())
    for id in ids:
        texts.append(tokenizer.decode_token(id))
        offsets.append(min(offset, start))
        offset += 0 if id in special_ids else len(texts[-1])  # the echoed text has no special tokens
    new = [(delta, [*delta.tokens, *([] if delta.stop is None else [delta.stop])]) for delta in deltas]
    for delta, delta_tokens in new:
        offset = start + delta.offset
        for token in delta_tokens:
            texts.append(tokenizer.decode_token(token.id))
            offsets.append(min(offset, start + delta.offset + len(delta.text)))
            offset += len(texts[-1])
    tokens = [*prompt_tokens, *(token for _, delta_tokens in new for token in delta_tokens)]
    first = [None] if ids else []
    return {
        "tokens": texts,
        "token_logprobs": first + [clamp_logprob(token.logprob) for token in tokens],
        "top_logprobs": first
        + [
            {tokenizer.decode_token(id): clamp_logprob(logprob) for id, logprob in reversed(token.top_logprobs)}
            for token in tokens
        ],
        "text_offset": offsets,
    }
