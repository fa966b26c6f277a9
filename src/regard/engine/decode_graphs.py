"""Decode steps as CUDA graphs: one launch per step instead of hundreds.

A graph repeats kernels with the same addresses and sizes. So the tokens of a step and their positions are copied into
tensors that are kept, and there is one graph per number of rows (a power of two) and per number of slots that are read.
It is captured when it is first needed, or before, by `warm_up`. Its kernels are found out by a step without valid
tokens, which changes no state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # tokens, positions, valid (B, 1), span -> logits (B, V)


class DecodeGraphs:
    def __init__(self, step: Callable[[int], Step], rows: int, device: torch.device):
        """step: the function to capture for a number of rows."""
        self.step, self.rows, self.device = step, rows, device
        self.inputs = torch.zeros(3, rows, 1, dtype=torch.int64, device=device)  # tokens, positions, valid
        self.host = torch.zeros(3, rows, 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], span: int) -> Tensor:
        """The logits of one token per row, in the order of the rows; the next run overwrites them."""
        size = self.size(rows[-1] + 1)
        graph, logits = self.graphs.get((size, span)) or self.capture(size, span)
        self.host.zero_()
        self.host[:, rows, 0] = torch.tensor([tokens, positions, [1] * len(rows)])
        self.inputs.copy_(self.host, non_blocking=True)
        graph.replay()
        return logits if len(rows) == size else logits[list(rows)]

    def size(self, rows: int) -> int:
        """The rows of the smallest graph that has at least this many."""
        return min(1 << (rows - 1).bit_length(), self.rows)

    @property
    def sizes(self) -> list[int]:
        return sorted({self.size(rows) for rows in range(1, self.rows + 1)})

    def capture(self, rows: int, span: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.inputs.zero_()
        tokens, positions, valid = self.inputs[:, :rows]
        step = self.step(rows)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled in the first run
                step(tokens, positions, valid.bool(), span)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            logits = step(tokens, positions, valid.bool(), span)
        self.graphs[rows, span] = graph, logits
        return graph, logits
