"""Load a GGUF file without unpacking it: layers keep the blocks of the file.

    linear layers, embedding, head      blocks; a kernel of a CPU multiplies them, else they are dequantized when used
    norms, biases, positions            numbers

Blocks run along the inputs of a layer, so the operations of the weight tables that move whole rows (the order of RoPE's
pairs, the parts of a fused projection) are applied to the rows of blocks. A head that is tied to the embedding reads
the same blocks.
"""

import mmap
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.adapt.quantized import QuantizedLinear
from regard.adapt.stored_weight import QuantizedEmbedding
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.gguf.reading import BLOCK_FORMATS, read_blocks, row_bytes
from regard.formats.gguf_blocks import GGUFBlocks
from regard.gguf_header import TensorInfo, read_header
from regard.weights.table import Chain, StoredTensor


def read_as_blocks(
    model: nn.Module, file: Path, table: Chain, stored: Mapping[str, StoredTensor], map_file: bool
) -> tuple[dict[str, StoredTensor], dict[str, GGUFBlocks]]:
    """The tensors of the file, those of layers that keep blocks as bytes (rows, bytes of a row); and the formats of
    these layers by the names of their weights. model: on the meta device. map_file: do not copy the bytes."""
    tensors, formats, result = read_header(file).tensors, {}, dict(stored)
    sources = table.sources(dict(model.named_parameters()))
    content = mapped(file) if map_file else None
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if type(module) not in (nn.Linear, nn.Embedding) or name not in sources:
            continue
        info = tensors[sources[name]]
        if info.type in BLOCK_FORMATS:
            formats[name] = BLOCK_FORMATS[info.type]
            read = partial(read_blocks, file, info) if content is None else partial(view_blocks, content, info)
            result[sources[name]] = replace(stored[sources[name]], read=read)
    return result, formats


def mapped(file: Path) -> Tensor:
    """The bytes of a file in memory that is shared with the system's cache of the file."""
    with file.open("rb") as stream:  # a private mapping: torch warns of memory that it may not write to
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def view_blocks(content: Tensor, info: TensorInfo) -> Tensor:
    shape = (*info.shape[:-1], row_bytes(info))
    return content[info.start :].as_strided(shape, torch.empty(shape, device="meta").stride())


def use_blocks(
    model: nn.Module, blocks: Mapping[str, Tensor], formats: Mapping[str, GGUFBlocks], dtype: torch.dtype
) -> None:
    """Replace the layers with these weights by layers with blocks, in place; a tied head gets the embedding's."""
    first_names: dict[nn.Parameter, str] = {}
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear and type(module) is not nn.Embedding:
            continue
        name = first_names.setdefault(module.weight, f"{path}.weight")
        if name not in blocks:
            continue
        stored, (rows, columns) = {"blocks": blocks[name]}, module.weight.shape
        if isinstance(module, nn.Linear):
            model.set_submodule(path, QuantizedLinear(formats[name], stored, (rows, columns), module.bias, dtype))
        else:
            model.set_submodule(path, QuantizedEmbedding(formats[name], stored, (rows, columns), dtype))


def refuse_packed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedEmbedding):
            raise CheckpointError(
                f"{name} keeps the blocks of a GGUF file, which a model folder cannot store; copy the file, or load it "
                "without packed=True and save that model"
            )
