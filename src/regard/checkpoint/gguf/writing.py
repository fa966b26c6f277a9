"""Writing a GGUF file that llama.cpp runs: matrices as float32, float16 or Q8_0, all else as float32.

Q8_0 keeps 32 numbers as 8-bit integers and one float16 scale, 8.5 bits a number. The metadata is read back before a
byte is written and must give the same spec, so what the format cannot say is refused by name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from regard.checkpoint.folder import CheckpointError, sync
from regard.checkpoint.gguf.architectures import ARCHITECTURES, Architecture, architecture
from regard.checkpoint.gguf.reading import configure, library, understand
from regard.checkpoint.gguf.rope_metadata import DIVISORS, divided, metadata
from regard.families import FamilyError, family
from regard.families.common.roundtrip import check_roundtrip
from regard.gguf_header import Header, TensorInfo
from regard.models.base import Model

GGUFFormat = Literal["f32", "f16", "q8_0"]
FORMS = get_args(GGUFFormat)
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
LARGEST_HALF = 65504.0


def export_gguf(
    model: nn.Module,
    file: str | Path,
    model_type: str,
    form: GGUFFormat = "f16",
    words: Mapping[str, Any] | None = None,
) -> None:
    """`words` is the metadata of the vocabulary, from `regard.text.gguf.metadata`."""
    if form not in FORMS:
        raise CheckpointError(f"GGUF is written as {', '.join(FORMS)}, not as {form!r}")
    name = next((name for name, kind in ARCHITECTURES.items() if kind.model_type == model_type), model_type)
    spec = model.spec
    assert isinstance(spec, Model), f"a model keeps its spec; found {spec!r:.80}"
    config, pairs, divisors = describe(spec, name, architecture(name))
    chain = understand(header(name, pairs, config), divisors)[1]
    tensors = dict(chain.write(dict(model.named_parameters())))
    if divisors is not None:
        if DIVISORS not in chain.outer.ignored:
            raise FamilyError(f"a GGUF {name} model cannot express a divisor for every pair of its rope")
        tensors[DIVISORS] = torch.tensor(divisors)
    pairs |= {"general.file_type": FILE_TYPES[form], "general.quantization_version": 2}
    write(Path(file), name, pairs | dict(words or {}), tensors, form)


def describe(spec: Model, name: str, kind: Architecture) -> tuple[dict[str, Any], dict[str, Any], list[float] | None]:
    """The config, the pairs that say it, and the divisors of its rope."""
    foreign = family(kind.model_type)
    config, divisors, pairs = foreign.config(spec), None, {}
    if kind.rope:
        config["rope_parameters"] = divided(
            config["rope_parameters"], config["head_dim"], config["max_position_embeddings"]
        )
        divisors = config["rope_parameters"].get("short_factor")
        pairs = metadata(config["rope_parameters"])
    pairs |= {key: config[ours] for key, ours in {**kind.sizes, **kind.more}.items() if config.get(ours) is not None}
    pairs = {f"{name}.{key}": value for key, value in pairs.items()}
    found = header(name, pairs, config)
    check_roundtrip(f"GGUF {name}", foreign.spec(config), pairs, lambda _: foreign.spec(configure(found, divisors)))
    return config, pairs, divisors


def header(name: str, pairs: Mapping[str, Any], config: Mapping[str, Any]) -> Header:
    """What a reader would find in the file, as far as the config tells it."""
    flags = [tensor for flag, tensor in ARCHITECTURES[name].flags.items() if config[flag]]
    there = ["token_embd.weight", *flags, *(() if config["tie_word_embeddings"] else ("output.weight",))]
    shape = (config["vocab_size"], 1)
    return Header(Path(), 0, {"general.architecture": name, **pairs}, dict.fromkeys(there, TensorInfo(shape, 0, 0)))


def write(file: Path, name: str, pairs: Mapping[str, Any], tensors: Mapping[str, Tensor], form: GGUFFormat) -> None:
    """All or nothing, and one tensor at a time."""
    gguf = library()
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, name)
    types = {key: gguf.GGMLQuantizationType[stored(key, tensor, form)] for key, tensor in tensors.items()}
    try:
        for key, value in pairs.items():
            add(writer, key, value)
        for key, tensor in tensors.items():
            block, size = gguf.GGML_QUANT_SIZES[types[key]]
            shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, types[key]) if block > 1 else tensor.shape
            held = np.dtype(np.uint8) if block > 1 else np.dtype(f"f{size}")
            writer.add_tensor_info(key, shape, held, tensor.numel() // block * size, types[key])
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
        sync(file.parent)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def stored(name: str, tensor: Tensor, form: GGUFFormat) -> str:
    """The type of a tensor in the file: vectors and what llama.cpp adds to a sum stay exact."""
    if form == "f32" or tensor.dim() == 1 or name.startswith("position_embd"):
        return "F32"
    if form == "q8_0" and tensor.shape[-1] % 32 == 0:
        return "Q8_0"
    largest = tensor.detach().abs().max().item()
    if largest > LARGEST_HALF:
        raise CheckpointError(
            f"{name} has a weight of {largest:.3g}, past float16's {LARGEST_HALF:g}; write f32 instead"
        )
    return "F16"


def add(writer: Any, key: str, value: Any) -> None:
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
