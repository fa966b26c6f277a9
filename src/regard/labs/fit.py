"""How labs train: a few hundred steps of AdamW on batches that are made as they are needed, and exact accuracies."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.labs.bench import Bench
from regard.objectives.base import Objective, layout_of
from regard.objectives.next_token import next_token
from regard.training.step import take_step

Make = Callable[[torch.Generator], Batch]  # a fresh batch of a task


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(
    bench: Bench,
    what: str,
    model: nn.Module,
    make: Make,
    steps: int,
    rate: float = 3e-3,
    clip: float = 1.0,
    enough: float = 0.0,
    objective: Objective = next_token,
) -> dict[str, list[float]]:
    """Train the model in place; -> loss and accuracy of every step, and seconds.

    The rate rises over a tenth of the steps and falls along a cosine. Training ends early once the running loss is
    below `enough`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    draws = generator(bench.seed)
    seen: dict[str, list[float]] = {"loss": [], "accuracy": [], "seconds": []}
    running = math.inf
    model.train()
    for step in bench.each(what, range(steps)):
        rise = min(1.0, (step + 1) / max(1, steps // 10))
        optimizer.param_groups[0]["lr"] = rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        batch = make(draws)
        start = time.perf_counter()
        means = take_step(model, objective, batch, optimizer, clip)
        seen["seconds"].append(time.perf_counter() - start)
        seen["loss"].append(means["loss"])
        seen["accuracy"].append(means.get("accuracy", math.nan))
        running = means["loss"] if math.isinf(running) else 0.9 * running + 0.1 * means["loss"]
        bench.tell(f"loss {running:.3f}")
        if running < enough:
            break
    model.eval()
    return seen


@torch.no_grad()
def right(model: nn.Module, batch: Batch) -> Tensor:
    """(B, L): is the likeliest prediction right, or does it not count? A source is for an encoder-decoder."""
    source = (batch.source,) if "source" in batch.fields else ()
    said = model(*source, batch.tokens, layout=layout_of(batch))
    return (said.argmax(-1) == batch.targets) | (batch.weights == 0)


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of counted tokens whose most likely prediction is right."""
    return 1 - (~right(model, batch)).sum().item() / (batch.weights > 0).sum().item()


def exact(model: nn.Module, batch: Batch) -> float:
    """The share of rows that are right from end to end: just those which greedy decoding would write so."""
    return right(model, batch).all(1).float().mean().item()


def interleaved(models: Mapping[str, nn.Module], loss: Callable[[nn.Module], Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of a forward and backward, the models in turn, so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):  # the first warms up
        for name, model in models.items():
            start = time.perf_counter()
            loss(model).backward()
            taken[name].append(time.perf_counter() - start)
            model.zero_grad()
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
