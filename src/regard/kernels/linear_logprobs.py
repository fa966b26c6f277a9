"""The log-probabilities of tokens under a linear head, without the logits of all tokens in memory.

    z_t = cap(scale · (W x_t + b))        log p_t = z_t,target - log Σ_v exp z_tv        H_t = -Σ_v p_tv log p_tv

The losses of alignment are functions of whole sequences, so the gradient of a token is not known while its logits exist
(unlike that of linear_cross_entropy.py). So the logits of a chunk of tokens are computed again in the backward: the
memory is that of one chunk, for one more product with W. A single chunk is kept and not computed again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels.linear_cross_entropy import CHUNK

GPU_CHUNK = 1 << 26  # logits per chunk: a gigabyte in the backward, which has several copies of them in float32


def linear_logprobs(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    targets: Tensor,  # (T,)
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,  # tokens per chunk
) -> tuple[Tensor, Tensor]:
    """log p(target) (T,), and the entropy of each distribution (T,), which has no gradient.

    Sums over V run in at least float32.
    """
    if chunk_size is None:
        chunk_size = max(1, (GPU_CHUNK if x.is_cuda else CHUNK) // len(weight))

    def logprobs(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_of(scale_and_cap(F.linear(x, weight, bias), scale, softcap), targets)

    chunks = list(zip(x.split(chunk_size), targets.split(chunk_size), strict=True))
    if len(chunks) == 1:
        return logprobs(x, targets)
    parts = [checkpoint(logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    values, entropies = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(entropies)


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logprobs_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (…, V) and targets (…) -> log p(target) and the entropy without gradient, in at least float32."""
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    fixed = log_p.detach()
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(fixed.exp() * fixed).nan_to_num().sum(-1)
