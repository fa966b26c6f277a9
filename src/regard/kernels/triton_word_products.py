"""Products of x with the 4 or 8 codes of a word of 32 bits, for one token on a GPU.

Converting a code to a number takes longer than reading it. Here PTX makes pairs of float16 of codes by logical
operations, two at a time. x comes in pairs of float16 too. The products of a word are summed in float16, two or four
per half, and the two sums in float32. Other GPUs, and the interpreter, convert code by code, with sums in float32.
"""

import triton
import triton.language as tl

# Four bits: 1024 + q and 1024 + 16 q have q in their last bits, from which it is computed exactly.
INT4_PRODUCTS: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, t0, t1, t2, t3, c, d;  .reg .b16 h0, h1;  .reg .f32 f0, f1;
    mov.b32 c, 0x64006400;
    shr.u32 a, $1, 8;
    lop3.b32 t0, $1, 0x000f000f, c, 0xea;
    lop3.b32 t1, $1, 0x00f000f0, c, 0xea;
    lop3.b32 t2, a, 0x000f000f, c, 0xea;
    lop3.b32 t3, a, 0x00f000f0, c, 0xea;
    sub.rn.f16x2 t0, t0, c;
    sub.rn.f16x2 t2, t2, c;
    mov.b32 c, 0x2c002c00;
    mov.b32 d, 0xd400d400;
    fma.rn.f16x2 t1, t1, c, d;
    fma.rn.f16x2 t3, t3, c, d;
    mul.rn.f16x2 t0, t0, $2;
    fma.rn.f16x2 t0, t1, $3, t0;
    fma.rn.f16x2 t0, t2, $4, t0;
    fma.rn.f16x2 t0, t3, $5, t0;
    mov.b32 {h0, h1}, t0;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    add.rn.f32 $0, f0, f1;
}""")
# Eight bits: 1024 + q, less 1152, is q - 128.
INT8_PRODUCTS: tl.constexpr = tl.constexpr("""{
    .reg .b32 t0, t1, c, d;  .reg .b16 h0, h1;  .reg .f32 f0, f1;
    mov.b32 c, 0x64646464;
    mov.b32 d, 0x64806480;
    prmt.b32 t0, $1, c, 0x4140;
    prmt.b32 t1, $1, c, 0x4342;
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
def pair(low, high):
    """Two numbers as float16 in a word of 32 bits."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def fp8_value(word, i):
    """The number in byte i of a word, divided by 2^8."""
    byte = (word >> (8 * i)) & 255
    return ((byte & 128) << 8 | (byte & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def word_products(
    words, p0, p1, p2, p3, x0, x1, x2, x3, x4, x5, x6, x7, BITS: tl.constexpr, FLOAT: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """(N, W) sums of the products of the codes of every word with x (W,): in pairs p for PTX, else one by one."""
    if PTX:
        if BITS == 4:
            return tl.inline_asm_elementwise(
                INT4_PRODUCTS, "=f,r,r,r,r,r", [words, p0[None, :], p1[None, :], p2[None, :], p3[None, :]],
                tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            FP8_PRODUCTS if FLOAT else INT8_PRODUCTS, "=f,r,r,r", [words, p0[None, :], p1[None, :]],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    if FLOAT:
        y = fp8_value(words, 0) * x0[None, :] + fp8_value(words, 1) * x1[None, :]
        return y + fp8_value(words, 2) * x2[None, :] + fp8_value(words, 3) * x3[None, :]
    last: tl.constexpr = (1 << BITS) - 1
    middle: tl.constexpr = 128 if BITS == 8 else 0
    y = ((words & last) - middle).to(tl.float32) * x0[None, :]
    y += (((words >> BITS) & last) - middle).to(tl.float32) * x1[None, :]
    y += (((words >> 2 * BITS) & last) - middle).to(tl.float32) * x2[None, :]
    y += (((words >> 3 * BITS) & last) - middle).to(tl.float32) * x3[None, :]
    if BITS == 4:
        y += ((words >> 16) & last).to(tl.float32) * x4[None, :]
        y += ((words >> 20) & last).to(tl.float32) * x5[None, :]
        y += ((words >> 24) & last).to(tl.float32) * x6[None, :]
        y += ((words >> 28) & last).to(tl.float32) * x7[None, :]
    return y
