"""State passing: the states at the borders of chunks, from the contribution of each chunk.

    S_{c+1} = exp(rate · elapsed_c) S_c + contribution_c            c = 0 … chunks - 1, or from the last to the first

The only serial step of the selective scan, over L / chunk elements. `rate` is one number per state; `elapsed` is shared
by states: state m uses entry m modulo their count. Dao & Gu 2024, state passing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS_AT_ONCE, BLOCK = 8, 128  # chunks loaded together; states per program, of one warp


def carry(contributions: Tensor, elapsed: Tensor, rate: Tensor, first: Tensor, reverse: bool = False) -> Tensor:
    """contributions (R, spans, M), elapsed (R, spans, entries), rate (M,), first (R, M) -> (R, spans + 1, M)."""
    rows, spans, states = contributions.shape
    borders = torch.empty(rows, spans + 1, states, dtype=torch.float32, device=contributions.device)
    grid, entries = (rows, triton.cdiv(states, BLOCK)), elapsed.shape[2]
    carry_kernel[grid](
        contributions, elapsed, rate, first, borders, spans, states, entries,
        reverse, CHUNKS_AT_ONCE, BLOCK, num_warps=1,
    )  # fmt: skip
    return borders


@triton.jit
def carry_kernel(
    Contributions, Elapsed, Rate, First, Borders, spans, states, entries,
    REVERSE: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CHUNKS_AT_ONCE)
    inside = m < states
    state = tl.load(First + row * states + m, inside, 0.0)
    rate = tl.load(Rate + m, inside, 0.0)
    tl.store(Borders + (row * (spans + 1) + (spans if REVERSE else 0)) * states + m, state, inside)
    for begin in range(0, spans, CHUNKS_AT_ONCE):
        span = spans - 1 - begin - c if REVERSE else begin + c
        valid = ((begin + c) < spans)[:, None] & inside[None, :]
        elapsed = tl.load(Elapsed + (row * spans + span)[:, None] * entries + (m % entries)[None, :], valid, 0.0)
        contributions = tl.load(Contributions + (row * spans + span)[:, None] * states + m[None, :], valid, 0.0)
        keep = tl.exp(elapsed * rate)
        for i in tl.static_range(CHUNKS_AT_ONCE):
            state = tl.sum(tl.where((c == i)[:, None], keep * state[None, :] + contributions, 0.0), 0)
            # After the last chunk the state is unchanged: the last border is written again.
            border = max(spans - 1 - begin - i, 0) if REVERSE else min(begin + i + 1, spans)
            tl.store(Borders + (row * (spans + 1) + border) * states + m, state, inside)
