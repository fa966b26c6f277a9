"""Decoding on a GPU: few queries attend to many cached keys, contiguous or in pages (triton/decode_kernels.py)."""

import torch
from torch import Tensor

from regard.compat import cannot_triton
from regard.kernels.attention.bias import Bias, Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.pages import Pages
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout

MAX_QUERIES = 16  # per row
MAX_TILE = 128  # queries of a row times query heads per kv head
DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuses(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, options: ScoreOptions) -> str | None:
    reason = cannot_triton(q.device)
    return f"decode {reason}" if reason else cannot(q, k, v, layout, options)


def cannot(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, options: ScoreOptions) -> str | None:
    """Why the kernel does not support these arguments on any device."""
    queries, group = q.shape[2], q.shape[1] // k.shape[1]
    if queries > MAX_QUERIES or queries * group > MAX_TILE:
        return f"decode takes few queries, not {queries} with {group} heads per kv head"
    if q.shape[-1] not in DIMS or v.shape[-1] not in DIMS:
        return f"decode takes a head_dim of {', '.join(map(str, DIMS))}, not {q.shape[-1]} and {v.shape[-1]}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"decode needs q, k and v in one dtype of {', '.join(map(str, DTYPES))}"
    if mask_limits(options.mask) is None:
        return f"decode does not support the mask {type(options.mask).__name__}"
    if not isinstance(options.bias, Slopes | Buckets | None):
        return f"decode does not support the bias {type(options.bias).__name__}"
    if layout.segments is not None and layout.key_segments is not None:
        return "decode does not support packed documents"
    if options.dropout:
        return "decode has no dropout"
    requires_grad = (x.requires_grad for x in (q, k, v) if isinstance(x, Tensor))
    return "decode has no gradients" if torch.is_grad_enabled() and any(requires_grad) else None


def slower(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, options: ScoreOptions) -> str | None:
    return "decode is for cached keys" if layout.keys is None else None


def attend(q: Tensor, k: Tensor | Pages, v: Tensor | Pages, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    from regard.kernels.attention.triton.decode_kernels import decode, launch

    limits = mask_limits(options.mask)
    assert limits is not None, "refused"
    table, page = (k.table, k.block) if isinstance(k, Pages) else (None, 0)
    k, v = (x.pool if isinstance(x, Pages) else x for x in (k, v))
    run = (
        decode if torch.compiler.is_compiling() else launch
    )  # calling a custom operator costs more than the launch; only graphs need it
    return run(
        q, k, v, table, page, layout.positions, layout.key_positions, layout.key_valid, *limits,
        options.scale, options.softcap,
        *bias_table(options.bias), options.sinks,
    )  # fmt: skip


def bias_table(bias: Bias | None) -> tuple[str, Tensor | None]:
    """The kind of bias, and its slopes (H,) or its table by offset (H, 2 · max_distance + 1)."""
    if isinstance(bias, Slopes):
        return "slopes", bias.slopes.float()
    if isinstance(bias, Buckets):
        return "offsets", bias.by_offset(torch.float32).T.contiguous()
    return "none", None


def mask_limits(mask: Mask) -> tuple[int, int, int] | None:
    """The allowed distance before and after the query (-1: no limit), and the number of first tokens.

    None for a mask that these three numbers do not describe.
    """
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
