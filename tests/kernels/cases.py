"""The cases that every attention backend is tested on: masks × biases × caps × sinks × heads × token layouts."""

import torch
from torch import Tensor

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask, PrefixLM
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_pattern import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.sparse_transformer import FixedPattern, StridedPattern
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.layout import Bias, TokenLayout

LENGTH, DIM, VALUE_DIM = 37, 8, 6
HEADS = {"multi-head": (4, 4), "grouped-query": (4, 2), "multi-query": (4, 1)}
BLOCK_TABLE = ((0,), (0, 1), (2,), (1, 3), (0, 4, 2), (5, 3), (), (6, 0))
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "prefix": PrefixLM(5),
    "window": Window(5),
    "window of a block": Window(16),
    "window of a block and one token": Window(17),
    "window, longer than the sequence": Window(50),
    "window, both sides": Window(3, causal=False),
    "dilated": Dilated(3, 4),
    "dilated, both sides": Dilated(2, 3, causal=False),
    "dilated, longer than the sequence": Dilated(99, 5),
    "strided": StridedPattern(6),
    "fixed": FixedPattern(6, 2),
    "sinks and window": SinksAndWindow(3, 7),
    "block-sparse": BlockSparse(4, BLOCK_TABLE),
    "block-sparse, both sides": BlockSparse(4, BLOCK_TABLE, causal=False),
    "longformer": Longformer(4, 3),
    "longformer, causal": Longformer(4, 3, causal=True),
    "bigbird": BigBird(4, 3, 1, 2, length=36),
    "bigbird, causal": BigBird(4, 3, 2, 2, causal=True),
}
ON_GPU = {"decode", "triton"}  # backends that require a CUDA GPU


def one_query_with_cached_keys() -> TokenLayout:
    """A decode step: rows of different lengths with cached keys, of which one is invalid."""
    slots = torch.arange(LENGTH).expand(2, LENGTH)
    return TokenLayout(torch.tensor([[3], [LENGTH - 1]])).with_keys(slots, valid=slots != 1)


def build_layouts() -> dict[str, TokenLayout]:
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    lengths = torch.tensor([[9, 1, 27], [20, 16, 1]])
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths])
    document_positions = torch.stack([torch.cat([torch.arange(n) for n in row.tolist()]) for row in lengths])
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0, 30:] = valid[1, 20:] = False
    left_padded_positions = (positions - torch.tensor([[4], [11]])).clamp_min(0)
    return {
        "ordered": TokenLayout.whole(2, LENGTH),
        "positions": TokenLayout(positions),
        "packed": TokenLayout(document_positions, segments=documents, consecutive=True),
        "padded": TokenLayout(positions, valid=valid, consecutive=True),
        "padded left": TokenLayout(
            left_padded_positions, valid=positions >= torch.tensor([[4], [11]]), consecutive=True
        ),
        "packed and padded": TokenLayout(document_positions, segments=documents, valid=valid, consecutive=True),
        "documents, not consecutive": TokenLayout(document_positions, segments=documents),
        "cached keys": TokenLayout(positions[:, 4:7]).with_keys(positions),
        "one query": one_query_with_cached_keys(),
        "visible keys": TokenLayout(positions[:, 4:12]).with_keys(
            positions % 12, positions != 2, visible=(positions % 5, positions % 5 + 6)
        ),
    }


LAYOUTS = build_layouts()
BIASES = {"no bias": None, "alibi": "slopes", "t5": "buckets"}
EXTRAS = {"": (None, False), "capped": (1.5, False), "sinks": (None, True), "capped, sinks": (1.5, True)}


def bias_of(name: str | None, dtype: torch.dtype) -> Bias | None:
    generator = torch.Generator().manual_seed(3)
    if name == "slopes":
        return Slopes(torch.tensor([0.5, 0.25, 0.0625, 1.5], dtype=dtype))
    if name == "buckets":
        table = torch.randn(8, 4, generator=generator, dtype=torch.float64).to(dtype)
        return Buckets(table.requires_grad_(), 20, True)
    return None


def options_of(mask: Mask, bias: str | None, extra: str, dtype: torch.dtype) -> ScoreOptions:
    cap, has_sinks = EXTRAS[extra]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=dtype, requires_grad=True) if has_sinks else None
    return ScoreOptions(mask, 0.7, bias_of(bias, dtype), cap, sinks)


def inputs(heads: str, layout: TokenLayout, dtype: torch.dtype, value_dim: int = VALUE_DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, k = HEADS[heads]
    queries, keys = layout.positions.shape[1], layout.key_positions.shape[1]
    shapes = [(2, h, queries, DIM), (2, k, keys, DIM), (2, k, keys, value_dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def with_gradients(attend, tensors: list[Tensor], layout: TokenLayout, options: ScoreOptions) -> list[Tensor]:
    """The output at valid tokens, zeros at padding, and the gradients of all tensors that require one."""
    out = attend(*tensors, layout, options)
    if layout.valid is not None:
        out = out.where(layout.valid.view(len(out), 1, -1, 1), 0)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    table = [options.bias.table] if isinstance(options.bias, Buckets) else []
    leaves = [*tensors, *table, *([] if options.sinks is None else [options.sinks])]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]
