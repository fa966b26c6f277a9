"""Random inputs of the scans on a GPU, and the median time of a kernel: for scans, scan_errors and scan_tiles."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

TOKENS, DEVICE = 32768, "cuda"


def milliseconds(work: Callable[[], object]) -> float:
    return triton.testing.do_bench(work, warmup=30, rep=150, return_mode="median")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def heads_inputs(B: int, H: int, G: int, L: int, N: int, P: int) -> tuple[Tensor, ...]:
    """Queries, keys and values in the memory order of projections, (B, L, heads, dim)."""
    return tuple(draw(B, L, h, e).transpose(1, 2) / e**0.5 for h, e in ((G, N), (G, N), (H, P)))


def selective_inputs(B: int, L: int, F: int = 4096, N: int = 16) -> tuple[Tensor, ...]:
    """u, delta, A, B, C, D and the bias of a Mamba layer of width 2048."""
    A = -torch.arange(1, N + 1, device=DEVICE).float().expand(F, N).contiguous()
    D, bias = torch.ones(F, device=DEVICE), torch.full((F,), -4.0, device=DEVICE)
    return draw(B, L, F), draw(B, L, F), A, draw(B, L, N), draw(B, L, N), D, bias


def refuse_triton(device: torch.device) -> str:
    """Replaces `cannot_run_triton` where the implementation in torch is measured."""
    return "the implementation in torch is measured"
