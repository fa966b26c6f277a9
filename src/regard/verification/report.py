"""Test all laws on a model, in float64 and in float32, and report one verdict per law."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import nn

from regard.checkpoint.model_folder import load
from regard.compat import resolve_device
from regard.kernels.attention.mask import Mask
from regard.language_model import LanguageModel
from regard.models.base import Model
from regard.training.run import newest_checkpoint
from regard.verification.laws import LAWS
from regard.verification.length import MIN_LENGTH, ineffective_masks, sufficient_length
from regard.verification.outcome import TOLERANCE, Outcome, Verdict, broken, judge, name_of, within_tolerance
from regard.verification.trial import Trial, randomize_weights
from regard.verification.trials import trials

AnyModel = nn.Module | LanguageModel | Model | str | Path
LINE = 120  # characters per line of a printed report


@dataclass(frozen=True)
class Report:
    """The verdicts of `verify`. `ok`: every law that applies holds. `print(report)` shows them as a table."""

    verdicts: tuple[Verdict, ...]
    length: int  # tokens per sequence
    seed: int
    untested_masks: dict[Mask, int]  # masks without effect at this length, and the length that would test each

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.result == "FAIL"]

    def to_dict(self) -> dict[str, Any]:
        """The verdicts as data for JSON."""
        laws = [verdict.to_dict() for verdict in self.verdicts]
        return {"length": self.length, "seed": self.seed, "failed": len(self.failed), "laws": laws}

    def __str__(self) -> str:
        rows = [("law", "result", "float64", "float32", "note"), *(row(verdict) for verdict in self.verdicts)]
        widths = [max(map(len, column)) for column in zip(*(cells[:-1] for cells in rows), strict=True)]
        lines = []
        for *cells, note in rows:
            start = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "  "
            lines += wrap(note, LINE, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]
        for mask, needed in self.untested_masks.items():
            lines.append(f"{mask} masks nothing in {self.length} tokens; a length of {needed} would test it")
        failed = len(self.failed)
        lines.append(f"{failed} of {len(rows) - 1} laws do not hold" if failed else "all laws that apply hold")
        return "\n".join(lines)


def row(verdict: Verdict) -> tuple[str, ...]:
    result = "refused, as expected" if verdict.result == "refused" else verdict.result
    differences = (verdict.differences.get(dtype) for dtype in ("float64", "float32"))
    return verdict.law, result, *("" if d is None else f"{d:.1e}" for d in differences), verdict.note


def verify(
    model: AnyModel,
    length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    on_law: Callable[[str, str], None] | None = None,
) -> Report:
    """Test that cached = whole, batched = alone, packed = separate … on a model of any parts.

    model: a module, a language model, or the name or path of a stored one, each tested with its own weights; a spec is
    built with random weights, wide enough that a wrong mask or position changes the output. The model is not changed.
    length: tokens per sequence, by default enough for every mask to have an effect. seed: for the token ids and random
    weights. device: for a stored model or a spec. on_law: called with (law, dtype) before each law is tested.
    """
    module = as_module(model, seed, device)
    spec = module.spec
    assert isinstance(spec, Model)
    length = length or sufficient_length(module, spec)
    outcomes: dict[tuple[str, str], dict[torch.dtype, Outcome]] = {}
    for dtype in TOLERANCE:
        copy = deepcopy(module).to(dtype).eval().requires_grad_(False)
        for part, trial in trials(copy, length, seed=seed).items():
            for law in LAWS:
                if on_law is not None:
                    on_law(law, name_of(dtype))
                outcomes.setdefault((part, law), {})[dtype] = attempt(law, trial)
    in_float64 = [by_dtype[torch.float64] for by_dtype in outcomes.values()]
    holding = [outcome.difference for outcome in in_float64 if within_tolerance(outcome, torch.float64)]
    rounding = max(holding, default=0.0)
    verdicts = (
        judge(f"{part}: {law}" if part else law, by_dtype, rounding) for (part, law), by_dtype in outcomes.items()
    )
    return Report(tuple(verdicts), length, seed, ineffective_masks(spec, length))


def as_module(model: AnyModel, seed: int, device: str) -> nn.Module:
    """The module to test."""
    if isinstance(model, nn.Module):
        if not isinstance(getattr(model, "spec", None), Model):
            raise ValueError(f"{type(model).__name__} has no spec; give a model that was built from one")
        return model
    if isinstance(model, LanguageModel):
        return model.model
    device = resolve_device(device)
    if isinstance(model, Model):
        module = model.build(seed)
        randomize_weights(module, seed)
        return module.to(device)
    folder = newest_checkpoint(model)
    return load(folder, device, checked=folder != Path(model))


def count_laws(model: nn.Module) -> int:
    """How often `verify` calls `on_law`."""
    return len(TOLERANCE) * len(LAWS) * len(trials(model, MIN_LENGTH))


@torch.inference_mode()
def attempt(law: str, trial: Trial) -> Outcome:
    """The outcome of one law. An error of the model is a failure, with its message."""
    try:
        return LAWS[law].attempt(trial)
    except (ValueError, RuntimeError, IndexError) as error:
        return broken(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
