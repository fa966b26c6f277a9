"""Decode steps as CUDA graphs: one launch per step instead of hundreds.

A graph repeats kernels with the same addresses and sizes. So the tokens of a step and their positions are copied into
tensors that are kept, and there is one graph per number of rows and of tokens per row (powers of two), and per number
of slots that are read. A row has one token, or a few: those of a draft that is verified. A graph is captured when it is
first needed, or before, by `warm_up`, from a step without valid tokens, which changes no state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.compat import allow_recompiles
from regard.engine.request import UNREAD
from regard.layout import to_device

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # tokens, positions, valid (B, L), span -> logits (B · L, V)
MAX_LENGTH = 16  # tokens per row
MAX_TOKENS = 64  # of rows with more than one token; a step of more is not bound by its launches


def decode_size(rows: int, max_rows: int) -> int:
    """The number of rows that a step computes for at least `rows` of them: a power of two, or all rows of the store."""
    return min(1 << (rows - 1).bit_length(), max_rows)


def row_length(tokens: int) -> int:
    """The number of tokens per row that a step computes for at least so many: a power of two."""
    return 1 << (tokens - 1).bit_length()


class CannotCapture(RuntimeError):
    """A decode step cannot be captured, for example because it needs the host to read a tensor."""


class DecodeGraphs:
    def __init__(self, step: Step, rows: int, device: torch.device):
        self.step, self.rows, self.device = step, rows, device
        self.inputs: dict[int, Tensor] = {}  # (3, rows, length) tokens, positions and valid, by length
        self.graphs: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by rows, length and span
        self.stream: torch.cuda.Stream | None = None

    def fits(self, rows: int, length: int) -> bool:
        """Whether there are graphs for up to `length` tokens of so many rows."""
        length = row_length(length)
        return length == 1 or length <= MAX_LENGTH and decode_size(rows, self.rows) * length <= MAX_TOKENS

    def run(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int], span: int, last: Tensor
    ) -> Tensor:
        """The logits (R, L, V) of the tokens of R rows, L at least as many as a row has; the next run overwrites them.

        starts: the position of the first token of each row. last: (rows,) the ids of tokens that are UNREAD.
        """
        size, length = decode_size(rows[-1] + 1, self.rows), row_length(max(map(len, tokens)))
        graph, logits = self.graphs.get((size, length, span)) or self.capture(size, span, length)
        inputs, kept = torch.zeros(3, self.rows, length, dtype=torch.int64), self.inputs[length]
        padding = [[0] * (length - len(ids)) for ids in tokens]
        inputs[0, rows] = torch.tensor([[*ids, *zeros] for ids, zeros in zip(tokens, padding, strict=True)])
        inputs[1, rows] = torch.tensor(starts).unsqueeze(-1)
        inputs[2, rows] = torch.tensor(
            [[*([1] * len(ids)), *zeros] for ids, zeros in zip(tokens, padding, strict=True)]
        )
        inputs[1] += inputs[2] * torch.arange(length)  # padding has the position of the first token
        kept.copy_(to_device(inputs, self.device))
        if any(UNREAD in ids for ids in tokens):
            kept[0] = last.unsqueeze(-1).where(kept[0] == UNREAD, kept[0])
        graph.replay()
        logits = logits.unflatten(0, (size, length))
        return logits if len(rows) == size else logits[to_device(torch.tensor(rows), self.device)]

    @property
    def sizes(self) -> list[int]:
        return sorted({decode_size(rows, self.rows) for rows in range(1, self.rows + 1)})

    def capture(self, rows: int, span: int, length: int = 1) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        try:
            with allow_recompiles():
                self.graphs[rows, length, span] = self.record(rows, span, length)
        except RuntimeError as error:  # errors of torch.compile and of CUDA
            reason = str(error).partition("\n")[0]
            raise CannotCapture(f"the decode step of {rows} rows cannot be captured as a graph ({reason})") from error
        return self.graphs[rows, length, span]

    def empty_inputs(self, rows: int, length: int) -> Tensor:
        """The kept tokens, positions and valid of a step, (3, rows, length) zeros."""
        if length not in self.inputs:
            self.inputs[length] = torch.zeros(3, self.rows, length, dtype=torch.int64, device=self.device)
        return self.inputs[length].zero_()[:, :rows]

    def record(self, rows: int, span: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph, and the logits that it computes. All graphs share one stream, so their kernels share counters."""
        tokens, positions, valid = self.empty_inputs(rows, length)
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
