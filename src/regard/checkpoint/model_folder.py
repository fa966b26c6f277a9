"""A model as a folder: `config.json`, `model.safetensors` and the files of the tokenizer.

    save(model, folder)              our own format: the config holds the spec
    load(folder)                     our own format, a Hugging Face folder of a supported family, or a GGUF file
    export(model, folder, "llama")   a Hugging Face folder that `transformers` loads

Before any weights are read, the sizes in the config are checked against the sizes of the files, and every name and
shape against the headers. Tensors are then read one by one into the memory that they keep: the peak is one copy of the
model plus, if tensors are cast or converted, one tensor.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import MANIFEST, CheckpointError, check_folder, write_folder
from regard.checkpoint.foreign_quantized.keep_codes import find_kept, layer_types_of, read_kept, without_kept
from regard.checkpoint.foreign_quantized.opening import KEY, find_method, open_quantized
from regard.checkpoint.foreign_quantized.writing import plain_weights, quantized_files
from regard.checkpoint.gguf import open_gguf
from regard.checkpoint.gguf.packed import read_as_blocks, refuse_packed, use_blocks
from regard.checkpoint.quantized_layers import (
    layer_types,
    quantization_config,
    read_layer_types,
    read_stored,
    stored_tensors,
    use_dtype_of_parameters,
    use_layer_types,
    without_stored,
)
from regard.checkpoint.sentence_transformers import read_sentence_encoder, sentence_files, without_sentence_head
from regard.checkpoint.stored_parts import drop_missing_pooler, resolve_tying, tied_names
from regard.checkpoint.weight_files import open_tensors, read_json, write_tensors
from regard.families import family_config, family_spec, weight_table
from regard.find_model import locate
from regard.models.base import Model, build_on_meta, meta_device
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.heads import Pooler
from regard.models.stack import Repeat, Stack, stacks_of, without_repeats
from regard.models.value_head import without_value_weights
from regard.parts.input import Tokens
from regard.spec import SpecError, parse_spec
from regard.weights.table import IDENTITY, MISMATCH_REMEDY, Chain, StoredTensor, Table

MODEL_TYPE = "regard"
GENERATION_CONFIG = "generation_config.json"
EXTRA_FILES = (GENERATION_CONFIG, "preprocessor_config.json", "processor_config.json")
# Older folders have these keys in config.json, which our own format replaces.
GENERATION_KEYS = (
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "bad_words_ids",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
Progress = Callable[[int, int], object]  # (parameters loaded, all parameters)


class SavesFiles(Protocol):
    """A tokenizer; only its `save` is called."""

    def save(self, folder: Path) -> None: ...


@runtime_checkable
class ModelWithFiles(Protocol):
    """A model with the other files of its folder: a LanguageModel."""

    model: Any
    tokenizer: Any
    extra_files: Mapping[str, bytes]
    source_family: str | None


def save(
    model: nn.Module | ModelWithFiles,
    folder: str | Path,
    tokenizer: SavesFiles | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    source_family: str | None = None,
) -> None:
    """Save a model, or a LanguageModel with its tokenizer, in our own format.

    extra_files      contents by file name, written unchanged
    source_family    the family that the model was imported from; an export writes this family by default
    """
    if isinstance(model, ModelWithFiles):
        source_family = source_family or model.source_family
    model, tokenizer, extra_files = separate_files(model, tokenizer, extra_files)
    with write_folder(folder) as temporary:
        write_model(model, temporary, tokenizer, source_family)
        write_extra_files(temporary, extra_files)


def separate_files(
    model: nn.Module | ModelWithFiles, tokenizer: Any, extra_files: Mapping[str, bytes] | None
) -> tuple[nn.Module, Any, Mapping[str, bytes] | None]:
    """The module, tokenizer and extra files to write; those of a LanguageModel unless others are given."""
    if isinstance(model, nn.Module):
        return model, tokenizer, extra_files
    if not isinstance(model, ModelWithFiles):
        raise TypeError(
            f"model={model!r:.80} cannot be written; pass a model that was built or loaded, or a LanguageModel"
        )
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    return model.model, tokenizer, model.extra_files if extra_files is None else extra_files


def write_model(
    model: nn.Module, folder: Path, tokenizer: SavesFiles | None = None, source_family: str | None = None
) -> None:
    """Write the files of our own format into an existing folder."""
    tensors = unique_parameters(model) | stored_tensors(model)
    write_files(folder, own_config(model, source_family), tensors, tokenizer)


def own_config(model: nn.Module, source_family: str | None = None) -> dict[str, Any]:
    """The config of our own format."""
    spec = model.spec
    assert isinstance(spec, Model), f"model.spec must be the spec of a model; found {spec!r:.80}"
    refuse_packed(model)
    check_matches_spec(model, spec)
    source = {} if source_family is None else {"source_family": source_family}
    return {"model_type": MODEL_TYPE, **source, "spec": spec.to_dict(), **quantization_config(model)}


def check_matches_spec(model: nn.Module, spec: Model) -> None:
    """Raise CheckpointError if loading the spec would not create the parameters of the model."""
    built = build_on_meta(spec)
    use_layer_types(built, layer_types(model))
    found, expected = unique_parameters(model).keys(), unique_parameters(built).keys()
    if found == expected:
        return
    tied = dict(tied_names(model))
    if untied_by_spec := [name for name in expected if name in tied]:
        name = untied_by_spec[0]
        raise CheckpointError(
            f"{name} is tied to {tied[name]}, but in the spec it has its own weights; tie layers in the "
            "spec with Repeat(blocks, times, tied=True), or copy the tied module before saving"
        )
    check_no_adapters(found)
    name = min(found ^ expected)
    owner = "model" if name in found else "spec"
    raise CheckpointError(f"{name} is in the {owner} only; build the model from its spec and copy the weights")


def check_no_adapters(names: Iterable[str]) -> None:
    if adapters := [name for name in names if "lora_" in name]:
        raise CheckpointError(
            f"{min(adapters)} is part of an adapter; save it with save_adapter, or use merge_lora before saving"
        )


def export(
    model: nn.Module | ModelWithFiles,
    folder: str | Path,
    model_type: str,
    tokenizer: Any | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model, or a LanguageModel with its tokenizer, as a Hugging Face folder of a family.

    A sentence encoder is written in the format of sentence-transformers, and quantized layers in the layouts of
    compressed-tensors or bitsandbytes.
    """
    model, tokenizer, extra_files = separate_files(model, tokenizer, extra_files)
    spec = model.spec
    assert isinstance(spec, Model), f"model.spec must be the spec of a model; found {spec!r:.80}"
    check_no_adapters(unique_parameters(model))
    refuse_packed(model)
    extra_files = {**(extra_files or {}), **sentence_files(spec)}
    if isinstance(spec, Encoder) and not isinstance(spec.input, Tokens):  # images or signals: there is no text
        tokenizer = None
        extra_files.pop(GENERATION_CONFIG, None)
    spec = without_sentence_head(spec)
    config = {f"{name}_token_id": getattr(tokenizer, name, None) for name in ("bos", "eos", "pad")}
    config |= family_config(model_type, spec)
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    table, parameters = weight_table(spec, model_type), unique_parameters(model) | plain_weights(model)
    tensors, quantization = quantized_files(model, spec, table)
    tensors |= dict(table.write(without_value_weights(parameters)))
    config |= {KEY: quantization} if quantization else {}
    with write_folder(folder) as temporary:
        write_files(temporary, config, tensors, tokenizer)
        write_extra_files(temporary, extra_files)


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    checked: bool = False,
    progress: Progress | None = None,
    mmap: bool = False,
    packed: bool = False,
) -> nn.Module:
    """Load the model of a folder or GGUF file, in eval mode.

    device, dtype    the default dtype is the stored one, on a CPU at least float32
    checked          do not compare our own format with its manifest, because the caller has done so
    progress         called after every tensor
    mmap             memory-map tensors that need no cast, of a GGUF file only packed ones; the file must not change
                     while the model is used. Without `mmap` the model owns its memory.
    packed           keep the blocks of a GGUF file in linear layers and embeddings, instead of unpacking them
    """
    folder, device = locate(folder), torch.device(device)
    if packed and folder.suffix != ".gguf":
        raise CheckpointError(
            f"{folder} is no GGUF file, so it has no blocks to keep; leave out packed=True (--quantize stored)"
        )
    if folder.suffix == ".gguf":
        (spec, table, stored), types = open_gguf(folder), {}
        check_size(folder, spec, stored)
    else:
        (spec, table), config = read_spec_and_table(folder), read_json(folder / "config.json")
        types = read_layer_types(folder, config) if table is IDENTITY else {}
        if table is IDENTITY and (folder / MANIFEST).is_file() and not checked:
            check_folder(folder)
        cast = partial(loaded_dtype, device, dtype)
        stored = open_quantized(folder, config, open_tensors(folder, cast, mmap), cast, mmap)
        check_size(folder, spec, stored)
        if table is not IDENTITY:
            make_table = partial(weight_table, model_type=read_source_family(folder))
            spec = drop_missing_pooler(spec, make_table, stored)
            spec, stored = resolve_tying(folder, spec, make_table, stored)
            table = make_table(spec)
    model = build_on_meta(spec)
    kept = find_kept(model, table, stored)
    use_layer_types(model, types | layer_types_of(kept))
    like, quantized = unique_parameters(model), stored_tensors(model)
    stored = without_stored(stored, quantized) if types else without_kept(folder, stored, kept)
    block_formats: dict[str, Any] = {}
    if packed:
        assert isinstance(table, Chain)
        stored, block_formats = read_as_blocks(model, folder, table, stored, mmap)
    loaded, tensors, total = 0, {}, sum(tensor.numel() for tensor in (like | quantized).values())

    def count(tensor: Tensor) -> Tensor:
        nonlocal loaded
        loaded += tensor.numel()
        if progress is not None:
            progress(loaded, total)
        return tensor

    blocks = {}
    for name, tensor in table.read(stored, like):
        count(like[name])
        if name in block_formats:
            blocks[name] = tensor.contiguous().to(device)
        else:
            tensors[name] = nn.Parameter(with_own_storage(tensor, device, dtype), like[name].requires_grad)
    use_blocks(model, blocks, block_formats, loaded_dtype(device, dtype, torch.float32))
    tensors |= {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}  # the blocks
    for name, tensor in read_stored(folder, quantized, mmap) if types else read_kept(kept):
        tensors[name] = count(tensor)
    for name, first_name in tied_names(model):
        tensors[name] = tensors[first_name]
    model.load_state_dict(tensors, assign=True)
    use_dtype_of_parameters(model)
    return model.to(device).eval()


