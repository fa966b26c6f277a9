"""Decoding on a GPU: few queries before many remembered keys, contiguous or in pages (triton/decode.py)."""

import torch
from torch import Tensor

from regard.compat import cannot_triton
from regard.kernels.attention.bias import Bias, Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.pages import Pages
from regard.kernels.attention.patterns.sinks import SinksAndWindow
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout

MOST = 16  # queries of a row; and of a kv head, with all its heads
TILE = 128
DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuses(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    reason = cannot_triton(q.device)
    return f"decode {reason}" if reason else cannot(q, k, v, layout, scores)


def cannot(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    """Why the kernel cannot do this case, on whatever device."""
    queries, group = q.shape[2], q.shape[1] // k.shape[1]
    if queries > MOST or queries * group > TILE:
        return f"decode is for few queries, not {queries} of {group} heads to one kv head"
    if q.shape[-1] not in DIMS or v.shape[-1] not in DIMS:
        return f"decode takes heads of {', '.join(map(str, DIMS))} coordinates, not {q.shape[-1]} and {v.shape[-1]}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"decode computes in one of {', '.join(map(str, DTYPES))}"
    if bounds(scores.mask) is None:
        return f"decode does not know the mask {type(scores.mask).__name__}"
    if not isinstance(scores.bias, Slopes | Buckets | None):
        return f"decode does not know the bias {type(scores.bias).__name__}"
    if layout.segments is not None and layout.key_segments is not None:
        return "decode keeps no documents apart"
    if scores.dropout:
        return "decode cannot drop weights"
    wanted = (x.requires_grad for x in (q, k, v) if isinstance(x, Tensor))
    return "decode has no gradients" if torch.is_grad_enabled() and any(wanted) else None


def slower(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return "decode is for remembered keys" if layout.keys is None else None


def attend(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    from regard.kernels.attention.triton.decode_kernels import decode, launch

    where = bounds(scores.mask)
    assert where is not None, "refused"
    table, page = (k.table, k.block) if isinstance(k, Pages) else (None, 0)
    k, v = (x.pool if isinstance(x, Pages) else x for x in (k, v))
    run = decode if torch.compiler.is_compiling() else launch  # an operator is for graphs, and takes its time
    return run(
        q, k, v, table, page, layout.positions, layout.key_positions, layout.key_valid, *where,
        scores.scale, scores.softcap,
        *numbers_of(scores.bias), scores.sinks,
    )  # fmt: skip


def numbers_of(bias: Bias | None) -> tuple[str, Tensor | None]:
    """The kind of bias, and its slopes (H,) or its line (H, 2 · reach + 1): the number of every distance."""
    if isinstance(bias, Slopes):
        return "slopes", bias.slopes.float()
    if isinstance(bias, Buckets):
        return "line", bias.line(torch.float32).T.contiguous()
    return "none", None


def bounds(mask: Mask) -> tuple[int, int, int] | None:
    """How far before and after it a query sees (-1: without end), and how many first ones; None: not so simply."""
    match mask:
        case Causal():
            return -1, 0, 0
        case Full():
            return -1, -1, 0
        case Window(size, causal=True):
            return size - 1, 0, 0
        case Window(size):
            return size, size, 0
        case SinksAndWindow(sinks, size):
            return size - 1, 0, sinks
    return None
