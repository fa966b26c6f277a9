"""Runs a function in several processes, as torchrun would start them, and a small training loop for them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.data.batch import Batch
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.base import LossResult, layout_of, token_loss
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.training.optimizer import AdamW
from regard.training.parallel.context_parallel import split_columns
from regard.training.parallel.distribute import distribute, split_groups
from regard.training.parallel.mesh import Parallel, Processes, make_processes, process_group
from regard.training.step import SINGLE_PROCESS, Reduction, take_step
from tests.forkserver import run_in_each

VOCAB, ROWS, LENGTH = 52, 8, 24
LR = 1e-3  # with 1e-2, float32 itself is 7e-6 away from float64 after 20 steps
ATTENTION = Sublayer(Attention(4, 2, position=Rope(), qk_norm=RMSNorm()))
BLOCK = Block((ATTENTION, Sublayer(SwiGLU(24))))
SPEC = Decoder(
    VOCAB,
    16,
    (
        Repeat((BLOCK,), 2, tied=True),
        Repeat((Block((Sublayer(LinearAttention(2)), Sublayer(FeedForward(24))), style="parallel"),)),
    ),
)
DENSE = replace(SPEC, layers=(Repeat((BLOCK,), 2),))
EXPERTS = Experts(4, 2, SwiGLU(12), shared=SwiGLU(8), balance=0.0)
MIXTURE = replace(SPEC, layers=(Repeat((Block((ATTENTION, Sublayer(EXPERTS))),), 2),), tied=False)

Curve = list[dict[str, float]]


def run_in_processes(function: Callable, parallel: Parallel, count: int, folder: Path, *arguments: Any) -> None:
    """function(processes, *arguments) in `count` processes, which torch is imported for once."""
    run_in_each(run_process, (function, parallel, count, str(folder), arguments), count)


def run_process(rank: int, function: Callable, parallel: Parallel, count: int, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    with process_group("cpu", f"file://{folder}/rendezvous") as device:
        function(make_processes(parallel, device), *arguments)


def build(spec: Decoder = SPEC, dtype: torch.dtype = torch.float64) -> nn.Module:
    return spec.build(seed=0).to(dtype).train()


def objective(model: nn.Module, batch: Batch) -> LossResult:
    return token_loss(model(batch.tokens, layout_of(batch), outputs=True), batch)


def batches(count: int, processes: Processes | None = None, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Packed and padded rows of random tokens with random weights: those of this process, or all."""
    generator = torch.Generator().manual_seed(1)
    packed = [random_batch(generator, dtype) for _ in range(count)]
    if processes is None:
        return packed
    share = ROWS // processes.row_ranks
    return [batch.rows(slice(processes.row_rank * share, (processes.row_rank + 1) * share)) for batch in packed]


def random_batch(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    starts = (torch.rand(ROWS, LENGTH, generator=generator) < 0.15).long()
    starts[:, 0] = 1
    starts[0, 1:] = 0  # a row of one document
    segments = starts.cumsum(1) - 1
    columns = torch.arange(LENGTH).expand(ROWS, -1)
    positions = columns - columns.where(starts > 0, 0).cummax(1).values
    valid = columns < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    weights = (torch.rand(ROWS, LENGTH, generator=generator) < 0.8) & valid
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weights.to(dtype),
        positions=positions.where(valid, 0),
        segments=segments.where(valid, -1),
    )


def train(
    model: nn.Module,
    data: list[Batch],
    accumulate: int = 1,
    reduction: Reduction = SINGLE_PROCESS,
    optimizer: torch.optim.Optimizer | None = None,
) -> Curve:
    optimizer = optimizer or AdamW().build(model, LR)
    return [take_step(model, objective, batch, optimizer, 1.0, accumulate, reduction=reduction) for batch in data]


def train_parallel(
    model: nn.Module, processes: Processes, steps: int, accumulate: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[Curve, torch.optim.Optimizer]:
    forward_model, reduction = distribute(model, processes)
    optimizer = AdamW().build(model, LR)
    split_groups(optimizer)
    data = [split_columns(batch, processes) for batch in batches(steps, processes, dtype)]
    curve = train(forward_model, data, accumulate, reduction, optimizer)
    return curve, optimizer


def largest_difference(a: Curve, b: Curve) -> float:
    assert [line.keys() for line in a] == [line.keys() for line in b]
    return max(abs(x[name] - y[name]) / max(1, abs(y[name])) for x, y in zip(a, b, strict=True) for name in x)
