"""Log-probabilities in OpenAI's two formats: an entry per token for chat, parallel lists for completions.

JSON has no `-inf`, the log-probability of a token with probability 0; OpenAI writes -9999.
"""

from regard.server.generation import TextDelta
from regard.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0


def clamp_logprob(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def entry(id: int, logprob: float, tokenizer: Tokenizer) -> dict:
    text = tokenizer.decode_token(id)
    is_text = text == tokenizer.decode([id], special=True)  # else a part of a character, shown by its vocabulary entry
    return {"token": text, "logprob": clamp_logprob(logprob), "bytes": list(text.encode()) if is_text else None}


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


def completion_logprobs(deltas: list[TextDelta], tokenizer: Tokenizer) -> dict:
    """Parallel lists over tokens. A token that is part of a character has an offset inside its delta, or at its end."""
    texts, offsets = [], []
    for delta in deltas:
        offset = delta.offset
        for token in delta.tokens:
            texts.append(tokenizer.decode_token(token.id))
            offsets.append(min(offset, delta.offset + len(delta.text)))
            offset += len(texts[-1])
    tokens = [token for delta in deltas for token in delta.tokens]
    return {
        "tokens": texts,
        "token_logprobs": [clamp_logprob(token.logprob) for token in tokens],
        "top_logprobs": [
            {tokenizer.decode_token(id): clamp_logprob(logprob) for id, logprob in token.top_logprobs}
            for token in tokens
        ],
        "text_offset": offsets,
    }
