"""GGUF's block formats: bytes of the `gguf` library and of llama.cpp, plain loops, errors and their bounds."""

import ctypes
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from regard.formats.gguf_blocks import IQ4_LEVELS, GGUFBlocks
from regard.formats.gguf_layouts import LAYOUTS, BlockType, block_bytes, pack_planes, unpack_planes
from regard.spec import SpecError

TYPES: tuple[BlockType, ...] = get_args(BlockType)
SIMPLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
SEARCHED = tuple(type for type in TYPES if type not in SIMPLE)


def weights(kind: str = "normal", shape: tuple[int, ...] = (12, 512)) -> Tensor:
    rng = torch.Generator().manual_seed(len(kind))
    weight = torch.randn(shape, generator=rng) * 0.02
    match kind:
        case "outlier":
            weight.view(-1)[5] = -3.0
        case "positive" | "negative":
            weight = weight.abs() * (1 if kind == "positive" else -1)
        case "uneven":  # some groups are far smaller than others of their block, or constant
            scales = 10.0 ** torch.randint(-9, 3, (shape[-1] // 16,), generator=rng)
            weight *= scales.repeat_interleave(16)
            weight[..., 64:128] = -0.5
        case "sparse":
            weight = weight.where(torch.rand(shape, generator=rng) < 0.02, 0)
        case "tiny":
            weight *= 1e-6
        case "denormal":
            weight *= 1e-38
        case "large":
            weight *= 3e5
        case "zero":
            weight.zero_()
    return weight


KINDS = ("normal", "outlier", "positive", "negative", "uneven", "sparse", "tiny", "denormal", "large", "zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type", TYPES)
def test_errors_are_within_the_bound_and_sizes_are_as_planned(type: BlockType, kind: str) -> None:
    format = GGUFBlocks(type)
    for shape in ((12, 512), (2, 3, 256)):
        weight = weights(kind, shape)
        stored = format.quantize(weight)
        restored, bound = format.dequantize(stored), format.error_bound(stored)
        assert restored.shape == bound.shape == weight.shape
        assert ((restored - weight).abs() <= bound * (1 + 1e-5)).all()
        assert stored["blocks"].nbytes == format.bytes(shape)
        assert kind != "zero" or (restored == 0).all()


@pytest.mark.parametrize("type", TYPES)
def test_layouts_and_numbers_equal_those_of_the_gguf_library(type: BlockType) -> None:
    """The blocks have random bits."""
    theirs = gguf.GGMLQuantizationType[type.upper()]
    assert LAYOUTS[type].id == theirs
    assert (LAYOUTS[type].block, block_bytes(type)) == gguf.GGML_QUANT_SIZES[theirs]
    raw = np.random.default_rng(0).integers(0, 256, (40, 6 * block_bytes(type)), np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, theirs).copy())
    found = GGUFBlocks(type).dequantize({"blocks": torch.from_numpy(raw)})
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormal"])  # its reciprocals are infinite
@pytest.mark.parametrize("type", SIMPLE)
def test_blocks_equal_those_of_the_gguf_library(type: BlockType, kind: str) -> None:
    weight = weights(kind)
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[type.upper()])
    assert np.array_equal(GGUFBlocks(type).quantize(weight)["blocks"].numpy(), expected)


def float16_at(block: list[int], place: int) -> float:
    return float(np.frombuffer(bytes(block[place : place + 2]), np.float16)[0])


