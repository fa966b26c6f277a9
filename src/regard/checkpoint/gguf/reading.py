"""Reading a GGUF file: its metadata as a family's config, its tensors dequantized when they are asked for.

Every size is held against the file before a byte of weights is read: types that are known, whole blocks, places inside
the file that do not overlap. A tensor is dequantized some rows at a time, so the peak is one copy of the model and one
tensor, and a little.
"""

import math
import mmap
from array import array
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.checkpoint.folder import CheckpointError
from regard.checkpoint.gguf.architectures import architecture
from regard.checkpoint.gguf.rope_metadata import DIVISORS, KEYS, settings
from regard.families import FamilyError, family
from regard.gguf_header import GGUFError, Header, TensorInfo, read_header
from regard.models.base import Model
from regard.weights.table import Chain, StoredTensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
AT_ONCE = 1 << 20  # numbers that are dequantized together


def library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise CheckpointError("GGUF files need one more package: pip install 'regard[gguf]'") from None
    return gguf


def open_gguf(file: str | Path) -> tuple[Model, Chain, dict[str, StoredTensor]]:
    """The spec, how its tensors are named, and the tensors themselves, unread."""
    try:
        header = read_header(file)
    except GGUFError as error:
        raise CheckpointError(str(error)) from error
    found = find(header)
    try:
        spec, table = understand(header, divisors(found))
    except FamilyError as error:
        raise FamilyError(f"{file}: {error}") from error
    return spec, table, found


def understand(header: Header, divisors: list[float] | None) -> tuple[Model, Chain]:
    config = configure(header, divisors)
    foreign = family(config["model_type"])
    spec = foreign.spec(config)
    return spec, Chain(architecture(header.metadata["general.architecture"]).names(config), foreign.table(spec))


def configure(header: Header, divisors: list[float] | None) -> dict[str, Any]:
    """The metadata as the family's own config.json would say it."""
    name = header.metadata.get("general.architecture")
    kind = architecture(name)
    said = {key.removeprefix(f"{name}."): v for key, v in header.metadata.items() if key.startswith(f"{name}.")}
    missing = [key for key in kind.sizes if key not in said]
    strange = [key for key in said if key not in {*kind.sizes, *kind.more, *(KEYS if kind.rope else ())}]
    if missing or strange:
        fault = "is missing" if missing else "has no part here"
        raise FamilyError(f"{name}.{(missing or strange)[0]} {fault}")
    if "token_embd.weight" not in header.tensors:
        raise FamilyError("token_embd.weight is missing")
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        **kind.fixed,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    config |= {flag: tensor in header.tensors for flag, tensor in kind.flags.items()}
    words = {**kind.sizes, **kind.more}
    for key, value in ((key, said[key]) for key in words if key in said):
        if isinstance(value, array):
            raise FamilyError(f"{name}.{key} differs from layer to layer, which has no part here")
        if config.setdefault(words[key], value) != value:
            raise FamilyError(f"{name}.{key}={value!r:.80} should be {config[words[key]]!r:.80} like its neighbours")
    config.setdefault("vocab_size", header.tensors["token_embd.weight"].shape[0])
    if kind.rope:
        heads, width = (config[key] for key in ("num_attention_heads", "hidden_size"))
        if not all(type(size) is int and size > 0 for size in (heads, width)):
            raise FamilyError(f"{name} has {heads!r:.80} heads and a width of {width!r:.80}; both must be positive")
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", width // heads)
        config["rope_parameters"] = settings(said, divisors, config["max_position_embeddings"])
    return config


def divisors(found: dict[str, StoredTensor]) -> list[float] | None:
    """RoPE's, where the file has them: a tensor that is really a setting."""
    if DIVISORS not in found:
        return None
    if math.prod(found[DIVISORS].shape) > 1 << 16:
        raise CheckpointError(f"{found[DIVISORS].file}: {DIVISORS} {found[DIVISORS].shape} should be a number a pair")
    return found[DIVISORS].read().flatten().tolist()


def find(header: Header) -> dict[str, StoredTensor]:
    """Every tensor of the file, if all of them lie in it, apart from each other."""
    gguf = library()
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.name in (*PLAIN, *BLOCKS)}
    found, spans = {}, []
    for name, place in header.tensors.items():
        if place.type not in names:
            raise CheckpointError(f"{header.file}: {name} has type {place.type}; read are {', '.join(names.values())}")
        kind = names[place.type]
        block, size = gguf.GGML_QUANT_SIZES[place.type]
        if place.shape[-1] % block:
            raise CheckpointError(f"{header.file}: {name} {place.shape} has rows that are no whole blocks of {block}")
        end = place.start + math.prod(place.shape) // block * size
        if end > header.size:
            raise CheckpointError(
                f"{header.file}: {name} {place.shape} ends at byte {end}, the file at {header.size}; fetch it again"
            )
        spans.append((place.start, end, name))
        if kind in PLAIN:
            read = partial(plain, header.file, place, PLAIN[kind])
        else:
            dequantize = partial(gguf.dequantize, qtype=gguf.GGMLQuantizationType[kind])
            read = partial(dequantized, header.file, place, place.shape[-1] // block * size, dequantize)
        found[name] = StoredTensor(str(header.file), place.shape, kind if kind in PLAIN else "F32", read)
    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise CheckpointError(f"{header.file}: {name} and {other} overlap at byte {start}")
    return found


def plain(file: Path, place: TensorInfo, dtype: torch.dtype) -> Tensor:
    out = mapped(place.shape, dtype)
    with file.open("rb") as stream:
        stream.seek(place.start)
        if stream.readinto(out.flatten().view(torch.uint8).numpy()) < out.nbytes:
            raise CheckpointError(f"{file} was cut short while it was read; fetch it again")
    return out


def dequantized(file: Path, place: TensorInfo, row: int, dequantize: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """`row` is the length of a row in bytes."""
    out = mapped(place.shape, torch.float32)
    with file.open("rb") as stream, np.errstate(all="ignore"):  # a scale may be infinite; so is its weight then
        stream.seek(place.start)
        for some in out.view(-1, place.shape[-1]).split(max(AT_ONCE // place.shape[-1], 1)):
            raw = np.fromfile(stream, np.uint8, len(some) * row)
            if raw.size < len(some) * row:
                raise CheckpointError(f"{file} was cut short while it was read; fetch it again")
            some.copy_(torch.from_numpy(dequantize(raw.reshape(len(some), row))))
    return out


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system with the tensor: on the heap, copy after copy would leave holes."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
