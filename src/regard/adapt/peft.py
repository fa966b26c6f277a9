"""Adapters as files, in the format of the PEFT library: `adapter_config.json` and `adapter_model.safetensors`.

    linear layer (out, in)              <path>.lora_A.weight (r, in), <path>.lora_B.weight (out, r)
    stacked weight (n, out, in)         <path>.lora_A.weight (n·r, in), <path>.lora_B.weight (out, r·n)
    magnitudes of DoRA                  <path>.lora_magnitude_vector (out,)

All names start with `base_model.model.`. Stacked weights (experts, projections per head) are `target_parameters` in the
config. A weight that several layers share (Repeat.tied) is stored under the path of each of them, because PEFT adapts
them one by one; a file may also have it under the first path only. Paths are ours, unless `names` maps them to those of
another model, which can then load the adapter. Everything is checked before the model is changed, and options that are
not supported (rank patterns, saved biases …) raise an error that names them.

Files hold adapters of the original weights: those of PiSSA have twice the rank, as PEFT's with
`path_initial_model_for_weight_conversion`. PEFT's files without this conversion (`init_lora_weights="pissa"`) are
converted on reading, by the same decomposition of the weights.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from regard.adapt.adapters import DEFAULT, adapters, add_lora_to, check_new_adapter, resolve_adapter
from regard.adapt.lora import LoRA, Targets
from regard.adapt.pissa import INIT, PISSA, from_residual
from regard.adapt.targets import AdaptableWeight, AdapterError, adaptable_weights, ends_in, select_weights
from regard.compat import save_tensors
from regard.formats.base import NumberFormat
from regard.spec import SpecError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SPEC = "model_spec.json"  # of the model with its head, if the head was trained beside the adapter
BASE_FORMAT = "base_format.json"  # of the weights that the adapter was trained on, if they were quantized
MAX_CONFIG = 1 << 20  # bytes; an ordinary config has about a thousand
PREFIX = "base_model.model."  # of all names of tensors
MATRICES, MAGNITUDE = ("lora_A", "lora_B"), "lora_magnitude_vector"
USED_OPTIONS = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters"}
IGNORED_OPTIONS = {  # they do not change the adapter's output
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
SUPPORTED_VALUES = {  # other initializations change the weights of the model, and some at random
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", PISSA),
    "use_dora": (True, False, None),
    "use_rslora": (True, False, None),
}


def identity(path: str) -> str:
    return path


def save_adapter(
    model: nn.Module,
    folder: Path | str,
    names: Callable[[str], str] = identity,
    name: str | None = None,
    base: str | None = None,
) -> None:
    """Write one adapter, by default the active one; the model itself is not in the files.

    base: the path or name of the model, from which `regard.load(folder)` loads it.
    """
    name = resolve_adapter(model, name, "save")
    config, tensors = adapter_config(model, name, names, base), adapter_tensors(model, name, names)
    write_adapter(Path(folder), config, tensors, spec_of(model, name).base)


def write_adapter(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], base: NumberFormat | None
) -> None:
    """base: the number format of the weights that the adapter was trained on; None: they were not quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    if base is not None:
        (folder / BASE_FORMAT).write_text(base.to_json() + "\n", encoding="utf-8")
    save_tensors(tensors, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def adapter_config(
    model: nn.Module, name: str, names: Callable[[str], str] = identity, base: str | None = None
) -> dict[str, Any]:
    """PEFT's config of an adapter."""
    weights = adapted_weights(model, name)
    lora = spec_of(model, name).of_original
    linears = [names(path) for weight in weights.values() if not weight.stacked for path in weight.names]
    stacked = [parameter_path(path, weight) for weight in weights.values() if weight.stacked for path in weight.names]
    if stacked and names is not identity:
        raise AdapterError(f"{stacked[0]} is a stacked weight, which has no path in another model; save without names")
    by_path = stacked or names is not identity or isinstance(lora.targets, str)
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(dict.fromkeys(linears)) if by_path else [*lora.targets],
        "target_parameters": stacked or None,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
    }


