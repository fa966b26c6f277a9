"""The loss of token sequences that are read through a cache, chunk by chunk, as an engine would read them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.engine.caches import Cache, checked_cache
from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule


@torch.inference_mode()
def cached_losses(
    model: DecoderModule, ids: Tensor, cache: str | Cache | None = None, chunk: int = 64
) -> Iterator[Tensor]:
    """Negative log-likelihoods of the next tokens of sequences (B, L), in nats, one tensor (B, chunk) per chunk.

    Every chunk is computed with the keys and values that this cache has kept of the chunks before it.
    """
    chosen, (rows, length) = checked_cache(cache, model.spec), ids.shape
    weight = model.embedding.weight
    store = Contiguous(chosen.declare(model.spec.memory()), rows, length, weight.dtype, weight.device)
    for start in range(0, length - 1, chunk):
        stop = min(start + chunk, length - 1)
        layout = TokenLayout(torch.arange(start, stop, device=ids.device).expand(rows, -1))
        logits = model(ids[:, start:stop], layout, store.begin_forward(layout, check=False))  # (B, chunk, V)
        yield -logits.log_softmax(-1).gather(-1, ids[:, start + 1 : stop + 1, None]).squeeze(-1)
