"""Write a GGUF file for llama.cpp, with its matrices in one of llama.cpp's formats and all other tensors as float32.

Before the file is written, its metadata is read back and must result in the same spec; a spec that the format cannot
express is refused.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.gguf.architectures import ARCHITECTURES, Architecture, find_architecture
from regard.checkpoint.gguf.file_writer import TensorToWrite, write_file
from regard.checkpoint.gguf.mixtures import FILE_TYPES, FORMATS, GGUFFormat, TensorType, tensor_type
from regard.checkpoint.gguf.reading import FLOAT_TYPES, family_config, read_spec_and_table
from regard.checkpoint.gguf.rope_metadata import DIVISORS, llama3_as_divisors, rope_metadata
from regard.checkpoint.quantized_layers import refuse_quantized_layers
from regard.families import FamilyError, family, model_class
from regard.families.common.roundtrip import check_roundtrip
from regard.formats.gguf_blocks import GGUFBlocks
from regard.gguf_header import Header, TensorInfo
from regard.models.base import Model
from regard.models.value_head import without_value_head, without_value_weights
from regard.spec import SpecError

FLOAT_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FLOAT_IDS = {dtype: id for id, dtype in FLOAT_TYPES.items()}
MAX_FLOAT16 = 65504.0


def export_gguf(
    model: nn.Module,
    file: str | Path,
    model_type: str,
    format: GGUFFormat = "f16",
    tokenizer_metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a model as a file of the family `model_type`; for `tokenizer_metadata`, see `regard.text.gguf`.

    progress: called with the parameters written and all parameters, after every tensor.
    """
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
    layers, heads = config.get("num_hidden_layers", config.get("n_layer")), config.get("num_attention_heads", 1)
    groups = heads // config.get("num_key_value_heads", heads)
    types = {
        key: tensor_type(key, tensor, format, layers, groups, tied="output.weight" not in tensors)
        for key, tensor in tensors.items()
    }
    check_range(tensors, types)
    general = {"architecture": name, "file_type": FILE_TYPES[format], "quantization_version": 2}
    metadata = {f"general.{key}": value for key, value in general.items()} | metadata | dict(tokenizer_metadata or {})
    report = count_numbers(progress, sum(tensor.numel() for tensor in tensors.values()))
    write_file(
        Path(file), metadata, {key: to_write(key, tensor, types[key], report) for key, tensor in tensors.items()}
    )


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


def check_range(tensors: Mapping[str, Tensor], types: Mapping[str, TensorType]) -> None:
    for name, tensor in tensors.items():
        largest = tensor.detach().abs().max().item() if types[name] == "f16" else 0
        if largest > MAX_FLOAT16:
            raise CheckpointError(
                f"{name} has a weight of {largest:.3g}, above the float16 maximum {MAX_FLOAT16:g}; use format f32"
            )


def to_write(name: str, tensor: Tensor, type: TensorType, report: Callable[[Tensor], None]) -> TensorToWrite:
    shape = tuple(tensor.shape)
    if type == "f32" or type == "f16" or type == "bf16":
        dtype = FLOAT_DTYPES[type]
        return TensorToWrite(
            shape, FLOAT_IDS[dtype], tensor.numel() * dtype.itemsize, partial(make_floats, tensor, dtype, report)
        )
    format = GGUFBlocks(type)
    return TensorToWrite(
        shape, format.layout.id, format.bytes(shape), partial(make_blocks, name, tensor, format, report)
    )


def make_floats(tensor: Tensor, dtype: torch.dtype, report: Callable[[Tensor], None]) -> Tensor:
    report(tensor)
    return tensor.detach().to("cpu", dtype).contiguous().flatten().view(torch.uint8)


def make_blocks(name: str, tensor: Tensor, format: GGUFBlocks, report: Callable[[Tensor], None]) -> Tensor:
    try:
        blocks = format.quantize(tensor.detach().float())["blocks"].cpu()
    except SpecError as error:
        raise CheckpointError(f"{name}: {error}") from error
    report(tensor)
    return blocks


def count_numbers(progress: Callable[[int, int], object] | None, total: int) -> Callable[[Tensor], None]:
    done = 0

    def report(tensor: Tensor) -> None:
        nonlocal done
        done += tensor.numel()
        if progress is not None:
            progress(done, total)

    return report