def read_block(type: BlockType, block: list[int]) -> list[float]:
    """One block by the definition of its struct in ggml, number by number."""
    first, second = float16_at(block, 0), float16_at(block, 2)
    numbers = []
    for i in range(LAYOUTS[type].block):
        half, nibble = i % 16, 4 * (i % 32 // 16)  # of 32 numbers the second half has the high bits of a byte
        k = i // 32  # the sub-block of 32 numbers
        match type:
            case "q4_0":
                number = first * ((block[2 + half] >> nibble & 15) - 8)
            case "q4_1":
                number = first * (block[4 + half] >> nibble & 15) + second
            case "q5_0":
                number = first * ((block[6 + half] >> nibble & 15 | (block[2 + i // 8] >> i % 8 & 1) << 4) - 16)
            case "q5_1":
                number = first * (block[8 + half] >> nibble & 15 | (block[4 + i // 8] >> i % 8 & 1) << 4) + second
            case "q8_0":
                number = first * (block[2 + i] - 256 * (block[2 + i] > 127))
            case "q2_k":
                scales, code = block[i // 16], block[16 + i // 128 * 32 + i % 32] >> 2 * (k % 4) & 3
                number = float16_at(block, 80) * (scales & 15) * code - float16_at(block, 82) * (scales >> 4)
            case "q3_k":
                code = block[32 + i // 128 * 32 + i % 32] >> 2 * (k % 4) & 3 | (block[i % 32] >> k & 1) << 2
                g = i // 16
                scale = block[96 + g % 8] >> 4 * (g // 8) & 15 | (block[104 + g % 4] >> 2 * (g // 4) & 3) << 4
                number = float16_at(block, 108) * (scale - 32) * (code - 4)
            case "q4_k" | "q5_k":
                s = block[4:16]
                if k < 4:
                    scale, minimum = s[k] & 63, s[k + 4] & 63
                else:
                    scale, minimum = s[k + 4] & 15 | s[k - 4] >> 6 << 4, s[k + 4] >> 4 | s[k] >> 6 << 4
                code = block[(16 if type == "q4_k" else 48) + k // 2 * 32 + i % 32] >> 4 * (k % 2) & 15
                code |= 0 if type == "q4_k" else (block[16 + i % 32] >> k & 1) << 4
                number = first * scale * code - second * minimum
            case "q6_k":
                code = block[i // 128 * 64 + i % 64] >> 4 * (i % 128 // 64) & 15
                code |= (block[128 + i // 128 * 32 + i % 32] >> 2 * (k % 4) & 3) << 4
                scale = block[192 + i // 16] - 256 * (block[192 + i // 16] > 127)
                number = float16_at(block, 208) * scale * (code - 32)
            case "iq4_nl":
                number = first * IQ4_LEVELS[block[2 + half] >> nibble & 15]
            case "iq4_xs":
                high = (block[2] | block[3] << 8) >> 2 * k & 3
                scale = (block[4 + k // 2] >> 4 * (k % 2) & 15 | high << 4) - 32
                number = first * scale * IQ4_LEVELS[block[8 + 16 * k + half] >> nibble & 15]
        numbers.append(number)
    return numbers


@pytest.mark.parametrize("type", TYPES)
def test_numbers_equal_a_plain_loop_over_the_definition(type: BlockType) -> None:
    stored = GGUFBlocks(type).quantize(weights("outlier"))
    found = GGUFBlocks(type).dequantize(stored, torch.float64).view(-1, LAYOUTS[type].block)
    blocks = stored["blocks"].view(-1, block_bytes(type))
    for block, numbers in zip(blocks[:20].tolist(), found[:20].tolist(), strict=True):
        assert numbers == pytest.approx(read_block(type, block), rel=1e-6, abs=1e-9)


@pytest.fixture(scope="session")
def llama_cpp() -> Any:
    """`ggml_quantize_chunk` of llama.cpp, whose C functions its Python binding exports."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp, the binding of llama.cpp, is not installed")
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]

    def quantize(weight: Tensor, type: BlockType) -> Tensor:
        rows, columns = weight.shape
        blocks = torch.zeros(rows, columns // LAYOUTS[type].block * block_bytes(type), dtype=torch.uint8)
        size = library.ggml_quantize_chunk(
            LAYOUTS[type].id, weight.data_ptr(), blocks.data_ptr(), 0, rows, columns, None
        )
        assert size == blocks.nbytes
        return blocks

    return quantize


COMPARED = [(type, kind) for type in SEARCHED for kind in ("normal", "outlier", "negative", "sparse")]
COMPARED.remove(("iq4_nl", "outlier"))  # llama.cpp also tries the other end of the levels for the largest number


@pytest.mark.parametrize(("type", "kind"), COMPARED)
def test_searched_scales_have_no_larger_error_than_those_of_llama_cpp(
    type: BlockType, kind: str, llama_cpp: Any
) -> None:
    format, weight = GGUFBlocks(type), weights(kind, (64, 512))
    errors = [
        (format.dequantize({"blocks": blocks}) - weight).square().mean().item()
        for blocks in (format.quantize(weight)["blocks"], llama_cpp(weight, type))
    ]
    assert errors[0] <= errors[1]
    if kind == "normal":
        assert errors[0] < 0.98 * errors[1]


@pytest.mark.parametrize("type", ["q4_1", "q8_0"])
def test_simple_blocks_equal_those_of_llama_cpp(type: BlockType, llama_cpp: Any) -> None:
    weight = weights(shape=(64, 512))
    assert torch.equal(GGUFBlocks(type).quantize(weight)["blocks"], llama_cpp(weight, type))


def test_more_bits_have_smaller_errors() -> None:
    weight = weights(shape=(64, 1024))
    errors, bits = [], []
    for type in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0"):
        format = GGUFBlocks(type)
        errors.append((format.dequantize(format.quantize(weight)) - weight).square().mean().item())
        bits.append(8 * format.bytes(weight.shape) / weight.numel())
    assert errors == sorted(errors, reverse=True) and bits == [2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5]


@pytest.mark.parametrize(("bits", "width"), [(1, 1), (1, 32), (2, 4), (4, 16), (8, 1)])
def test_planes_are_unpacked_as_they_were_packed(bits: int, width: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 256), dtype=torch.uint8)
    packed = pack_planes(codes, bits, width)
    assert packed.shape == (3, 32 * bits) and torch.equal(unpack_planes(packed, bits, width), codes)


def test_what_a_block_cannot_store_is_refused() -> None:
    with pytest.raises(SpecError, match="q4_k: 320 inputs are no multiple of its block of 256"):
        GGUFBlocks("q4_k").quantize(torch.zeros(4, 320))
    for type in TYPES:
        with pytest.raises(SpecError, match="above 65504, the largest float16"):
            GGUFBlocks(type).quantize(torch.full((1, 256), 1e30))
        with pytest.raises(SpecError, match="not finite"):
            GGUFBlocks(type).quantize(torch.full((1, 256), float("nan")))
