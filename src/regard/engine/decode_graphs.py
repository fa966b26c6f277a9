"""Decode steps as CUDA graphs: one launch per step instead of hundreds.

A graph repeats kernels with the same addresses and sizes. So the tokens of a step and their positions are copied into
tensors that are kept, and there is one graph per number of rows (a power of two) and per number of slots that are read.
It is captured when it is first needed, or before, by `warm_up`. Its kernels are found out by a step without valid
tokens, which changes no state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.compat import allow_recompiles
from regard.engine.request import UNREAD
from regard.layout import to_device

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # tokens, positions, valid (B, 1), span -> logits (B, V)


def decode_size(rows: int, max_rows: int) -> int:
    """The number of rows that a step computes for at least `rows` of them: a power of two, or all rows of the store."""
    return min(1 << (rows - 1).bit_length(), max_rows)


class CannotCapture(RuntimeError):
    """A decode step cannot be captured, for example because it needs the host to read a tensor."""


class DecodeGraphs:
    def __init__(self, step: Step, rows: int, device: torch.device):
        self.step, self.rows, self.device = step, rows, device
        self.inputs = torch.zeros(3, rows, 1, dtype=torch.int64, device=device)  # tokens, positions, valid
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.stream: torch.cuda.Stream | None = None

    def run(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], span: int, last: Tensor
    ) -> Tensor:
        """The logits of one token per row, in the order of the rows; the next run overwrites them.

        last: (rows,) the ids of tokens that are UNREAD.
        """
        size = decode_size(rows[-1] + 1, self.rows)
        graph, logits = self.graphs.get((size, span)) or self.capture(size, span)
        inputs = torch.zeros(3, self.rows, 1, dtype=torch.int64)
        inputs[:, rows, 0] = torch.tensor([tokens, positions, [1] * len(rows)])
        self.inputs.copy_(to_device(inputs, self.device))
        if UNREAD in tokens:
            self.inputs[0] = last.unsqueeze(-1).where(self.inputs[0] == UNREAD, self.inputs[0])
        graph.replay()
        return logits if len(rows) == size else logits[to_device(torch.tensor(rows), self.device)]

    @property
    def sizes(self) -> list[int]:
        return sorted({decode_size(rows, self.rows) for rows in range(1, self.rows + 1)})

    def capture(self, rows: int, span: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        try:
            with allow_recompiles():
                self.graphs[rows, span] = self.record(rows, span)
        except RuntimeError as error:  # errors of torch.compile and of CUDA
            reason = str(error).partition("\n")[0]
            raise CannotCapture(f"the decode step of {rows} rows cannot be captured as a graph ({reason})") from error
        return self.graphs[rows, span]

    def record(self, rows: int, span: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph, and the logits that it computes. All graphs share one stream, so their kernels share counters."""
        self.inputs.zero_()
        tokens, positions, valid = self.inputs[:, :rows]
        self.stream = self.stream or torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(2):  # kernels are compiled in the first run
                self.step(tokens, positions, valid.bool(), span)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
            return graph, self.step(tokens, positions, valid.bool(), span)
