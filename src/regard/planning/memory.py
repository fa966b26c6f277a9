"""Bytes of numbers in each format, of a cache compared with the weights, and of attention's traffic with slow memory.

    a number     bits + scale bits / group: a group of numbers shares one scale
    scores       n² per head if they are materialized
    traffic      standard: read Q, K, write S, read S, write P, read P, V, write O         4·n·E + 4·n²  numbers
                 tiled: read Q and write O once, read K, V per block of B queries          2·n·E + 2·n·E·⌈n / B⌉

INT4 in groups of 128 with FP16 scales takes 4.125 bits per weight (GPTQ, Frantar et al. 2022), NF4 in blocks of 64 with
FP32 scales 4.5, and 4.127 once its scales are quantized (QLoRA, Dettmers et al. 2023), Q4_K of GGUF files 4.5. Four
tiles of B rows (Q, K, V, O) share a fast memory of M numbers, B = M / 4E, so tiling saves a factor of M / 2E², and
nothing once E² > M / 2. It changes the bytes, not the FLOPs (Dao et al. 2022, in the loop order of FlashAttention-2,
Dao 2023).
"""

from dataclasses import dataclass

from regard.formats.gguf_layouts import LAYOUTS, block_bytes
from regard.planning.flops import window_pairs
from regard.spec import suggest_name


@dataclass(frozen=True)
class Format:
    bits: int
    group: int | None = None  # numbers that share a scale; None: no scales, or too few to count
    scale_bits: int = 16

    def bytes(self, numbers: int) -> int:
        scales = 0 if self.group is None else -(-numbers // self.group) * self.scale_bits
        return -(-(numbers * self.bits + scales) // 8)


STORED = "stored"  # weights as in a quantized model: each layer in its own format
FORMATS = {
    "float64": Format(64),
    "float32": Format(32),
    "float16": Format(16),
    "bfloat16": Format(16),
    "float8": Format(8),
    "int8": Format(8),
    "int4": Format(4),
    "int4/128": Format(4, 128),
    "nf4": Format(4, 64, 32),
    "nf4/double": Format(4, 64 * 256, 256 * 8 + 32),  # scales of 8 bits, of which 256 share one of 32 bits
}
FORMATS |= {  # of GGUF files: all but the codes of a block counts as scales
    type: Format(layout.code_bits, layout.block, 8 * block_bytes(type) - layout.block * layout.code_bits)
    for type, layout in LAYOUTS.items()
}
RARE = ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs")
LISTED = [name for name in FORMATS if name not in RARE]  # in a plan


def format_of(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; {suggest_name(name, FORMATS)}")
    return FORMATS[name]


def cached_tokens_that_fit(memory: int, weights: int, bytes_per_token: int) -> int | None:
    """Tokens whose cache fits into `memory` bytes next to the weights; None: a token needs no cache."""
    return max(0, memory - weights) // bytes_per_token if bytes_per_token else None


def tokens_to_match_weights(weights: int, bytes_per_token: int) -> int | None:
    """The most tokens whose cache is no larger than the weights; None: a token needs no cache."""
    return weights // bytes_per_token if bytes_per_token else None


def sequences_to_exceed_weights(weights: int, bytes_per_token: int, context: int) -> int | None:
    """The fewest sequences of `context` tokens whose cache is larger than the weights."""
    return weights // (bytes_per_token * context) + 1 if bytes_per_token else None


def score_bytes(length: int, heads: int = 1, itemsize: int = 2) -> int:
    """Bytes of one layer's scores if they are materialized."""
    return heads * length * length * itemsize


def attention_bytes(length: int, heads: int, head_dim: int, window: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes of one layer's q, k, v and output, and of what each backend keeps beside them.

    `block_sparse` keeps the scores of a causal window at most; a fused kernel keeps fewer.
    """
    arrays = 4 * length * heads * head_dim
    kept = {
        "reference: all scores": heads * length * length,
        "tiled: maximum and sum": 2 * heads * length,
        "block_sparse: scores of the window": heads * window_pairs(length, window),
        "linear attention: a state": heads * head_dim * (head_dim + 1),
    }
    return {backend: itemsize * (arrays + numbers) for backend, numbers in kept.items()}


def tile_rows(fast_memory: int, head_dim: int) -> int:
    """Rows of a tile when four tiles fill a fast memory of `fast_memory` numbers."""
    rows = fast_memory // (4 * head_dim)
    if rows < 1:
        raise ValueError(
            f"fast_memory={fast_memory} numbers hold no tile of head_dim={head_dim}; give at least {4 * head_dim}"
        )
    return rows


def standard_traffic(length: int, head_dim: int) -> int:
    """Numbers that one head reads and writes if it materializes its scores."""
    return 4 * length * head_dim + 4 * length * length


def tiled_traffic(length: int, head_dim: int, fast_memory: int) -> int:
    """Numbers that one head reads and writes if its tiles stay in a fast memory of `fast_memory` numbers."""
    blocks = -(-length // tile_rows(fast_memory, head_dim))
    return 2 * length * head_dim * (1 + blocks)
