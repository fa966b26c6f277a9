"""One vector per text: the output of an encoder's pooling head, or the mean of the hidden states.

v = mean_t h_t / |mean_t h_t|      h: the output of an encoder without a head, or the input of a decoder's head
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.inputs import pad_ids
from regard.models.decoder import DecoderModule
from regard.models.encoder import EncoderModule
from regard.models.heads import Pooled, Pooler
from regard.text.tokenizer import Tokenizer

BATCH = 32


@torch.inference_mode()
def embed(model: Any, tokenizer: Tokenizer, texts: Sequence[str], context: int | None) -> Tensor:
    """(N, D) unit vectors of N texts, truncated to the context; None: the model's."""
    if not isinstance(model, EncoderModule | DecoderModule):
        raise ValueError(f"this model is of kind {model.spec.kind}; only encoders and decoders embed texts")
    limit = context or model.spec.context or model.spec.position.max_positions
    rows = [truncate(tokenizer.encode_with_special_tokens(text), limit) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # similar lengths together: little padding
    vectors = {}
    for start in range(0, len(rows), BATCH):
        indices = order[start : start + BATCH]
        vectors |= dict(zip(indices, embed_batch(model, [rows[i] for i in indices]), strict=True))
    return torch.stack([vectors[i] for i in range(len(rows))]) if rows else torch.empty(0)


def embed_batch(model: EncoderModule | DecoderModule, rows: list[list[int]]) -> Tensor:
    if min(map(len, rows)) == 0:
        raise ValueError("a text has no tokens; leave out empty texts")
    tokens, layout = pad_ids(rows, next(model.parameters()).device)
    if isinstance(model, EncoderModule):
        head = model.spec.head
        if isinstance(head, Pooled):
            return F.normalize(model(tokens, layout), dim=-1)
        if not (head is None or isinstance(head, Pooler)):
            raise ValueError(
                f"the head of this encoder is {head.kind}, which has no embedding; use an encoder without a head"
            )
        hidden = model(tokens, layout)
    else:
        hidden = model.hidden(tokens, layout)
    if layout.valid is not None:
        hidden = hidden * layout.valid.unsqueeze(-1)
    return F.normalize(hidden.sum(1), dim=-1)  # (B, D); the mean's scale is lost in the norm


def truncate(ids: list[int], limit: int | None) -> list[int]:
    """At most `limit` ids; the last one, a special token, is kept."""
    return ids if limit is None or len(ids) <= limit else [*ids[: limit - 1], ids[-1]]
