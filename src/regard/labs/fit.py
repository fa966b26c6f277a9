"""Training and evaluation in labs: AdamW on batches that are generated as needed, accuracies, and timing."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.labs.experiment import Bench
from regard.objectives.base import LossFunction, layout_of
from regard.objectives.next_token import next_token
from regard.training.step import take_step

MakeBatch = Callable[[torch.Generator], Batch]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(
    bench: Bench,
    label: str,
    model: nn.Module,
    make_batch: MakeBatch,
    steps: int,
    learning_rate: float = 3e-3,
    clip: float = 1.0,
    stop_below: float = 0.0,
    objective: LossFunction = next_token,
) -> dict[str, list[float]]:
    """Train the model in place. Returns the loss, accuracy and seconds of every step.

    The learning rate warms up over a tenth of the steps and decays along a cosine. Training ends early when the running
    mean of the loss is below `stop_below`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = generator(bench.seed)
    history: dict[str, list[float]] = {"loss": [], "accuracy": [], "seconds": []}
    running_loss = math.inf
    model.train()
    for step in bench.each(label, range(steps)):
        warmup = min(1.0, (step + 1) / max(1, steps // 10))
        optimizer.param_groups[0]["lr"] = learning_rate * warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        batch = make_batch(rng)
        start = time.perf_counter()
        means = take_step(model, objective, batch, optimizer, clip)
        history["seconds"].append(time.perf_counter() - start)
        history["loss"].append(means["loss"])
        history["accuracy"].append(means.get("accuracy", math.nan))
        running_loss = means["loss"] if math.isinf(running_loss) else 0.9 * running_loss + 0.1 * means["loss"]
        bench.show(f"loss {running_loss:.3f}")
        if running_loss < stop_below:
            break
    model.eval()
    return history


@torch.no_grad()
def correct_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """(B, L) True where the most likely token is the target, or where the token has no weight."""
    source = (batch.source,) if "source" in batch.fields else ()  # for an encoder-decoder
    logits = model(*source, batch.tokens, layout=layout_of(batch))
    return (logits.argmax(-1) == batch.targets) | (batch.weights == 0)


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of weighted tokens that are predicted correctly."""
    return 1 - (~correct_tokens(model, batch)).sum().item() / (batch.weights > 0).sum().item()


def exact_match(model: nn.Module, batch: Batch) -> float:
    """The share of rows whose tokens are all predicted correctly, so that greedy decoding would generate them."""
    return correct_tokens(model, batch).all(1).float().mean().item()


def step_seconds(models: Mapping[str, nn.Module], loss: Callable[[nn.Module], Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of a forward and backward. The models alternate, so that load affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):  # the first is a warm-up
        for name, model in models.items():
            start = time.perf_counter()
            loss(model).backward()
            seconds[name].append(time.perf_counter() - start)
            model.zero_grad()
    return {name: statistics.median(durations[1:]) for name, durations in seconds.items()}