def read_spec_and_table(folder: Path) -> tuple[Model, Table | Chain]:
    """The spec of a folder or GGUF file, and the table of its tensors; no weights are read."""
    if folder.suffix == ".gguf":
        return open_gguf(folder)[:2]
    config = read_json(folder / "config.json")
    if config.get("model_type") == MODEL_TYPE:
        try:
            spec = parse_spec(config.get("spec", {}), "spec", Decoder)
        except RecursionError as error:
            raise CheckpointError(
                f"{folder}: the spec in config.json is nested too deeply; save the model again"
            ) from error
        if not isinstance(spec, Model):
            raise SpecError(
                f"{folder}: the spec in config.json is of kind {spec.kind}, which is not a model; save the model again"
            )
        return spec, IDENTITY
    find_method(folder, config)
    spec = family_spec(config)
    if config.get("auto_map") is not None:
        warnings.warn(
            f"{folder}: the code that auto_map in config.json names is never run; the model is read as a standard "
            f"{config['model_type']} model",
            stacklevel=3,
        )
    if isinstance(spec, Encoder) and (spec.head is None or isinstance(spec.head, Pooler)):
        spec = read_sentence_encoder(folder, spec)
    return spec, weight_table(spec, config["model_type"])


def read_source_family(folder: Path) -> str | None:
    """The family of a Hugging Face folder, or the one that a model in our own format was imported from, if known."""
    config = {} if folder.suffix == ".gguf" else read_json(folder / "config.json")
    return config.get("source_family" if config.get("model_type") == MODEL_TYPE else "model_type")


