"""Saving and loading, exporting and importing, and merging adapters do not change the model."""

from collections import Counter
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from regard.adapt.adapters import DEFAULT, adapters, add_lora, merge_lora
from regard.adapt.lora import LoRA
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.targets import adaptable_weights, training_only
from regard.adapt.w8a8 import W8A8Linear
from regard.checkpoint.model_folder import export, load, save
from regard.families import FAMILIES, can_express
from regard.models.value_head import without_value_weights
from regard.verification.outcome import Outcome, broken, compared, difference, not_applicable
from regard.verification.trial import Trial


def saved(trial: Trial) -> Outcome:
    """A saved and loaded model has the same spec and the same tensors, bit for bit."""
    with TemporaryDirectory() as folder:
        save(trial.model, Path(folder) / "model")
        loaded = load(Path(folder) / "model", trial.device, trial.dtype)
    before, after = trial.model.state_dict(), loaded.state_dict()
    if loaded.spec != trial.spec or before.keys() != after.keys():
        return broken("the loaded model has another spec or other tensor names")
    wrong = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    return broken(f"{wrong[0]} differs after loading") if wrong else compared(f"{len(before)} tensors", 0.0, exact=True)


def exported(trial: Trial) -> Outcome:
    """A model that is exported to a family and imported again has the same tensors, except those of a value head, bit
    for bit.

    The law is tested with every family that can represent the spec.
    """
    families = [name for name in FAMILIES if can_express(name, trial.spec)]
    if not families:
        return not_applicable("no family can represent this spec")
    if any(isinstance(module, QuantizedLinear) for module in trial.model.modules()):
        return not_applicable("exports do not write layers that are stored in few bits")
    before = without_value_weights(trial.model.state_dict())
    for name in families:
        with TemporaryDirectory() as folder:
            export(trial.model, Path(folder) / name, name)
            after = load(Path(folder) / name, trial.device, trial.dtype).state_dict()
        wrong = [key for key, tensor in before.items() if key not in after or not torch.equal(tensor, after[key])]
        if wrong:
            return broken(f"{name}: {wrong[0]} differs after loading")
    return compared(f"through {', '.join(families)}", 0.0, exact=True)


def merged(trial: Trial) -> Outcome:
    """Merging LoRA adapters into the weights does not change the output."""
    targets = mergeable_weights(trial.model)
    if not targets:
        return not_applicable("no linear layer can be adapted")
    if any(isinstance(module, W8A8Linear) for module in trial.model.modules()):
        return not_applicable("layers that round their inputs (W8A8) refuse to be merged")
    model = deepcopy(trial.model)
    add_lora(model, LoRA(rank=4, alpha=4.0, targets=targets), seed=trial.seed)
    generator = torch.Generator().manual_seed(trial.seed)
    for adapter in adapters(model).values():  # B is initialized with zeros, so that merging would change nothing
        a, b = (adapter.matrix(side, DEFAULT) for side in ("A", "B"))
        for matrix, deviation in ((a, a.shape[-1] ** -0.5), (b, 0.2)):
            drawn = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)  # the same in every dtype
            matrix.data.copy_(deviation * drawn)
    model.eval()
    tokens = trial.inputs(2, trial.length)
    unadapted, adapted = trial.whole(tokens), trial.with_model(model).whole(tokens)
    if difference(adapted, unadapted) < 1e-3:
        return broken("the adapters do not change the output, so merging them cannot be tested")
    count = len(merge_lora(model))
    return compared(f"{count} adapted layers", difference(trial.with_model(model).whole(tokens), adapted))


def mergeable_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights that affect the output and are not tied to a parameter that LoRA cannot adapt."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    unused = training_only(model)
    return tuple(
        name
        for weight in adaptable_weights(model).values()
        if isinstance(weight.layer, QuantizedLinear) or uses[id(weight.weight)] == len(weight.names)
        for name in weight.names
        if not name.startswith(unused)
    )
