"""A drafter as a folder: the `config.json` and `model.safetensors` of its heads or layer, and the model it belongs to.

`target` in the config is the fingerprint of the model's weights (weight_files.py): with other weights the drafts would
be right by chance only, so they are refused.
"""

from pathlib import Path

import torch
from torch import nn

from regard.checkpoint.atomic_folder import CheckpointError, write_folder
from regard.checkpoint.model_folder import load, own_config, read_spec_and_table, unique_parameters, write_files
from regard.checkpoint.weight_files import read_json
from regard.engine.speculation.eagle import Eagle
from regard.engine.speculation.medusa import Medusa
from regard.engine.speculation.speculation import Drafter
from regard.models.eagle import EagleLayerModule
from regard.models.medusa import MedusaHeadsModule

TARGET = "target"


def save_drafter(drafter: nn.Module, folder: str | Path, target: str) -> None:
    """target: the fingerprint of the model that it was trained for."""
    with write_folder(folder) as temporary:
        write_files(temporary, {**own_config(drafter), TARGET: target}, unique_parameters(drafter), None)


def load_drafter(folder: str | Path, kind: str, target: str, device: torch.device | str = "cpu") -> nn.Module:
    """CheckpointError if the folder has a drafter of another kind, or one for a model with another fingerprint."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no drafter; train one: regard speculate train MODEL {folder}")
    config = read_json(folder / "config.json")
    if TARGET not in config:
        raise CheckpointError(f"{folder} is a model and no drafter; train one: regard speculate train MODEL OUT")
    spec = read_spec_and_table(folder)[0]
    if spec.kind != kind:
        raise CheckpointError(f"{folder} has a drafter of kind {spec.kind}; use --speculate {spec.kind}:{folder}")
    if config[TARGET] != target:
        raise CheckpointError(
            f"{folder} was trained for a model with other weights, so its drafts would be wrong; train a drafter for "
            f"this one: regard speculate train MODEL OUT --method {kind}"
        )
    return load(folder, device)


def as_drafter(module: nn.Module, chains: int = 1) -> Drafter:
    """The drafter of an engine with these heads or this layer. chains: candidates per greedy request."""
    if isinstance(module, MedusaHeadsModule):
        return Medusa(module, chains)
    assert isinstance(module, EagleLayerModule), f"{type(module).__name__} is no drafter"
    return Eagle(module, chains)
