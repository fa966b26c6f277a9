"""The names of number formats on the command line: int8, int4, nf4, fp8, q4_k …"""

from typing import get_args

from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.gguf_layouts import BlockType
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4
from regard.spec import require

FLOATS = {
    "fp8": Float("float8_e4m3fn"), "fp8_e4m3": Float("float8_e4m3fn"), "fp8_e5m2": Float("float8_e5m2"),
    "bf16": Float("bfloat16"), "fp16": Float("float16"),
}  # fmt: skip
BLOCKS = {type: GGUFBlocks(type) for type in get_args(BlockType)}
FORMAT_NAMES = f"int8, int6, int5, int4, int3, int2, nf4, {', '.join(FLOATS)}, or of GGUF: {', '.join(BLOCKS)}"


def format_named(name: str, group: str | None = None, symmetric: bool | None = None) -> NumberFormat:
    """The format of a name such as int4. group, symmetric: of integers; by default groups of 64 with zero points below
    eight bits, and one scale per output without them for eight."""
    require(isinstance(name, str), f"format={name!r} is not a name; choose one of {FORMAT_NAMES}")
    if name[:3] == "int" and name[3:] in tuple("2345678"):
        return integer_format(int(name[3:]), group, symmetric)
    known = name in FLOATS or name in BLOCKS or name == "nf4"
    require(known, f"format={name!r} is unknown; choose one of {FORMAT_NAMES}")
    require(symmetric is None, f"format={name} has no zero points to choose; leave out --symmetric and --asymmetric")
    if name == "nf4":
        require(group is None or is_size(group), f"group={group!r} of nf4 is a number of weights; 64 by default")
        return NF4(64 if group is None else int(group))
    require(group is None, f"format={name} has no groups to choose; leave out --group")
    return FLOATS[name] if name in FLOATS else BLOCKS[name]


def integer_format(bits: int, group: str | None, symmetric: bool | None) -> Integer:
    chosen = ("channel" if bits == 8 else "64") if group is None else group
    require(
        chosen in ("channel", "tensor") or is_size(chosen),
        f"group={chosen!r} is neither a positive number of inputs nor 'channel' or 'tensor'",
    )
    symmetric = bits == 8 if symmetric is None else symmetric
    if is_size(chosen):
        return Integer(bits, symmetric, int(chosen), "float16")
    return Integer(bits, symmetric, "tensor" if chosen == "tensor" else "channel")


def is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0