def spec_of(model: nn.Module, name: str) -> LoRA:
    return next(layer.loras[name] for layer in adapters(model).values() if name in layer.loras)


def load_adapter(
    model: nn.Module, folder: Path | str, names: Callable[[str], str] = identity, name: str = DEFAULT
) -> list[str]:
    """Add the folder's adapter to the model and make it active; returns the names of the adapted layers."""
    check_no_head(Path(folder))
    return add_stored_adapter(model, Path(folder), names, name)


def check_no_head(folder: Path) -> None:
    """Raise AdapterError if a head was trained beside the adapter in the folder: the adapter alone makes no sense."""
    if has_head(folder):
        raise AdapterError(
            f"the adapter in {folder} was trained together with a head, which is not added to a model that is loaded; "
            f"load all of it by the name of the folder, in Python regard.load({str(folder)!r})"
        )


def has_head(folder: Path) -> bool:
    """Whether a head was trained beside the adapter in the folder, by regard or by PEFT."""
    return (folder / SPEC).is_file() or bool(read_options(folder / CONFIG).get("modules_to_save"))


def add_stored_adapter(
    model: nn.Module, folder: Path, names: Callable[[str], str] = identity, name: str = DEFAULT
) -> list[str]:
    """`load_adapter` for a model that has the head which was trained beside the adapter, if there is one."""
    lora = replace(read_config(folder / CONFIG), base=read_base_format(folder))
    if names is not identity:
        lora = replace(lora, targets=translate(model, lora.targets, names))
    weights = select_weights(model, lora.targets)
    check_new_adapter(model, weights, lora, name)
    tensors = read_adapter(folder / TENSORS, weights, lora, names)
    if lora.init != INIT:
        add_initial(weights, lora, tensors, names)
        lora = lora.of_original
    added = add_lora_to(model, weights, lora, name=name)
    copy_tensors(model, name, tensors, names)
    return added


def read_base_format(folder: Path) -> NumberFormat | None:
    """The number format in which a model is stored for the adapter in a folder; None: it keeps its weights."""
    file = folder / BASE_FORMAT
    if not file.is_file():
        return None
    try:
        return NumberFormat.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error


