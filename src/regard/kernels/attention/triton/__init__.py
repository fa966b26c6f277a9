"""Flash attention for GPUs, in Triton: what PyTorch's own kernels cannot do, or only with a matrix of all pairs.

Windows, sinks, packed and padded rows, ALiBi, T5's bias, caps and grouped heads are computed in the tiles: no mask and
no bias is ever whole, and tiles of which no pair is seen are not computed. Whole causal or full texts without any of it
are left to cuDNN, whose kernels are written for one chip at a time and faster.
"""

import math

import torch
from torch import Tensor

from regard.compat import cannot_triton
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.decode import bounds as reach
from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.attention.statistics import Statistics
from regard.kernels.autocast import autocast_like_linear
from regard.layout import TokenLayout

LOG2 = math.log(2)
DTYPES = {torch.bfloat16, torch.float16, torch.float32}
ROW, PITCH = 512, 16  # bytes of a head: more do not fit beside each other, and the copy engine counts in sixteens
FEW = 16  # queries: with fewer most of each tile would be empty


def refuses(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    if reason := cannot_triton(q.device):
        return f"triton {reason}"
    if q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type):
        return "triton is less exact than PyTorch in float32, because a GPU's own powers of two are, and no faster"
    return cannot(q, k, v, layout, scores)


def cannot(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    """Why the kernels cannot do this case, on whatever device."""
    cast = torch.is_autocast_enabled(q.device.type)
    dtypes = {torch.get_autocast_dtype(q.device.type)} if cast else {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        return f"triton computes in one dtype, half precision or float32, not {', '.join(map(str, dtypes))}"
    dims, size = (q.shape[-1], v.shape[-1]), min(dtype.itemsize for dtype in dtypes)
    if max(dims) * size > ROW or any(dim * size % PITCH for dim in dims):
        return f"triton takes heads of up to {ROW // size} coordinates, in multiples of {PITCH // size}, not {dims}"
    if reach(scores.mask) is None:
        return f"triton does not know the mask {type(scores.mask).__name__}"
    if isinstance(scores.bias, Slopes) and scores.bias.slopes.requires_grad:
        return "triton has no gradient for slopes"
    if not isinstance(scores.bias, Slopes | Buckets | None):
        return f"triton does not know the bias {type(scores.bias).__name__}"
    if scores.scale <= 0:
        return "triton needs a positive scale"
    return "triton cannot drop weights" if scores.dropout else None


def slower(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    if q.shape[2] < FEW:
        return f"triton would leave its tiles empty: {q.shape[2]} queries a row are few"
    plain = scores.bias is None and scores.softcap is None and scores.sinks is None
    if plain and layout.ordered and type(scores.mask) in (Causal, Full):
        return "PyTorch's own kernels are faster than triton's for whole texts with nothing added"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    from regard.kernels.attention.triton.autograd import flash

    q, k, v = with_whole_rows(q, k, v)
    return flash(q, k, v, scores.sinks, *given(layout, scores))[0]


@torch.no_grad()
def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions, first: int = 1
) -> tuple[Tensor, Statistics]:
    """As kernels/attention/statistics.py has it, out of the tiles of this forward.

    Of keys whose scores differ by less than 10⁻⁵ of them either may be the top key.
    """
    from regard.kernels.attention.triton.launch import LaunchConfig, run_forward

    q, k, v = with_whole_rows(q, k, v)
    bias, where, *numbers = given(layout, scores)
    out, log_sum, found, top = run_forward(q, k, v, scores.sinks, bias, where, LaunchConfig(*numbers), first)
    return out, Statistics(found[0], found[1], top.long(), found[2], log_sum * LOG2)


def with_whole_rows(*tensors: Tensor) -> list[Tensor]:
    """Each head's coordinates side by side, in the dtype of autocast where it is on."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in autocast_like_linear(*tensors)]


def given(layout: TokenLayout, scores: ScoreOptions) -> tuple:
    """Mask, bias and places as the operator takes them."""
    bias, kind, far = None, "none", 0
    if isinstance(scores.bias, Slopes):
        bias, kind = scores.bias.slopes.float().contiguous(), "slopes"
    if isinstance(scores.bias, Buckets):
        bias, kind, far = scores.bias.line(torch.float32).T.contiguous(), "line", scores.bias.reach
    numbers = reach(scores.mask)
    assert numbers is not None, "refused"
    where = [] if layout.ordered else layout.derived(placed, numbers)
    return bias, where, scores.scale, scores.softcap or 0.0, *numbers, kind, far


def placed(layout: TokenLayout, numbers: tuple[int, int, int]) -> list[Tensor]:
    """Position and document of queries and keys, (B, L) and (B, S), and the bounds of what their tiles see."""
    from regard.kernels.attention.triton.bounds import NOWHERE, bounds
    from regard.kernels.attention.triton.launch import GRAIN

    q_at, k_at = layout.positions.int().contiguous(), layout.key_positions.int().contiguous()
    q_document, k_document = torch.zeros_like(q_at), torch.zeros_like(k_at)
    if layout.segments is not None and layout.key_segments is not None:
        q_document, k_document = layout.segments.int().contiguous(), layout.key_segments.int().contiguous()
    if layout.key_valid is not None:
        k_document = k_document.where(layout.key_valid, NOWHERE)
    places = q_at, k_at, q_document, k_document
    return [*places, *bounds(*places, numbers, GRAIN, layout.consecutive)]
