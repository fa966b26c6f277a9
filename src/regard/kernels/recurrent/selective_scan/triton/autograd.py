"""The selective scan on GPUs, in Triton: chunks of tokens and blocks of channels in parallel, in O(L · F) memory.

Forward: the contribution of every chunk to the states (add), the states at the borders of chunks (carry.py), the
outputs (read). Backward: the gradients at the borders by the adjoint scan from the end (add and carry again), and all
gradients in one pass over the chunks (grad), which recomputes the states inside. Only the states at the borders are
saved, one number per channel and token if N = CHUNK. The kernels are in kernels.py. Gu & Dao 2023.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs
from regard.kernels.recurrent.selective_scan.triton.carry import carry
from regard.kernels.recurrent.selective_scan.triton.kernels import add_kernel, grad_kernel, read_kernel
from regard.layout import number_documents

CHUNK, BLOCK = 16, 32  # tokens and channels per program, which is one warp
SHIFT = 0  # `shift` of the kernels: passed at run time, so that Triton does not know it (kernels.py)


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    """The scan of selective_scan; y has the dtype of u."""
    u, delta, A, B, C, D, state, segments, valid, bias = inputs
    if valid is not None:
        delta = delta.masked_fill(~valid.unsqueeze(-1), 0.0 if bias is None else float("-inf"))
    documents = None if segments is None else number_documents(segments).int()
    A, B, C = A.float().mT, B.float().mT, C.float().mT  # (N, F), (B, N, L)
    D, bias = (None if x is None else x.float() for x in (D, bias))
    y, last, _ = selective_scan_op(u, delta, bias, A, B, C, D, state.mT, documents)
    return y, last.mT


@torch.library.custom_op("regard::selective_scan", mutates_args=())
def selective_scan_op(
    u: Tensor, delta: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y (B, L, F), the last state (B, N, F), and for the backward the states at the borders (B, chunks + 1, N · F)."""
    launch = SelectiveScanLaunch.of(u, A, documents)
    u, delta, A, B, C, state = (x.contiguous() for x in (u, delta, A, B, C, state))
    borders = launch.borders(u, delta, bias, A, B, state)
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    strides = (x.stride()[:2] for x in (u, delta, y))
    read_kernel[launch.grid](
        u, delta, bias, A, B, C, D, launch.documents, borders, y, *strides, SHIFT, *launch.sizes, num_warps=1
    )
    return y, borders[:, -1].view_as(state).clone(), borders


@selective_scan_op.register_fake
def _(u, delta, bias, A, B, C, D, state, documents):
    y, last = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, state))
    return y, last, u.new_empty(len(u), -(-u.shape[1] // CHUNK) + 1, A.numel(), dtype=torch.float32)


@torch.library.custom_op("regard::selective_scan_backward", mutates_args=())
def selective_scan_backward(
    u: Tensor, delta: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    documents: Tensor | None, borders: Tensor, dy: Tensor, d_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    launch = SelectiveScanLaunch.of(u, A, documents)
    u, delta, A, B, C, dy, d_last = (x.contiguous() for x in (u, delta, A, B, C, dy, d_last))
    d_borders = launch.borders(dy, delta, bias, A, C, d_last, reverse=True)
    du, d_delta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, delta))
    dA = torch.empty(launch.grid[0], *A.shape, dtype=torch.float32, device=u.device)
    shape = launch.grid[1], launch.batch, launch.state_dim, launch.length
    dB, dC = torch.empty(2, *shape, dtype=torch.float32, device=u.device)
    dD, d_bias = torch.empty(2, launch.grid[0], launch.channels, dtype=torch.float32, device=u.device)
    strides = (x.stride()[:2] for x in (u, delta, dy, du))
    grad_kernel[launch.grid](
        u, delta, bias, A, B, C, D, launch.documents, borders, dy, d_borders, du, d_delta, dA, dB, dC, dD, d_bias,
        *strides, SHIFT, *launch.sizes, max(16, launch.state_dim), num_warps=1, num_stages=1,
    )  # fmt: skip
    d_initial = d_borders[:, 0].view_as(d_last).clone()
    dD, d_bias = (dA.new_empty(0) if x is None else dx.sum(0) for x, dx in ((D, dD), (bias, d_bias)))
    return du, d_delta, d_bias, dA.sum(0), dB.sum(0), dC.sum(0), dD, d_initial


@selective_scan_backward.register_fake
def _(u, delta, bias, A, B, C, D, documents, borders, dy, d_last):
    empty = A.new_empty(0)
    like = (u, delta, empty if bias is None else bias, A, B, C, empty if D is None else D, d_last)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)


def save_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    *saved, state, documents = inputs
    ctx.save_for_backward(*saved, documents, output[2])
    ctx.set_materialize_grads(False)  # zero gradients for the borders would be as large as the borders


def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at each access
    u, _, bias, A, _, _, D, _, _ = saved
    dy = torch.zeros_like(u) if dy is None else dy.to(u.dtype)
    d_last = A.new_zeros(len(u), *A.shape) if d_last is None else d_last
    du, d_delta, d_bias, dA, dB, dC, dD, d_state = selective_scan_backward(*saved, dy, d_last)
    return du, d_delta, None if bias is None else d_bias, dA, dB, dC, None if D is None else dD, d_state, None


selective_scan_op.register_autograd(backward, setup_context=save_inputs)


class SelectiveScanLaunch(NamedTuple):
    """The documents and sizes that all passes of a scan share."""

    documents: Tensor | None
    batch: int
    length: int
    channels: int
    state_dim: int

    @classmethod
    def of(cls, u: Tensor, A: Tensor, documents: Tensor | None) -> "SelectiveScanLaunch":
        return cls(None if documents is None else documents.contiguous(), *u.shape, len(A))

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.length, CHUNK)

    @property
    def grid(self) -> tuple[int, int]:
        return self.batch * self.chunks, triton.cdiv(self.channels, BLOCK)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.length, self.chunks, self.channels, self.state_dim, CHUNK, BLOCK

    def borders(
        self,
        x: Tensor,
        delta: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        initial: Tensor,
        reverse: bool = False,
    ) -> Tensor:
        """(B, chunks + 1, N · F): the states at the borders of chunks; reverse: the gradients of these states."""
        contributions = torch.empty(self.batch, self.chunks, A.numel(), dtype=torch.float32, device=x.device)
        # ΣΔ of each chunk
        elapsed = torch.empty(self.batch, self.chunks, self.channels, dtype=torch.float32, device=x.device)
        strides = (tensor.stride()[:2] for tensor in (x, delta))
        add_kernel[self.grid](
            x, delta, bias, A, B, self.documents, contributions, elapsed,
            *strides, SHIFT, *self.sizes, reverse, num_warps=1,
        )  # fmt: skip
        return carry(contributions, elapsed, A.view(-1), initial.view(self.batch, -1), reverse)
