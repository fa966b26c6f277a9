"""How many bytes numbers take in each format, the scales of quantized ones included.

    bits per number = bits + scale bits / group

A group of numbers shares one scale: INT4 in groups of 128 with FP16 scales takes 4.125 bits a weight (GPTQ, Frantar et
al. 2022), NF4 in blocks of 64 with FP32 scales 4.5 (QLoRA, Dettmers et al. 2023, before its scales are quantized too).
"""

from dataclasses import dataclass

from regard.spec import nearest


@dataclass(frozen=True)
class Format:
    bits: int
    group: int | None = None  # how many numbers share a scale; None: so many that it does not count
    scale_bits: int = 16

    def bytes(self, numbers: int) -> int:
        scales = 0 if self.group is None else -(-numbers // self.group) * self.scale_bits
        return -(-(numbers * self.bits + scales) // 8)


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
}


def format_of(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; {nearest(name, FORMATS)}")
    return FORMATS[name]


def room(memory: int, weights: int, per_token: int) -> int | None:
    """Tokens of cache that fit into so many bytes beside the weights; None: a token needs none."""
    return max(0, memory - weights) // per_token if per_token else None