def check_size(folder: Path, spec: Model, found: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError if the config describes a much larger model than the files hold, before it is built."""
    tensors, stored = len(found), sum(math.prod(tensor.shape) for tensor in found.values())
    distinct_blocks = sum(len(run.blocks) for runs, _ in stacks_of(spec) for run in runs)
    if distinct_blocks > 1000 + 4 * tensors:  # too many even to count their parameters
        raise CheckpointError(
            f"{folder}: the config has {distinct_blocks} distinct layers, but the files have only {tensors} tensors; "
            f"{MISMATCH_REMEDY}"
        )
    needed = count_parameters(spec)
    if needed > 4 * stored:  # some tensors are read more than once
        raise CheckpointError(
            f"{folder}: the config has {needed} parameters, but the files have only {stored}; {MISMATCH_REMEDY}"
        )


def unique_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name; tied ones once, under their first name."""
    return dict(model.named_parameters())


def count_parameters(spec: Model) -> int:
    """The number of parameters. Repeated layers are built only once or twice, because a config may claim any depth."""
    repeated = [(run, width) for runs, width in stacks_of(spec) for run in runs if run.times > 1]
    try:
        with meta_device():
            per_repeat = {(run, width): parameters_per_repeat(run, width) for run, width in repeated}
        built = numel(build_on_meta(without_repeats(spec)))
    except (RuntimeError, TypeError) as error:  # torch raises these for sizes that exceed 64 bits
        raise CheckpointError(f"the config describes tensors that are too large ({error}); reduce its sizes") from error
    return built + sum((run.times - 1) * per_repeat[run, width] for run, width in repeated)


def parameters_per_repeat(run: Repeat, width: int) -> int:
    """The parameters that one more repetition adds; parameters that layers share are not counted again."""
    once, twice = (numel(Stack((replace(run, times=times),), width)) for times in (1, 2))
    return twice - once


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def loaded_dtype(device: torch.device, dtype: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    """The dtype in memory of a tensor with the stored dtype."""
    return dtype or (torch.promote_types(stored, torch.float32) if device.type == "cpu" else stored)


def with_own_storage(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """The tensor on its device and in its dtype, copied unless its storage holds this tensor and nothing else."""
    dtype = loaded_dtype(device, dtype, tensor.dtype)
    exclusive = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if exclusive and (tensor.dtype, tensor.device) == (dtype, device):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def write_files(
    folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], tokenizer: SavesFiles | None
) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    write_tensors(tensors, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def read_extra_files(folder: Path) -> dict[str, bytes]:
    """The contents of the configuration files that imports and exports copy, by name; each must be a JSON object.

    Old folders have the settings of generation in `config.json`. If these include more than the bos, eos and pad ids,
    they are returned as a `generation_config.json`.
    """
    files = [folder / name for name in EXTRA_FILES if (folder / name).is_file()]
    for file in files:
        read_json(file)
    contents = {file.name: file.read_bytes() for file in files}
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    settings = {key: config[key] for key in GENERATION_KEYS if config.get(key) is not None}
    if GENERATION_CONFIG not in contents and not settings.keys() <= {"bos_token_id", "eos_token_id", "pad_token_id"}:
        contents[GENERATION_CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    return contents


def write_extra_files(folder: Path, extra_files: Mapping[str, bytes] | None) -> None:
    for name, content in (extra_files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