def adapter_base(folder: Path) -> str | None:
    """The path or name of the model that the adapter in a folder belongs to; None if the folder has no adapter."""
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    base = read_options(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise AdapterError(
            f"{folder} holds an adapter, and its {CONFIG} does not name the model that it belongs to; load the model, "
            "then the adapter: regard.load_adapter(llm.model, folder)"
        )
    return base


def restore_adapter(model: nn.Module, folder: Path) -> None:
    """Copy the tensors of a folder into the model's active adapter, which must have the same layers and rank."""
    name = resolve_adapter(model, None, "restore")
    lora = spec_of(model, name).of_original
    tensors = read_adapter(folder / TENSORS, adapted_weights(model, name), lora, identity)
    copy_tensors(model, name, tensors, identity)


def adapted_weights(model: nn.Module, name: str) -> dict[str, AdaptableWeight]:
    """The weights that have this adapter."""
    layers = adapters(model)
    weights = adaptable_weights(model)
    return {path: weights[path] for path, layer in layers.items() if name in layer.loras}


def adapter_tensors(model: nn.Module, name: str, names: Callable[[str], str] = identity) -> dict[str, torch.Tensor]:
    """The matrices of an adapter in PEFT's names and shapes."""
    paths = stored_paths(adapted_weights(model, name), names)
    tensors = {}
    for path, layer in adapters(model).items():
        if name in layer.loras:
            a, b = layer.matrices(name)
            if a.ndim == 3:
                a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # (n·r, in), (out, r·n)
            for stored in paths[path]:  # copies: safetensors refuses tensors that share memory
                tensors[tensor_name(stored, "lora_A")] = a.clone(memory_format=torch.contiguous_format)
                tensors[tensor_name(stored, "lora_B")] = b.clone(memory_format=torch.contiguous_format)
                if layer.loras[name].dora:
                    tensors[tensor_name(stored, MAGNITUDE)] = layer.magnitude(name).detach().clone()
    return tensors


@torch.no_grad()
def copy_tensors(model: nn.Module, name: str, tensors: Mapping[str, torch.Tensor], names: Callable[[str], str]) -> None:
    paths = stored_paths(adapted_weights(model, name), names)
    for path, layer in adapters(model).items():
        if name in layer.loras:
            a, b = (tensors[tensor_name(paths[path][0], side)] for side in MATRICES)
            if (matrix := layer.matrix("A", name)).ndim == 3:
                a, b = a.unflatten(0, (len(matrix), -1)), b.unflatten(1, (-1, len(matrix))).permute(2, 0, 1)
            layer.write_matrices(name, a, b)
            if layer.loras[name].dora:
                layer.magnitude(name).copy_(tensors[tensor_name(paths[path][0], MAGNITUDE)])


def add_initial(
    weights: Mapping[str, AdaptableWeight], lora: LoRA, tensors: dict[str, torch.Tensor], names: Callable[[str], str]
) -> None:
    """Convert the matrices of PiSSA, which belong to the residuals of the weights, to those of the weights."""
    if stacked := [path for path, weight in weights.items() if weight.stacked]:
        raise AdapterError(f"init_lora_weights={PISSA!r} is not supported for stacked weights ({stacked[0]})")
    for path, stored in stored_paths(weights, names).items():
        a, b = (tensor_name(stored[0], side) for side in MATRICES)
        tensors[a], tensors[b] = from_residual(tensors[a], tensors[b], weights[path].weight, lora.rank, lora.scale)


def stored_shapes(
    weights: Mapping[str, AdaptableWeight], lora: LoRA, names: Callable[[str], str]
) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors by their names in the file."""
    shapes = {}
    for path, stored_names in stored_paths(weights, names).items():
        *stack, outputs, inputs = weights[path].shape
        rows = lora.rank * (stack[0] if stack else 1)
        for stored in stored_names:
            shapes |= {tensor_name(stored, "lora_A"): [rows, inputs], tensor_name(stored, "lora_B"): [outputs, rows]}
            if lora.dora:
                shapes[tensor_name(stored, MAGNITUDE)] = [outputs]
    return shapes


def stored_paths(weights: Mapping[str, AdaptableWeight], names: Callable[[str], str]) -> dict[str, list[str]]:
    """The paths of each weight in the file, one per name of the weight.

    PEFT wraps the module of a targeted parameter, once per parameter, and the paths of everything inside it get one
    `base_layer` per wrapper. The last parameter of a module is in its outermost wrapper.
    """
    wrapped: dict[str, list[str]] = {}  # module: its targeted parameters
    for weight in weights.values():
        for path in weight.names if weight.parameter else ():
            wrapped.setdefault(path.rpartition(".")[0], []).append(weight.parameter)

    def stored_path(path: str, parameter: str) -> str:
        owner = path.rpartition(".")[0]
        if parameter:
            return owner + ".base_layer" * (len(wrapped[owner]) - 1 - wrapped[owner].index(parameter))
        inside = next((module for module in wrapped if path.startswith(f"{module}.")), None)
        wrappers = ".base_layer" * len(wrapped[inside]) if inside else ""
        return names(f"{inside}{wrappers}{path.removeprefix(inside)}" if inside else path)

    return {first: [stored_path(path, weight.parameter) for path in weight.names] for first, weight in weights.items()}


def parameter_path(path: str, weight: AdaptableWeight) -> str:
    """The path of a stacked weight as a parameter of the model."""
    return path if weight.parameter else f"{path}.weight"


def translate(model: nn.Module, targets: Targets, names: Callable[[str], str]) -> tuple[str, ...]:
    """Our paths of the layers whose paths in the other model end in a target."""
    linears = [path for weight in adaptable_weights(model).values() if not weight.stacked for path in weight.names]
    if isinstance(targets, str):
        raise AdapterError(f"target_modules={targets!r} cannot be mapped to another model's paths; list the modules")
    chosen = tuple(path for path in linears if any(ends_in(names(path), target) for target in targets))
    if not chosen:
        raise AdapterError(f"none of the adapter's targets {', '.join(targets)} is a linear layer of this model")
    return chosen


def tensor_name(path: str, side: str) -> str:
    return f"{PREFIX}{path}.{side}" + ("" if side == MAGNITUDE else ".weight")


def read_options(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG + 1)
        config = json.loads(text) if len(text) <= MAX_CONFIG else None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{path} is not the config of a LoRA adapter: expected an object with peft_type 'LORA'")
    return config


def read_config(path: Path, accepted: Collection[str] = (), targets: Any = None) -> LoRA:
    """accepted: options that the caller reads; targets: the layers, if they are not those of the config."""
    config: Any = read_options(path)
    for name, value in config.items():
        if name not in accepted and not is_supported(name, value):
            raise AdapterError(f"{path}: {name}={value!r:.80} is not supported; use a LoRA adapter without this option")
    if targets is None:
        targets = config.get("target_modules")
        if (parameters := config.get("target_parameters")) is not None:
            targets = join_targets(targets, parameters)
    try:
        return LoRA(
            config.get("r"),
            config.get("lora_alpha"),
            targets,
            config.get("lora_dropout", 0.0),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            init=PISSA if config.get("init_lora_weights") == PISSA else INIT,
        )
    except SpecError as error:
        raise AdapterError(f"{path}: {error}") from error


def join_targets(modules: Any, parameters: Any) -> Any:
    """Modules and parameters as one list, without the `.weight` of linear layers; LoRA checks the types."""
    if not isinstance(modules, list | None) or not isinstance(parameters, list):
        return modules if isinstance(parameters, list) else parameters
    return [*(modules or []), *(name.removesuffix(".weight") if isinstance(name, str) else name for name in parameters)]


def is_supported(name: str, value: Any) -> bool:
    if name in SUPPORTED_VALUES:
        return value in SUPPORTED_VALUES[name]
    return name in USED_OPTIONS | IGNORED_OPTIONS or not value


def read_adapter(
    path: Path, weights: Mapping[str, AdaptableWeight], lora: LoRA, names: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """The tensors of a file, which must be those of one adapter of these weights."""
    first_paths = [paths[0] for paths in stored_paths(weights, names).values()]
    sides = (*MATRICES, MAGNITUDE) if lora.dora else MATRICES
    required = {tensor_name(path, side) for path in first_paths for side in sides}
    tensors = read_tensors(path, stored_shapes(weights, lora, names), required)
    check_shared(path, weights, tensors, names)
    return tensors


def check_shared(
    path: Path,
    weights: Mapping[str, AdaptableWeight],
    tensors: Mapping[str, torch.Tensor],
    names: Callable[[str], str],
) -> None:
    """Raise AdapterError if layers that share one weight have different adapters in the file."""
    for first_path, *other_paths in stored_paths(weights, names).values():
        for side in (*MATRICES, MAGNITUDE):
            first = tensor_name(first_path, side)
            for name in (tensor_name(other, side) for other in other_paths):
                if name in tensors and not torch.equal(tensors[name], tensors[first]):
                    raise AdapterError(
                        f"{path}: {first} and {name} differ, but their layers share one weight in this model; load the "
                        "adapter into a model whose layers are not tied"
                    )


def read_tensors(path: Path, shapes: Mapping[str, list[int]], required: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of a file, which are compared with these shapes before reading; only the required ones must exist."""
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
            missing, extra = sorted(set(required) - found), sorted(found - set(shapes))
            if missing or extra:
                raise AdapterError(
                    f"{path} does not fit the model: missing {missing[:3]}, not expected {extra[:3]}; "
                    "load it into the model that it was trained for"
                )
            shapes = {name: shape for name, shape in shapes.items() if name in found}
            for name, shape in shapes.items():
                if (stored := file.get_slice(name).get_shape()) != shape:
                    raise AdapterError(f"{path}: {name} has shape {stored}, this model and config need {shape}")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise AdapterError(f"{path}: {name} holds {tensor.dtype}; an adapter holds floating-point numbers")
    return tensors
