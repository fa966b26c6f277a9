"""Read a GGUF file: its metadata as a family's config, its tensors dequantized on demand.

Before any weights are read, every tensor is checked: a known type, rows of whole blocks, inside the file, no overlap.
A tensor is dequantized a few rows at a time, so the peak memory is one copy of the model plus one tensor.
"""

import math
import mmap
from array import array
from functools import partial
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.gguf.architectures import find_architecture
from regard.checkpoint.gguf.rope_metadata import DIVISORS, ROPE_KEYS, rope_parameters
from regard.families import FamilyError, family
from regard.formats.gguf_blocks import GGUFBlocks
from regard.formats.gguf_layouts import LAYOUTS, block_bytes
from regard.gguf_header import GGUFError, Header, TensorInfo, read_header
from regard.models.base import Model
from regard.weights.table import Chain, StoredTensor

FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by their ids in a file
FLOAT_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
BLOCK_FORMATS = {layout.id: GGUFBlocks(type) for type, layout in LAYOUTS.items()}
DEQUANTIZE_NUMEL = 1 << 20  # numbers dequantized at a time
MAX_DIVISORS = 1 << 16


def open_gguf(file: str | Path) -> tuple[Model, Chain, dict[str, StoredTensor]]:
    """The spec, the table of tensor names, and the tensors by name, unread."""
    try:
        header = read_header(file)
    except GGUFError as error:
        raise CheckpointError(str(error)) from error
    stored = open_tensors(header)
    try:
        spec, chain = read_spec_and_table(header, read_divisors(stored))
    except FamilyError as error:
        raise FamilyError(f"{file}: {error}") from error
    return spec, chain, stored


def read_spec_and_table(header: Header, divisors: list[float] | None) -> tuple[Model, Chain]:
    config = family_config(header, divisors)
    family_module = family(config["model_type"])
    spec = family_module.spec(config)
    table = find_architecture(header.metadata["general.architecture"]).table(config)
    return spec, Chain(table, family_module.table(spec))


def family_config(header: Header, divisors: list[float] | None) -> dict[str, Any]:
    """The metadata as the family's config.json."""
    name = header.metadata.get("general.architecture")
    architecture = find_architecture(name)
    prefix = f"{name}."
    metadata = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    config_keys = {**architecture.required, **architecture.optional}
    for key in architecture.required:
        if key not in metadata:
            raise FamilyError(f"{name}.{key} is missing; convert the model to GGUF again")
    for key in metadata:
        if key not in config_keys and not (architecture.rope and key in ROPE_KEYS):
            raise FamilyError(f"{name}.{key} is not supported; use the Hugging Face folder of the model")
    if "token_embd.weight" not in header.tensors:
        raise FamilyError("token_embd.weight is missing; download the file again")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        **architecture.fixed,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    config |= {flag: tensor in header.tensors for flag, tensor in architecture.flags.items()}
    for key, config_key in config_keys.items():
        if key not in metadata:
            continue
        value = metadata[key]
        if isinstance(value, array):
            raise FamilyError(f"{name}.{key} has one value per layer; only a single value is supported")
        if config.setdefault(config_key, value) != value:
            raise FamilyError(
                f"{name}.{key}={value!r:.80} contradicts another key, by which {config_key}={config[config_key]!r:.80}"
            )
    config.setdefault("vocab_size", header.tensors["token_embd.weight"].shape[0])
    if architecture.rope:
        heads, width = (config[key] for key in ("num_attention_heads", "hidden_size"))
        if not all(type(size) is int and size > 0 for size in (heads, width)):
            raise FamilyError(
                f"{name}: head_count={heads!r:.80} and embedding_length={width!r:.80} must both be positive integers"
            )
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", width // heads)
        config["rope_parameters"] = rope_parameters(metadata, divisors, config["max_position_embeddings"])
    return config


