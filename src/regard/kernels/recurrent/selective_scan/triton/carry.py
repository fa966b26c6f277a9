"""State passing: the states at the borders of chunks, from the contribution of each chunk.

    S_{c+1} = exp(rate · elapsed_c) S_c + contribution_c            c = 0 … chunks - 1, or from the last to the first

This is the only serial step of the selective scan, over L / chunk elements. `rate` is one number per state. `elapsed`
is shared: state m uses entry m mod entries. Dao & Gu 2024, state passing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS_AT_ONCE, BLOCK = 8, 128  # chunks loaded together; states per program, of one warp


def carry(contributions: Tensor, elapsed: Tensor, rate: Tensor, initial: Tensor, reverse: bool = False) -> Tensor:
    """contributions (R, chunks, M), elapsed (R, chunks, entries), rate (M,), initial (R, M) -> (R, chunks + 1, M)."""
    rows, chunks, states = contributions.shape
    borders = torch.empty(rows, chunks + 1, states, dtype=torch.float32, device=contributions.device)
    grid, entries = (rows, triton.cdiv(states, BLOCK)), elapsed.shape[2]
    carry_kernel[grid](
        contributions, elapsed, rate, initial, borders, chunks, states, entries,
        reverse, CHUNKS_AT_ONCE, BLOCK, num_warps=1,
    )  # fmt: skip
    return borders


@triton.jit
def carry_kernel(
    Contributions, Elapsed, Rate, Initial, Borders, chunks, states, entries,
    REVERSE: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CHUNKS_AT_ONCE)
    inside = m < states
    state = tl.load(Initial + row * states + m, inside, 0.0)
    rate = tl.load(Rate + m, inside, 0.0)
    tl.store(Borders + (row * (chunks + 1) + (chunks if REVERSE else 0)) * states + m, state, inside)
    for start in range(0, chunks, CHUNKS_AT_ONCE):
        chunk = chunks - 1 - start - c if REVERSE else start + c
        valid = ((start + c) < chunks)[:, None] & inside[None, :]
        elapsed = tl.load(Elapsed + (row * chunks + chunk)[:, None] * entries + (m % entries)[None, :], valid, 0.0)
        contributions = tl.load(Contributions + (row * chunks + chunk)[:, None] * states + m[None, :], valid, 0.0)
        decay = tl.exp(elapsed * rate)
        for i in tl.static_range(CHUNKS_AT_ONCE):
            state = tl.sum(tl.where((c == i)[:, None], decay * state[None, :] + contributions, 0.0), 0)
            # After the last chunk the state is unchanged: the last border is written again.
            border = max(chunks - 1 - start - i, 0) if REVERSE else min(start + i + 1, chunks)
            tl.store(Borders + (row * (chunks + 1) + border) * states + m, state, inside)
