"""One dial for a model's size: its depth fills in the rest by LLaMA's proportions (Touvron et al. 2023).

    width = 128 · depth          heads of 128, one a layer          hidden = 8/3 width, up to a multiple of 256
    a block has about 4D² + 8D² = 12D² weights, a model 12 · depth · width²

At 32 layers this is LLaMA-7B. Proportions are inherited from a scale that is known to work, not searched.
"""

from regard.models.decoder import Decoder
from regard.parts.feedforward import SwiGLU, eight_thirds
from regard.plan.published import llama, rotary

HEAD_DIM = 128


def dial(depth: int, vocab: int = 32000, context: int = 2048) -> Decoder:
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    width = HEAD_DIM * depth
    return llama(depth, width, rotary(depth), SwiGLU(eight_thirds(width)), vocab, context)


def depth_of(parameters: float) -> int:
    """The depth at which the blocks have about this many weights."""
    return max(1, round((parameters / block_weights(1)) ** (1 / 3)))


def block_weights(depth: int) -> int:
    return 12 * depth * (HEAD_DIM * depth) ** 2
