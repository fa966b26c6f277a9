"""The model that an adapter was trained on, and loading both.

The folder of an adapter names its model (`base_model_name_or_path`), which may be the folder of another adapter. A
checkpoint also has a fingerprint of the model's weights, so that the adapter is not used with others. A run that starts
from a model has the fingerprint in its identity.
"""

import warnings
from pathlib import Path

import torch
from torch import nn

from regard.adapt.adapters import adapters, merge_lora
from regard.adapt.foreign_adapters import stored_labels
from regard.adapt.lora_weights import add_lora_of_folder
from regard.adapt.peft import CONFIG, SPEC, TENSORS, adapter_base, has_head, read_options
from regard.checkpoint import model_folder
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import find_files, fingerprint, read_json
from regard.families import weight_table
from regard.find_model import locate
from regard.models.base import Model, build_on_meta
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import has_tokenizer
from regard.training.new_head import head_parameters, replace_head, with_new_head
from regard.training.parallel.sharded_files import ShardedFiles
from regard.training.run import Run, newest_checkpoint, read_training
from regard.training.run_identity import RUN

TRAINED = "trained"  # the stem of the files with the parameters that are trained beside an adapter (resume_state.py)


def load_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    checked: bool = False,
    progress: model_folder.Progress | None = None,
) -> nn.Module:
    """The model of a folder or GGUF file (checkpoint/model_folder.py); of an adapter, its model with the adapter."""
    base = base_of(folder)
    if base is None:
        return model_folder.load(folder, dtype=dtype, checked=checked, progress=progress)
    model = load_model(base, dtype, progress=progress)
    return add_adapter(model, folder, base)


def add_adapter(model: nn.Module, folder: Path, base: Path) -> nn.Module:
    """Add the adapter of a folder. Its layers have our names, or those of the model's family in `transformers`.

    An adapter that the model has already is merged: the new one was trained on both. If a new head was trained beside
    the adapter, the model that is returned has this head and shares all other weights with the given one.

    base: the folder of the model
    """
    if adapters(model):
        merge_lora(model)
    assert isinstance(model.spec, Model), f"a model has a spec; found {model.spec!r:.80}"
    spec = adapted_spec(folder, model.spec, base)
    if (folder / SPEC).is_file():
        check_head(folder, spec)
    if spec != model.spec:
        model = replace_head(model, spec)
    add_lora_of_folder(model, folder, lambda: weight_table(spec, model_folder.read_source_family(root_of(base))))
    if (folder / SPEC).is_file():
        load_head(model, folder)
    return model


@torch.no_grad()
def load_head(model: nn.Module, folder: Path) -> None:
    """Copy the weights of the head that was trained beside the adapter in a folder."""
    files = ShardedFiles(folder, TRAINED, missing_ok=True)
    for name, parameter in head_parameters(model).items():
        parameter.copy_(files.read(name))


def check_head(folder: Path, spec: Model) -> None:
    """Raise CheckpointError if the folder does not have the weights of this head, before it is built."""
    shapes = ShardedFiles(folder, TRAINED, missing_ok=True).shapes
    for name, parameter in head_parameters(build_on_meta(spec)).items():
        if shapes.get(name) != parameter.shape:
            raise CheckpointError(
                f"{folder}: by {SPEC}, {name} has the shape {[*parameter.shape]}, but the files have "
                f"{[*shapes[name]] if name in shapes else 'no such tensor'}; use another checkpoint"
            )


def adapted_spec(folder: Path, spec: Model, base: Path) -> Model:
    """The spec of a model, of the folder `base`, with the head that was trained beside the adapter in another folder.

    PEFT's file does not describe the head: with the weights of `score` it is that of a decoder for whole sequences.
    """
    if (folder / SPEC).is_file():
        return Encoder.from_dict(read_json(folder / SPEC))
    labels = stored_labels(folder) if has_head(folder) and isinstance(spec, Decoder) else None
    if labels is None:
        return spec
    return Encoder.from_dict(with_new_head(spec, {"kind": "classification", "labels": labels}, pad_of(root_of(base))))


