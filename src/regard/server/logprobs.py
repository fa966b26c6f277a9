"""Log-probabilities in OpenAI's two shapes: one entry per token for chat, parallel lists for completions.

`-inf` (a token to which the model itself gives no chance) has no form in JSON; OpenAI writes -9999.
"""

from regard.server.generation import TextDelta
from regard.text.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE


def entry(id: int, logprob: float, tokenizer: Tokenizer) -> dict:
    text = tokenizer.token(id)
    whole = text == tokenizer.decode([id], special=True)  # else a part of a character, shown by its raw name
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if whole else None}


def per_token(pieces: list[TextDelta], tokenizer: Tokenizer) -> dict:
    """Chat: `content` holds each token with its alternatives."""
    return {
        "content": [
            entry(token.id, token.logprob, tokenizer)
            | {"top_logprobs": [entry(id, logprob, tokenizer) for id, logprob in token.top]}
            for piece in pieces
            for token in piece.tokens
        ]
    }


def legacy(pieces: list[TextDelta], tokenizer: Tokenizer) -> dict:
    """Completions: parallel lists. A part of a character begins, at the latest, where its piece of text ends."""
    texts, offsets = [], []
    for piece in pieces:
        at = piece.offset
        for token in piece.tokens:
            texts.append(tokenizer.token(token.id))
            offsets.append(min(at, piece.offset + len(piece.text)))
            at += len(texts[-1])
    tokens = [token for piece in pieces for token in piece.tokens]
    return {
        "tokens": texts,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [{tokenizer.token(id): finite(logprob) for id, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }
