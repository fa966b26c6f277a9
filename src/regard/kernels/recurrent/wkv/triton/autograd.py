"""RWKV's recurrence on GPUs, in Triton: spans of tokens and blocks of channels in parallel.

Forward: the sums and the decay of each span (add), the sums at the borders of spans (carry), the outputs (read).
Backward: outputs and divisors are recomputed. The gradients of the sums are computed in the same way from the end (add,
carry), then all gradients of each span (grad). The kernels are in kernels.py; a sequence of one span needs no borders.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.recurrent.wkv import EMPTY, Sums, WKVInputs
from regard.kernels.recurrent.wkv.triton.kernels import add_kernel, carry_kernel, grad_kernel, read_kernel
from regard.layout import number_documents

T, BLOCK = 16, 32  # tokens and channels per tile, in the registers of one warp
SPAN = 256  # tokens per program


def wkv(inputs: WKVInputs) -> tuple[Tensor, Sums]:
    """`wkv` with sums in float32; out has the dtype of v."""
    k, v, log_decay, bonus, state, segments, valid = inputs
    documents = None if segments is None else number_documents(segments).int()
    updates = None if valid is None else valid.to(torch.int8)
    first = torch.stack(state, 1)  # (B, 3, F)
    out, last = wkv_op(k.to(v.dtype), v, log_decay.float(), bonus.float(), first, documents, updates)
    return out, Sums(*last.unbind(1))


@torch.library.custom_op("regard::wkv", mutates_args=())
def wkv_op(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, first: Tensor, documents: Tensor | None,
    updates: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, L, F), and the last value, weight and peak (B, 3, F)."""
    out, _, _, last = WKVLaunch(k, v, log_decay, bonus, first, documents, updates).forward(v.dtype)
    return out, last


@wkv_op.register_fake
def _(k, v, log_decay, bonus, first, documents, updates):
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(first)


@torch.library.custom_op("regard::wkv_backward", mutates_args=())
def wkv_backward(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, first: Tensor, documents: Tensor | None,
    updates: Tensor | None, d_out: Tensor, d_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return WKVLaunch(k, v, log_decay, bonus, first, documents, updates).backward(d_out.contiguous(), d_last)


@wkv_backward.register_fake
def _(k, v, log_decay, bonus, first, documents, updates, d_out, d_last):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, log_decay, bonus, first))


def save_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
    return *wkv_backward(*ctx.saved_tensors, d_out, d_last), None, None


wkv_op.register_autograd(backward, setup_context=save_inputs)


class WKVLaunch(NamedTuple):
    """The tensors that all passes share."""

    k: Tensor
    v: Tensor
    log_decay: Tensor
    bonus: Tensor
    first: Tensor  # (B, 3, F): the initial value, weight and peak
    documents: Tensor | None  # (B, L)
    updates: Tensor | None  # (B, L): whether a token updates the state

    def forward(
        self, dtype: torch.dtype, for_backward: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """out (B, L, F); for the backward its part from earlier tokens and the log divisor; the last state (B, 3, F)"""
        k, v, log_decay, bonus, first, documents, updates = self
        (batch, length, channels), device = v.shape, v.device
        k, v, spans = k.contiguous(), v.contiguous(), triton.cdiv(length + 1, SPAN)  # one more for the final state
        out, last = torch.empty(v.shape, dtype=dtype, device=device), torch.empty(batch, 3, channels, device=device)
        past, log_sum = (torch.empty(v.shape, device=device) if for_backward else None for _ in range(2))
        borders = self.border_sums((k, v, None), first, spans)
        read_kernel[batch * spans, triton.cdiv(channels, BLOCK)](
            k, v, log_decay, bonus, documents, updates, borders, out, past, log_sum, last,
            0, length, channels, spans, SPAN, T, BLOCK, num_warps=1,
        )  # fmt: skip
        return out, past, log_sum, last

    def backward(self, d_out: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of k, v, log_decay, bonus and the initial state."""
        k, v, log_decay, bonus, first, documents, updates = self
        # float32: gradients contain v - out, which cancels in bf16
        out, past, log_sum, last = self.forward(torch.float32, for_backward=True)
        (batch, length, channels), spans = v.shape, triton.cdiv(v.shape[1], SPAN)
        dk, dv = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(2))
        d_parameters = last.new_empty(batch * spans, 2, channels)  # of log_decay and bonus, per span
        d_first = torch.empty_like(last)
        borders = self.border_sums((d_out, out, log_sum), final_gradient(last, d_last), spans, reverse=True)
        grad_kernel[batch * spans, triton.cdiv(channels, BLOCK)](
            k.contiguous(), v.contiguous(), log_decay, bonus, documents, updates, out, past, log_sum,
            first.contiguous(), borders, d_out, dk, dv, d_parameters, d_first,
            0, length, channels, spans, SPAN, T, BLOCK, num_warps=1,
        )  # fmt: skip
        return dk, dv, d_parameters[:, 0].sum(0), d_parameters[:, 1].sum(0), d_first

    def border_sums(
        self, tokens: tuple[Tensor, Tensor, Tensor | None], first: Tensor, spans: int, reverse: bool = False
    ) -> Tensor:
        """(B, spans, 3, F): the initial sums of each span. `tokens` are k and v, or dout, out and l in reverse."""
        first, (batch, length, channels) = first.contiguous(), tokens[0].shape
        if spans == 1:
            return first
        added, blocks = first.new_empty(batch, spans, 4, channels), triton.cdiv(channels, BLOCK)
        borders = first.new_empty(batch, spans, 3, channels)
        add_kernel[batch * spans, blocks](
            *tokens, self.log_decay, self.documents, self.updates, added,
            0, length, channels, spans, SPAN, T, BLOCK, reverse, num_warps=1,
        )  # fmt: skip
        carry_kernel[batch, blocks](added, first, borders, channels, spans, BLOCK, reverse, num_warps=1)
        return borders


def final_gradient(last: Tensor, d_last: Tensor) -> Tensor:
    """(B, 3, F): ∂loss/∂state after the last token, as sums relative to a peak.

    The gradient of the last peak is not used: the sums are value · e^peak and weight · e^peak, whose gradients
    determine it.
    """
    nonempty = last[:, 2:] > EMPTY / 2
    return torch.cat([d_last[:, :2].where(nonempty, 0.0), (-last[:, 2:]).where(nonempty, EMPTY)], 1)
