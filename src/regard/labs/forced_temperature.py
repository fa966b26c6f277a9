"""Attention is a smoother: too diffuse it selects nothing, too peaked it copies one value; a model is best as trained.

All scores of attention in SmolLM2 are divided by a temperature while it reads stories of the small world. A high one
makes the weights of all keys alike, a low one leaves the largest only. Measured: the loss, and the mean of the largest
weight of each row.
"""

# ledger: attn.kernel.modes

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.tasks import whole_rows
from regard.labs.trained_model import read_stories
from regard.lens import attention_maps
from regard.objectives.next_token import next_token
from regard.parts.attention import AttentionModule

TEMPERATURES = (0.125, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0)


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, ids = read_stories(bench, rows=bench.setting(4, 1), length=bench.setting(65, 13))
    batch = whole_rows(ids[:, :-1], ids[:, 1:], torch.ones(ids[:, 1:].shape))
    losses, largest = {}, {}
    for temperature in bench.each("temperatures", TEMPERATURES):
        with forced(model, temperature):
            loss, count, _ = next_token(model, batch)
            maps = [weights for weights in attention_maps(model, ids[0]) if weights is not None]
        losses[temperature] = (loss / count).item()
        # the first rows have few keys
        largest[temperature] = float(torch.stack([rows[:, len(ids[0]) // 2 :].amax(-1).mean() for rows in maps]).mean())
    low, high = TEMPERATURES[0], TEMPERATURES[-1]
    best = min(TEMPERATURES, key=losses.__getitem__)
    checks = [
        Check("of all temperatures the loss is least at one from 0.8 to 1.25", f"{best:g}", 0.8 <= best <= 1.25),
        Check(f"at {high:g}, too diffuse, the loss is higher than at 1 by more than 1 nat",
              f"{losses[high]:.2f} and {losses[1.0]:.2f}", losses[high] > losses[1.0] + 1),
        Check(f"at {low:g}, too peaked, the loss is higher than at 1 by more than 1 nat",
              f"{losses[low]:.2f} and {losses[1.0]:.2f}", losses[low] > losses[1.0] + 1),
        Check(f"at {low:g} the largest weight of a row is 0.9 or more on average", f"{largest[low]:.2f}",
              largest[low] >= 0.9),
        Check(f"at {high:g} it is 0.1 or less", f"{largest[high]:.2f}", largest[high] <= 0.1),
    ]  # fmt: skip
    table = [{"temperature": t, "loss": losses[t], "largest weight": largest[t]} for t in TEMPERATURES]
    shown = [t for t in TEMPERATURES if t not in (0.8, 1.25)]  # labels of the others would overlap
    plots = [
        Plot("temperature", "nats per token", {"loss": [(t, losses[t]) for t in shown]}, "stories", "x"),
        Plot("temperature", "mean of the largest weight", {"weight": [(t, largest[t]) for t in shown]}, "rows", "x"),
    ]
    return Findings(table, checks, plots, "One trained model, all layers at once.")


@contextmanager
def forced(model: nn.Module, temperature: float) -> Generator[None]:
    """All scores of attention are divided by the temperature."""
    modules = [module for module in model.modules() if isinstance(module, AttentionModule)]
    scales = [module.scale for module in modules]
    for module, scale in zip(modules, scales, strict=True):
        module.scale = scale / temperature
    yield
    for module, scale in zip(modules, scales, strict=True):
        module.scale = scale
