"""Products of x with the 4 or 8 codes of a word of 32 bits, for one token on a GPU.

Converting a code to a number takes longer than reading it. Here PTX makes pairs of float16 of codes by logical
operations, two at a time. x comes in pairs of float16 too. The products of a word are summed in float16, two or four
per half, and the two sums in float32. Other GPUs, and the interpreter, convert code by code, with sums in float32.
"""

import triton
import triton.language as tl

# Four bits in the last bits of a float16 are the subnormal number q / 2^24, the next four q / 2^20, so nothing is
# converted. x is multiplied by 2^15, so that the products are normal numbers.
INT4_PRODUCTS: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, t0, t1, t2, t3;  .reg .b16 h0, h1;  .reg .f32 f0, f1;
    shr.u32 a, $1, 8;
    and.b32 t0, $1, 0x000f000f;
    and.b32 t1, $1, 0x00f000f0;
    and.b32 t2, a, 0x000f000f;
    and.b32 t3, a, 0x00f000f0;
    mul.rn.f16x2 t0, t0, $2;
    fma.rn.f16x2 t0, t1, $3, t0;
    fma.rn.f16x2 t0, t2, $4, t0;
    fma.rn.f16x2 t0, t3, $5, t0;
    mov.b32 {h0, h1}, t0;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    add.rn.f32 $0, f0, f1;
}""")
INT4_INPUTS: tl.constexpr = tl.constexpr(2.0**15)
INT4_CODES: tl.constexpr = tl.constexpr(2.0**-24)
# Eight bits: 1024 + q, less 1152, is q - 128. Bytes 0 and 2 are a pair, and bytes 1 and 3.
INT8_PRODUCTS: tl.constexpr = tl.constexpr("""{
    .reg .b32 t0, t1, c, d;  .reg .b16 h0, h1;  .reg .f32 f0, f1;
    mov.b32 c, 0x64646464;
    mov.b32 d, 0x64806480;
    prmt.b32 t0, $1, c, 0x4240;
    prmt.b32 t1, $1, c, 0x4341;
    sub.rn.f16x2 t0, t0, d;
    sub.rn.f16x2 t1, t1, d;
    mul.rn.f16x2 t0, t0, $2;
    fma.rn.f16x2 t0, t1, $3, t0;
    mov.b32 {h0, h1}, t0;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    add.rn.f32 $0, f0, f1;
}""")
# FP8: sign, exponent and fraction are those of a float16 number that is 2^8 times smaller.
FP8_PRODUCTS: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b, t0, t1;  .reg .b16 h0, h1;  .reg .f32 f0, f1;
    shl.b32 a, $1, 8;
    shl.b32 b, $1, 7;
    and.b32 a, a, 0x80008000;
    lop3.b32 t0, b, 0x3f803f80, a, 0xea;
    shr.u32 b, $1, 1;
    and.b32 a, $1, 0x80008000;
    lop3.b32 t1, b, 0x3f803f80, a, 0xea;
    mul.rn.f16x2 t0, t0, $2;
    fma.rn.f16x2 t0, t1, $3, t0;
    mov.b32 {h0, h1}, t0;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    add.rn.f32 $0, f0, f1;
}""")
FP8_FACTOR: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def larger_and_sum(square, largest, other_square, other_largest):
    return square + other_square, tl.maximum(largest, other_largest)


@triton.jit
def load_inputs(
    x, norm, columns, eps, NORM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """(BLOCK, COUNT) x for the codes of BLOCK words, normalized, and divided by about its largest number; this number.

    Both reductions over x are one, and all loads precede it: the whole program waits for them.
    """
    cell = tl.arange(0, BLOCK)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    inside = cell < columns
    if NORM:
        weight = tl.load(norm + cell, mask=inside, other=0.0)
    values = tl.load(x + cell, mask=inside, other=0.0)
    dtype = values.dtype
    values = values.to(tl.float32)
    factor = 1.0
    if NORM:
        squares = tl.reshape(values * values, (BLOCK * COUNT,))
        weighted = tl.reshape(tl.abs(values * weight.to(tl.float32)), (BLOCK * COUNT,))
        square, largest = tl.reduce((squares, weighted), 0, larger_and_sum)
        factor = tl.rsqrt(square / columns + eps)
        values = ((values * factor).to(dtype) * weight).to(tl.float32)
        largest *= factor
    else:
        largest = tl.max(tl.abs(values))
    unit = tl.where(largest > 0, largest, 1.0)  # x / unit has no number that is too large for float16
    values *= 1 / unit
    if PTX:  # the sums of x are those of the numbers that are multiplied
        if COUNT == 8:
            values *= INT4_INPUTS
            unit *= 1 / INT4_INPUTS
        values = values.to(tl.float16).to(tl.float32)
    return values, unit


@triton.jit
def pairs(values, COUNT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Numbers i and i + COUNT / 2 of (BLOCK, COUNT) in one word: of 32 bits as float16, else of 64 bits as float32.

    Four tensors (BLOCK,) for i = 0 … 3; with a COUNT of 4, the last two are the first two.
    """
    half: tl.constexpr = COUNT // 2
    if PTX and COUNT == 8:  # odd codes are multiplied as 16 q
        values *= tl.where(tl.arange(0, COUNT) % 2 == 1, 0.0625, 1.0)[None, :]
    low, high = tl.split(tl.permute(tl.reshape(values, (BLOCK, 2, half)), (0, 2, 1)))  # (BLOCK, half)
    if PTX:
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        low = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        words = low | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    if half == 2:
        p0, p1 = tl.split(words)
        p2, p3 = p0, p1
    else:
        even, odd = tl.split(tl.reshape(words, (BLOCK, 2, 2)))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@triton.jit
def code_value(words, i, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Code i of every word: less 128 with 8 bits; FP8: divided by 2^8."""
    code = (words >> (BITS * i)) & ((1 << BITS) - 1)
    if FLOAT:
        return ((code & 128) << 8 | (code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (code - (128 if BITS == 8 else 0)).to(tl.float32)


@triton.jit
def add_pair(y, words, p, i, BITS: tl.constexpr, FLOAT: tl.constexpr):
    low, high = p.to(tl.int32).to(tl.float32, bitcast=True), (p >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    y += code_value(words, i, BITS, FLOAT) * low[None, :]
    return y + code_value(words, i + 16 // BITS, BITS, FLOAT) * high[None, :]


@triton.jit
def word_products(words, p0, p1, p2, p3, BITS: tl.constexpr, FLOAT: tl.constexpr, PTX: tl.constexpr):
    """(N, W) sums of the products of the codes of every word with x, which comes in `pairs` (W,)."""
    if not PTX:
        y = add_pair(tl.zeros(words.shape, tl.float32), words, p0, 0, BITS, FLOAT)
        y = add_pair(y, words, p1, 1, BITS, FLOAT)
        if BITS == 4:
            y = add_pair(y, words, p2, 2, BITS, FLOAT)
            y = add_pair(y, words, p3, 3, BITS, FLOAT)
    elif BITS == 4:
        y = tl.inline_asm_elementwise(
            INT4_PRODUCTS, "=f,r,r,r,r,r", [words, p0[None, :], p1[None, :], p2[None, :], p3[None, :]],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = tl.inline_asm_elementwise(
            FP8_PRODUCTS if FLOAT else INT8_PRODUCTS, "=f,r,r,r", [words, p0[None, :], p1[None, :]],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return y
