"""FlashAttention in Triton for GPUs: options that PyTorch's kernels lack or support only by an n × n mask or bias.

Windows, sinks, packed and padded rows, ALiBi, T5's bias, softcaps and grouped heads are computed per tile: no mask or
bias is stored, and tiles without any allowed pair are skipped. Whole causal or bidirectional sequences without such
options are left to PyTorch's kernels, which are faster for them.
"""

import math

import torch
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.kernels.attention.arguments import AttentionCall, ScoreOptions
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.decode import mask_limits
from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.statistics import Statistics
from regard.kernels.autocast import autocast_like_linear
from regard.layout import TokenLayout

LOG2 = math.log(2)
DTYPES = {torch.bfloat16, torch.float16, torch.float32}
MAX_ROW_BYTES, ALIGNMENT = 512, 16  # of a token of one head: larger tiles do not fit; TMA needs 16-byte alignment
MIN_QUERIES = 16  # with fewer, most of each tile would be empty


def unsupported_reason(call: AttentionCall) -> str | None:
    if reason := cannot_run_triton(call.device):
        return f"triton {reason}"
    if call.dtypes[0] == torch.float32 and call.autocast is None:
        return "triton is less exact than PyTorch in float32, because exp2 on GPUs is approximate, and it is not faster"
    return unsupported_by_kernel(call)


def unsupported_by_kernel(call: AttentionCall) -> str | None:
    """The reason why the kernels do not support this call on any device, or None."""
    dtypes = set(call.dtypes) if call.autocast is None else {call.autocast}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        return f"triton needs q, k and v in one dtype, half precision or float32, not {', '.join(map(str, dtypes))}"
    dims, size = (call.q[-1], call.v[-1]), min(dtype.itemsize for dtype in dtypes)
    if max(dims) * size > MAX_ROW_BYTES or any(dim * size % ALIGNMENT for dim in dims):
        limits = f"up to {MAX_ROW_BYTES // size} in multiples of {ALIGNMENT // size}"
        return f"triton supports a head_dim of {limits}, not {dims}"
    if mask_limits(call.mask) is None:
        return f"triton does not support the mask {type(call.mask).__name__}"
    if call.visible:
        return "triton does not support keys that only some queries attend to"
    if call.learned_slopes:
        return "triton has no gradient for slopes"
    if call.bias not in (None, Slopes, Buckets):
        return f"triton does not support the bias {call.bias.__name__}"
    if call.scale <= 0:
        return f"triton needs a positive scale, not {call.scale}"
    return "triton has no dropout" if call.dropout else None


def slower_reason(call: AttentionCall) -> str | None:
    if call.q[2] < MIN_QUERIES:
        return f"triton would leave most of its tiles empty: only {call.q[2]} queries per row"
    without_options = call.bias is None and call.softcap is None and not call.sinks
    if without_options and call.ordered and type(call.mask) in (Causal, Full):
        return "PyTorch's kernels are faster than triton's for whole sequences without further options"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    from regard.kernels.attention.triton.autograd import flash

    q, k, v = contiguous_heads(q, k, v)
    return flash(q, k, v, options.sinks, *kernel_arguments(layout, options))[0]


@torch.no_grad()
def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions, first_tokens: int = 1
) -> tuple[Tensor, Statistics]:
    """`attend_with_statistics` of kernels/attention/statistics.py, computed in the tiles of the forward.

    Keys whose scores differ by a factor of less than 1 + 10⁻⁵ count as equal in the choice of the top key.
    """
    from regard.kernels.attention.triton.launch import LaunchConfig, run_forward

    q, k, v = contiguous_heads(q, k, v)
    bias, token_arrays, *scalars = kernel_arguments(layout, options)
    out, log_sum, stats, top_key = run_forward(
        q, k, v, options.sinks, bias, token_arrays, LaunchConfig(*scalars), first_tokens
    )
    return out, Statistics(stats[0], stats[1], top_key.long(), stats[2], log_sum * LOG2)


def contiguous_heads(*tensors: Tensor) -> list[Tensor]:
    """The tensors with contiguous last dimension, cast like the inputs of a matrix product under autocast."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in autocast_like_linear(*tensors)]


def kernel_arguments(layout: TokenLayout, options: ScoreOptions) -> tuple:
    """The arguments of the operator `flash` that follow the sinks."""
    bias, kind, max_distance = None, "none", 0
    if isinstance(options.bias, Slopes):
        bias, kind = options.bias.slopes.float().contiguous(), "slopes"
    if isinstance(options.bias, Buckets):
        bias, kind = options.bias.by_offset(torch.float32).T.contiguous(), "offsets"
        max_distance = options.bias.max_distance
    limits = mask_limits(options.mask)
    assert limits is not None, "unsupported_reason excludes masks without limits"
    token_arrays = [] if layout.ordered else layout.derived(compute_token_arrays, limits)
    return bias, token_arrays, options.scale, options.softcap or 0.0, *limits, kind, max_distance


def compute_token_arrays(layout: TokenLayout, limits: tuple[int, int, int]) -> list[Tensor]:
    """Positions and documents of queries and keys, (B, L) and (B, S), and the bounds of their tiles (bounds.py)."""
    from regard.kernels.attention.triton.bounds import NO_DOCUMENT, bounds
    from regard.kernels.attention.triton.launch import BOUNDS_TILE

    q_positions, k_positions = layout.positions.int().contiguous(), layout.key_positions.int().contiguous()
    q_document, k_document = torch.zeros_like(q_positions), torch.zeros_like(k_positions)
    if layout.segments is not None and layout.key_segments is not None:
        q_document, k_document = layout.segments.int().contiguous(), layout.key_segments.int().contiguous()
    if layout.key_valid is not None:
        k_document = k_document.where(layout.key_valid, NO_DOCUMENT)
    tokens = q_positions, k_positions, q_document, k_document
    return [*tokens, *bounds(*tokens, limits, BOUNDS_TILE, layout.consecutive)]
