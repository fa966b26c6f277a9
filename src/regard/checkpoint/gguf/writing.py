"""Write a GGUF file for llama.cpp: matrices as float32, float16 or Q8_0, all other tensors as float32.

Q8_0 stores 32 numbers as 8-bit integers with one float16 scale, 8.5 bits per number. Before the file is written, its
metadata is read back and must result in the same spec; a spec that the format cannot express is refused.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError, sync_folder
from regard.checkpoint.gguf.architectures import ARCHITECTURES, Architecture, find_architecture
from regard.checkpoint.gguf.reading import family_config, gguf_library, read_spec_and_table
from regard.checkpoint.gguf.rope_metadata import DIVISORS, llama3_as_divisors, rope_metadata
from regard.checkpoint.quantized_layers import refuse_quantized_layers
from regard.families import FamilyError, family, model_class
from regard.families.common.roundtrip import check_roundtrip
from regard.gguf_header import Header, TensorInfo
from regard.models.base import Model
from regard.models.value_head import without_value_head, without_value_weights

GGUFFormat = Literal["f32", "f16", "q8_0"]
FORMATS = get_args(GGUFFormat)
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
MAX_FLOAT16 = 65504.0


def export_gguf(
    model: nn.Module,
    file: str | Path,
    model_type: str,
    format: GGUFFormat = "f16",
    tokenizer_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a file of the family `model_type`; for `tokenizer_metadata`, see `regard.text.gguf`."""
    if format not in FORMATS:
        raise CheckpointError(f"format={format!r} is not supported; choose one of {', '.join(FORMATS)}")
    refuse_quantized_layers(model, "a GGUF export")
    name = next((name for name, entry in ARCHITECTURES.items() if entry.model_type == model_type), model_type)
    spec = model.spec
    assert isinstance(spec, Model), f"model.spec must be the spec of a model; found {spec!r:.80}"
    architecture = find_architecture(name)
    if not isinstance(spec, model_class(architecture.model_type)):
        raise FamilyError(
            f"a GGUF {name} model predicts the next token, and this one has another head; export a Hugging Face folder"
        )
    config, metadata, divisors = config_and_metadata(without_value_head(spec), name, architecture)
    tables = read_spec_and_table(expected_header(name, metadata, config), divisors)[1]
    tensors = dict(tables.write(without_value_weights(dict(model.named_parameters()))))
    if divisors is not None:
        if DIVISORS not in tables.outer.ignored:
            raise FamilyError(
                f"a GGUF {name} model cannot express one divisor per RoPE frequency; export a Hugging Face folder"
            )
        tensors[DIVISORS] = torch.tensor(divisors)
    metadata |= {"general.file_type": FILE_TYPES[format], "general.quantization_version": 2}
    write_file(Path(file), name, metadata | dict(tokenizer_metadata or {}), tensors, format)


def config_and_metadata(
    spec: Model, name: str, architecture: Architecture
) -> tuple[dict[str, Any], dict[str, Any], list[float] | None]:
    """The family's config, the metadata for it, and the divisors of RoPE's frequencies if there are any."""
    family_module = family(architecture.model_type)
    config, divisors, metadata = family_module.config(spec), None, {}
    if architecture.rope:
        head_dim, context = config["head_dim"], config["max_position_embeddings"]
        config["rope_parameters"] = llama3_as_divisors(config["rope_parameters"], head_dim, context)
        divisors = config["rope_parameters"].get("short_factor")  # LongRoPE's field for divisors
        metadata = rope_metadata(config["rope_parameters"])
    keys = {**architecture.required, **architecture.optional}
    metadata |= {key: config[config_key] for key, config_key in keys.items() if config.get(config_key) is not None}
    metadata = {f"{name}.{key}": value for key, value in metadata.items()}
    header = expected_header(name, metadata, config)
    check_roundtrip(
        f"GGUF {name}",
        family_module.spec(config),
        metadata,
        lambda _: family_module.spec(family_config(header, divisors)),
    )
    return config, metadata, divisors


def expected_header(name: str, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Header:
    """The header that a reader of the file will find, with only the tensors that the config depends on."""
    flagged = [tensor for flag, tensor in ARCHITECTURES[name].flags.items() if config[flag]]
    tensors = ["token_embd.weight", *flagged, *(() if config["tie_word_embeddings"] else ("output.weight",))]
    info = TensorInfo((config["vocab_size"], 1), type=0, start=0)
    return Header(Path(), 0, {"general.architecture": name, **metadata}, dict.fromkeys(tensors, info))


def write_file(
    file: Path, name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], format: GGUFFormat
) -> None:
    """Write a temporary file, one tensor at a time, and rename it when it is complete."""
    gguf = gguf_library()
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, name)
    types = {key: gguf.GGMLQuantizationType[tensor_type(key, tensor, format)] for key, tensor in tensors.items()}
    try:
        for key, value in metadata.items():
            add_metadata(writer, key, value)
        for key, tensor in tensors.items():
            block_numel, block_bytes = gguf.GGML_QUANT_SIZES[types[key]]
            nbytes = tensor.numel() // block_numel * block_bytes
            if block_numel > 1:
                shape, dtype = gguf.quants.quant_shape_to_byte_shape(tensor.shape, types[key]), np.dtype(np.uint8)
            else:
                shape, dtype = tensor.shape, np.dtype(f"f{block_bytes}")
            writer.add_tensor_info(key, shape, dtype, nbytes, types[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in tensors.items():
            numbers = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            writer.write_tensor_data(gguf.quantize(numbers, types[key]))
        writer.close()
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.rename(file)
        sync_folder(file.parent)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def tensor_type(name: str, tensor: Tensor, format: GGUFFormat) -> str:
    """The type of a tensor in the file: vectors and position embeddings stay float32, as in llama.cpp."""
    if format == "f32" or tensor.dim() == 1 or name.startswith("position_embd"):
        return "F32"
    if format == "q8_0" and tensor.shape[-1] % 32 == 0:
        return "Q8_0"
    largest = tensor.detach().abs().max().item()
    if largest > MAX_FLOAT16:
        raise CheckpointError(
            f"{name} has a weight of {largest:.3g}, above the float16 maximum {MAX_FLOAT16:g}; use format f32"
        )
    return "F16"


def add_metadata(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
