"""Decoding on a GPU: few queries attend to many cached keys, contiguous or in pages (triton/decode_kernels.py)."""

import torch
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.kernels.attention.arguments import AttentionCall, Keys, Pages, ScoreOptions
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.layout import Bias, TokenLayout

MAX_QUERIES = 16  # per row
MAX_TILE = 128  # queries of a row times query heads per kv head
DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(call: AttentionCall) -> str | None:
    reason = cannot_run_triton(call.device)
    return f"decode {reason}" if reason else unsupported_by_kernel(call)


def unsupported_by_kernel(call: AttentionCall) -> str | None:
    """The reason why the kernel does not support this call on any device, or None."""
    (_, heads, queries, q_dim), v_dim = call.q, call.v[-1]
    group = heads // call.k[1]
    if queries > MAX_QUERIES or queries * group > MAX_TILE:
        limits = f"{MAX_QUERIES} queries per row and {MAX_TILE} per kv head"
        return f"decode supports up to {limits}, not {queries} with {group} heads per kv head"
    if q_dim not in DIMS or v_dim not in DIMS:
        return f"decode supports a head_dim of {', '.join(map(str, DIMS))}, not {q_dim} and {v_dim}"
    if call.dtypes[0] not in DTYPES or len(set(call.dtypes)) > 1:
        return f"decode needs q, k and v in one dtype of {', '.join(map(str, DTYPES))}"
    if mask_limits(call.mask) is None:
        return f"decode does not support the mask {type(call.mask).__name__}"
    if call.visible:
        return "decode does not support keys that only some queries attend to"
    if call.bias not in (None, Slopes, Buckets):
        return f"decode does not support the bias {call.bias.__name__}"
    if call.packed:
        return "decode does not support packed documents"
    if call.dropout:
        return "decode has no dropout"
    return "decode has no gradients" if call.needs_gradients else None


def slower_reason(call: AttentionCall) -> str | None:
    return "decode is for cached keys" if call.own_keys else None


def attend(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    from regard.kernels.attention.triton.decode_kernels import decode, launch

    limits = mask_limits(options.mask)
    assert limits is not None, "unsupported_reason excludes masks without limits"
    table, page = (k.table, k.block) if isinstance(k, Pages) else (None, 0)
    k, v = (x.pool if isinstance(x, Pages) else x for x in (k, v))
    # A call of a custom operator costs more than the launch, and only compiled graphs need the operator.
    run = decode if torch.compiler.is_compiling() else launch
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
