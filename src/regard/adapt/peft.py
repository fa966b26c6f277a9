"""Adapters as files, in the layout of the PEFT library: `adapter_config.json` and `adapter_model.safetensors`.

Tensors are named `base_model.model.<path>.lora_A.weight`. The path is ours, unless `names` gives another model's path
for ours: an adapter trained here then loads there. Everything is checked before the model is touched, and what this
code would have to ignore (DoRA, rank patterns, saved biases …) is refused by name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from regard.adapt.lora import AdapterError, LoRA, adapters, add_lora, ends_in, targeted
from regard.spec import SpecError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20  # bytes; a real one has about a thousand
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules"}
HARMLESS = {  # may say anything: they do not change what the adapter computes
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}  # other ways to begin change base weights


def same(path: str) -> str:
    return path


def save_adapter(model: nn.Module, folder: Path | str, names: Callable[[str], str] = same) -> None:
    """Write the model's adapters; the model itself is not in the files."""
    found = adapters(model)
    if not found:
        raise AdapterError("this model has no LoRA adapters to save; add some first")
    lora = next(iter(found.values())).lora
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets) if names is same else [names(path) for path in found],
        "bias": "none",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
    }
    tensors = {
        key(names(path), side): getattr(module, side).weight.detach().contiguous()
        for path, module in found.items()
        for side in ("lora_A", "lora_B")
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(model: nn.Module, folder: Path | str, names: Callable[[str], str] = same) -> list[str]:
    """Add the folder's adapters to a plain model, all else frozen; -> the names of the adapted layers."""
    folder = Path(folder)
    lora = read_config(folder / CONFIG)
    if names is not same:
        lora = replace(lora, targets=translate(model, lora.targets, names))
    linears = targeted(model, lora.targets)
    shapes = {}
    for path, linear in linears.items():
        shapes[key(names(path), "lora_A")] = [lora.rank, linear.in_features]
        shapes[key(names(path), "lora_B")] = [linear.out_features, lora.rank]
    tensors = read_tensors(folder / TENSORS, shapes)
    added = add_lora(model, lora)
    for path, module in adapters(model).items():
        for side in ("lora_A", "lora_B"):
            with torch.no_grad():
                getattr(module, side).weight.copy_(tensors[key(names(path), side)])
    return added


def translate(model: nn.Module, targets: tuple[str, ...], names: Callable[[str], str]) -> tuple[str, ...]:
    """Our paths of the layers that the targets mean among the other model's paths."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = tuple(path for path in linears if any(ends_in(names(path), target) for target in targets))
    if not chosen:
        raise AdapterError(f"none of the adapter's targets {', '.join(targets)} is a layer of this model")
    return chosen


def key(path: str, side: str) -> str:
    return f"base_model.model.{path}.{side}.weight"


def read_config(path: Path) -> LoRA:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG + 1)
        config = json.loads(text) if len(text) <= MAX_CONFIG else None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{path} is not the config of a LoRA adapter: expected an object with peft_type 'LORA'")
    for name, value in config.items():
        if not supported(name, value):
            raise AdapterError(f"{path}: {name}={value!r:.80} is not supported; only plain LoRA is")
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    try:
        return LoRA(rank, alpha, targets, config.get("lora_dropout", 0.0))
    except SpecError as error:
        raise AdapterError(f"{path}: {error}") from error


def supported(name: str, value: Any) -> bool:
    return value in PLAIN[name] if name in PLAIN else name in READ | HARMLESS or not value


def read_tensors(path: Path, shapes: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
    """Exactly the tensors expected, in exactly these shapes; sizes are compared before anything is read."""
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
            if found != set(shapes):
                missing, extra = sorted(set(shapes) - found), sorted(found - set(shapes))
                raise AdapterError(f"{path} does not fit: missing {missing[:3]}, not expected {extra[:3]}")
            for name, shape in shapes.items():
                if (has := file.get_slice(name).get_shape()) != shape:
                    raise AdapterError(f"{path}: {name} is {has}, this model and config need {shape}")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise AdapterError(f"{path}: {name} holds {tensor.dtype}; an adapter holds floating-point numbers")
    return tensors
