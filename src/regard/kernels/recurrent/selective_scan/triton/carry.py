"""From span to span: what states are at every border, once it is known what each span of tokens adds to them.

    S_{c+1} = exp(rate · faded_c) S_c + added_c            c = 0 … spans - 1, or from the last to the first

The only serial step of Mamba's scan, over L / span elements of L. `rate` is one number a state; `faded` has fewer where
states share them: the m-th state's is the one m modulo their count. Dao & Gu 2024 call it state passing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE, BLOCK = 8, 128  # spans whose loads are under way together; states a program, of one warp


def carry(added: Tensor, faded: Tensor, rate: Tensor, first: Tensor, reverse: bool = False) -> Tensor:
    """added (R, spans, M), faded (R, spans, few), rate (M,), first (R, M) -> (R, spans + 1, M), all float32."""
    rows, spans, states = added.shape
    borders = torch.empty(rows, spans + 1, states, dtype=torch.float32, device=added.device)
    grid, few = (rows, triton.cdiv(states, BLOCK)), faded.shape[2]
    carry_kernel[grid](added, faded, rate, first, borders, spans, states, few, reverse, AT_ONCE, BLOCK, num_warps=1)
    return borders


@triton.jit
def carry_kernel(
    Added,
    Faded,
    Rate,
    First,
    Borders,
    spans,
    states,
    few,
    REVERSE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, AT_ONCE)
    inside = m < states
    state = tl.load(First + row * states + m, inside, 0.0)
    rate = tl.load(Rate + m, inside, 0.0)
    tl.store(Borders + (row * (spans + 1) + (spans if REVERSE else 0)) * states + m, state, inside)
    for begin in range(0, spans, AT_ONCE):
        span = spans - 1 - begin - c if REVERSE else begin + c
        some = ((begin + c) < spans)[:, None] & inside[None, :]
        faded = tl.load(Faded + (row * spans + span)[:, None] * few + (m % few)[None, :], some, 0.0)
        added = tl.load(Added + (row * spans + span)[:, None] * states + m[None, :], some, 0.0)
        keep = tl.exp(faded * rate)
        for i in tl.static_range(AT_ONCE):
            state = tl.sum(tl.where((c == i)[:, None], keep * state[None, :] + added, 0.0), 0)
            # Past the last span nothing fades or is added: the same numbers are written to the last border again.
            border = max(spans - 1 - begin - i, 0) if REVERSE else min(begin + i + 1, spans)
            tl.store(Borders + (row * (spans + 1) + border) * states + m, state, inside)
