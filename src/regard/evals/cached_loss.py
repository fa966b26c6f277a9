"""The logits and the loss of token sequences that are read through a cache, chunk by chunk, as an engine reads them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.engine.caches import Cache, checked_cache
from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule


@torch.inference_mode()
def cached_logits(
    model: DecoderModule, ids: Tensor, cache: str | Cache | None = None, chunk: int = 64, prompt: int | None = None
) -> Iterator[Tensor]:
    """Logits after every token but the last of sequences (B, L), one tensor (B, chunk, V) per chunk.

    Every chunk is computed with the keys and values that this cache has kept of the chunks before it.
    prompt: the first tokens that are the prompt, for a cache that evicts after it; None: all are.
    """
    chosen, (rows, length) = checked_cache(cache, model.spec), ids.shape
    weight = next(model.parameters())
    store = Contiguous(chosen.declare(model.spec.memory()), rows, length, weight.dtype, weight.device)
    for row in range(rows):
        store.admit(row, range(length), prompt=prompt)
    for start in range(0, length - 1, chunk):
        stop = min(start + chunk, length - 1)
        layout = TokenLayout(torch.arange(start, stop, device=ids.device).expand(rows, -1))
        yield model(ids[:, start:stop], layout, store.begin_forward(layout, check=False))


@torch.inference_mode()
def cached_losses(
    model: DecoderModule, ids: Tensor, cache: str | Cache | None = None, chunk: int = 64, prompt: int | None = None
) -> Iterator[Tensor]:
    """Negative log-likelihoods of the next tokens, in nats, one tensor (B, chunk) per chunk; as `cached_logits`."""
    read = 0
    for logits in cached_logits(model, ids, cache, chunk, prompt):
        targets = ids[:, read + 1 : read + 1 + logits.shape[1], None]
        yield -logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
        read += logits.shape[1]