def pad_of(folder: Path) -> int | None:
    """The tokenizer's id of padding."""
    return Tokenizer.load(folder).pad if has_tokenizer(folder) else None


def read_spec(folder: Path) -> Model:
    """The spec of the model of a folder or GGUF file; of an adapter, that of its model with the head of the adapter."""
    base = base_of(folder)
    if base is None:
        return model_folder.read_spec_and_table(folder)[0]
    return adapted_spec(folder, read_spec(base), base)


def base_of(folder: Path) -> Path | None:
    """The model of the adapter in a folder; None if the folder has no adapter. Raises CheckpointError if its weights
    are not those that the adapter was trained on."""
    name = adapter_base(folder)
    if name is None:
        return None
    check_exists(locate(name), folder)
    base = newest_checkpoint(name)
    check_base(folder, base)
    return base


def root_of(folder: Path) -> Path:
    """The folder with the model itself and its tokenizer."""
    base = base_of(folder)
    return folder if base is None else root_of(base)


def check_base(adapter: Path, base: Path) -> None:
    if (adapter / "training.json").is_file():
        check_weights(base, read_training(adapter).get("run", {}).get("base"), adapter)


def warn_of_other_base(adapter: Path, base: Path) -> None:
    """Warn if PEFT's config names another model; it has no fingerprint, so equal weights may have other names."""
    if (adapter / "training.json").is_file():
        return
    name = read_options(adapter / CONFIG).get("base_model_name_or_path")
    if isinstance(name, str) and Path(name).name.lower() != base.name.lower():
        warnings.warn(
            f"the adapter in {adapter} names {name!r} as its model, and this one is {base.name!r}; if its weights are "
            "others, the adapter makes no sense with them",
            stacklevel=3,
        )


def fingerprint_model(folder: Path) -> str:
    """The fingerprint of the weights of a folder or GGUF file; of an adapter, its own and that of its model."""
    base = base_of(folder)
    if base is not None:
        head = sorted(folder.glob(f"{TRAINED}*.safetensors")) if (folder / SPEC).is_file() else []
        return f"{fingerprint([folder / TENSORS, *head])}+{fingerprint_model(base)}"
    return fingerprint([folder] if folder.suffix == ".gguf" else find_files(folder))


def check_weights(model: Path, expected: str | None, user: Path) -> None:
    """Raise CheckpointError if the weights of the model do not have this fingerprint; None: it is not known."""
    check_exists(model, user)
    if expected is not None and fingerprint_model(model) != expected:
        raise CheckpointError(
            f"the weights in {model} are not those that {user} was trained from: their fingerprints differ; restore "
            "these weights, or start a new run"
        )


def check_setting(setting: str, model: Path, expected: str) -> None:
    """Raise CheckpointError if a model that a setting of a run names is gone, or has other weights than at its start.

    setting: its name and value, for the error. expected: the fingerprint; "": it is not known.
    """
    if expected and not model.exists():
        raise CheckpointError(f"{setting} does not exist any more; restore it from a copy, or start a new run")
    if expected and fingerprint_model(model) != expected:
        raise CheckpointError(
            f"the weights of {setting} are not those that the run started with; restore them, or start a new run"
        )


def check_exists(model: Path, user: Path) -> None:
    """Raise CheckpointError if the model that a run or an adapter was trained from is gone."""
    if model.is_absolute() and not model.exists():
        raise CheckpointError(
            f"{user} was trained from {model}, which does not exist any more; restore it from a copy, or train again "
            f"from another checkpoint. If it was moved, give its new path with the adapter: --adapter {user}"
        )


def keep_base(run: Run, base: Path) -> Path | None:
    """Keep a checkpoint that a run needs, if it is one of another run, from being deleted when that run goes on.
    Returns the file that says so."""
    if base.parent.name != "checkpoints" or not (base.parent.parent / RUN).is_file():
        return None
    return Run(base.parent.parent).reference(base, run)