def read_divisors(stored: dict[str, StoredTensor]) -> list[float] | None:
    """The divisors of RoPE's frequencies, which GGUF stores as a tensor; None if the file has none."""
    if DIVISORS not in stored:
        return None
    tensor = stored[DIVISORS]
    if math.prod(tensor.shape) > MAX_DIVISORS:
        raise CheckpointError(
            f"{tensor.file}: {DIVISORS} {tensor.shape} must have one number per frequency; download it again"
        )
    return tensor.read().flatten().tolist()


def open_tensors(header: Header) -> dict[str, StoredTensor]:
    """All tensors of the file by name, unread. Raises CheckpointError for one that fails the checks above."""
    stored, spans = {}, []
    for name, info in header.tensors.items():
        if info.type not in FLOAT_TYPES and info.type not in BLOCK_FORMATS:
            types = [*FLOAT_NAMES.values(), *(format.type.upper() for format in BLOCK_FORMATS.values())]
            raise CheckpointError(
                f"{header.file}: {name} has type {info.type}; the supported types are {', '.join(types)}"
            )
        end = info.start + tensor_bytes(header, name, info)
        if end > header.size:
            raise CheckpointError(
                f"{header.file}: {name} {info.shape} ends at byte {end}, but the file has {header.size} bytes; "
                "download it again"
            )
        spans.append((info.start, end, name))
        if info.type in FLOAT_TYPES:
            dtype, read = FLOAT_NAMES[FLOAT_TYPES[info.type]], partial(read_floats, header.file, info)
        else:
            dtype, read = "F32", partial(read_numbers, header.file, info)
        stored[name] = StoredTensor(str(header.file), info.shape, dtype, read)
    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise CheckpointError(f"{header.file}: {name} and {other} overlap at byte {start}; download it again")
    return stored


def tensor_bytes(header: Header, name: str, info: TensorInfo) -> int:
    if info.type in FLOAT_TYPES:
        return math.prod(info.shape) * FLOAT_TYPES[info.type].itemsize
    block = BLOCK_FORMATS[info.type].layout.block
    if info.shape[-1] % block:
        raise CheckpointError(
            f"{header.file}: {name} {info.shape} has rows that are not a multiple of the block size {block}"
        )
    return math.prod(info.shape[:-1]) * row_bytes(info)


def row_bytes(info: TensorInfo) -> int:
    """Of a tensor in blocks."""
    return info.shape[-1] // BLOCK_FORMATS[info.type].layout.block * block_bytes(BLOCK_FORMATS[info.type].type)


def read_floats(file: Path, info: TensorInfo) -> Tensor:
    out = allocate(info.shape, FLOAT_TYPES[info.type])
    with file.open("rb") as stream:
        stream.seek(info.start)
        read_into(stream, out)
    return out


def read_blocks(file: Path, info: TensorInfo) -> Tensor:
    """A quantized tensor as its bytes (…, bytes of a row)."""
    out = allocate((*info.shape[:-1], row_bytes(info)), torch.uint8)
    with file.open("rb") as stream:
        stream.seek(info.start)
        read_into(stream, out)
    return out


def read_numbers(file: Path, info: TensorInfo) -> Tensor:
    """A quantized tensor as float32."""
    out, format = allocate(info.shape, torch.float32), BLOCK_FORMATS[info.type]
    with file.open("rb") as stream:
        stream.seek(info.start)
        for rows in out.view(-1, info.shape[-1]).split(max(DEQUANTIZE_NUMEL // info.shape[-1], 1)):
            blocks = torch.empty(len(rows), row_bytes(info), dtype=torch.uint8)
            read_into(stream, blocks)
            rows.copy_(format.dequantize({"blocks": blocks}))
    return out


def read_into(stream: BufferedReader, out: Tensor) -> None:
    """The next bytes of the file as the numbers of a contiguous tensor."""
    if stream.readinto(out.flatten().view(torch.uint8).numpy()) < out.nbytes:
        raise CheckpointError(f"{stream.name} was truncated while it was read; download it again")


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in anonymous pages, which return to the system with the tensor and do not fragment the heap."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
