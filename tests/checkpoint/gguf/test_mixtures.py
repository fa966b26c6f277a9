"""llama.cpp's mixtures of types: as in published files, and as they are written and read."""

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch

from regard.checkpoint import load
from regard.checkpoint.gguf.mixtures import FILE_TYPES, FORMATS, GGUFFormat, tensor_type
from regard.checkpoint.gguf.reading import BLOCK_FORMATS, FLOAT_TYPES
from regard.cli import export
from regard.gguf_header import read_header
from tests.checkpoint.gguf.tiny_models import LLAMA, MODELS, WIDE, export_tiny

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize(
    ("format", "groups", "published"),
    [
        ("q4_k_m", 1, {"q4_k": 193, "q6_k": 33}),
        ("q5_k_m", 1, {"q5_k": 193, "q6_k": 33}),
        ("q3_k_m", 1, {"q3_k": 129, "q4_k": 92, "q5_k": 4, "q6_k": 1}),
        ("q4_k_s", 1, {"q4_k": 217, "q5_k": 8, "q6_k": 1}),
        ("q2_k", 4, {"q2_k": 129, "q3_k": 64, "q4_k": 32, "q6_k": 1}),
        ("q6_k", 1, {"q6_k": 226}),
        ("q8_0", 1, {"q8_0": 226}),
        ("q4_0", 1, {"q4_0": 225, "q6_k": 1}),
    ],
)
def test_counts_of_types_equal_those_of_published_files(
    format: GGUFFormat, groups: int, published: dict[str, int]
) -> None:
    """Of the 226 matrices of a Llama with 32 layers; groups=4: Llama 3 8B, else Llama 2 7B."""
    names = ["token_embd.weight", "output.weight", *(f"blk.{i}.{part}.weight" for i in range(32) for part in PARTS)]
    matrix = torch.empty(4096, 4096, device="meta")
    assert Counter(tensor_type(name, matrix, format, 32, groups, tied=False) for name in names) == published


def test_rows_that_are_no_whole_blocks_have_another_type() -> None:
    def type_of(columns: int, format: GGUFFormat, name: str = "blk.9.ffn_up.weight") -> str:
        return tensor_type(name, torch.empty(8, columns, device="meta"), format, 32, 1, tied=True)

    assert [type_of(576, format) for format in ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "q4_0")] == [
        "iq4_nl", "iq4_nl", "q5_0", "q5_1", "q8_0", "iq4_nl", "q4_0",
    ]  # fmt: skip
    assert type_of(48, "q4_k_m") == type_of(48, "q8_0") == "f16"
    assert type_of(576, "q4_k_m", "token_embd.weight") == "q8_0"  # tied: it is the head
    assert type_of(512, "q4_k_m", "token_embd.weight") == "q6_k"
    assert type_of(512, "q4_k_m", "position_embd.weight") == "f32"


def test_the_command_offers_every_format() -> None:
    assert get_args(export.GGUFFormat) == FORMATS
    assert FILE_TYPES.keys() == {*FORMATS} and len({*FILE_TYPES.values()}) == len(FORMATS)


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read_as_it_was_rounded(format: GGUFFormat, tmp_path: Path) -> None:
    model, file = export_tiny(WIDE if "k" in format or "x" in format else LLAMA, tmp_path, format)
    header, reloaded = read_header(file), dict(load(file).named_parameters())
    assert header.metadata["general.file_type"] == FILE_TYPES[format]
    assert file.stat().st_size == max(info.start + size_of(info) for info in header.tensors.values())
    down = header.tensors["blk.1.ffn_down.weight"].type
    for name, weight in model.named_parameters():
        if name.endswith("down.weight"):
            expected = weight.to(FLOAT_TYPES[down]).float() if down in FLOAT_TYPES else rounded(weight, down)
            if "blocks.1" in name:
                assert torch.equal(reloaded[name], expected)
        if weight.dim() == 1:
            assert torch.equal(reloaded[name], weight)
        else:
            assert (reloaded[name] - weight).norm() < 0.4 * weight.norm()


def rounded(weight: torch.Tensor, type: int) -> torch.Tensor:
    return BLOCK_FORMATS[type].dequantize(BLOCK_FORMATS[type].quantize(weight))


def size_of(info) -> int:
    count = torch.empty(info.shape, device="meta")
    size = (
        count.numel() * FLOAT_TYPES[info.type].itemsize
        if info.type in FLOAT_TYPES
        else BLOCK_FORMATS[info.type].bytes(info.shape)
    )
    return size + -size % 32


def test_layers_of_gpt2_have_types_too(tmp_path: Path) -> None:
    _, file = export_tiny(MODELS["gpt2"], tmp_path, "q4_k_m")
    types = {name: info.type for name, info in read_header(file).tensors.items()}
    assert types["blk.0.attn_qkv.weight"] == BLOCK_FORMATS[7].layout.id  # q5_k, and with 32 columns q5_1
    assert types["position_embd.weight"] == 0 and types["token_embd.weight"] == 8
