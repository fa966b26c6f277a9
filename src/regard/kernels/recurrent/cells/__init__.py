"""Recurrent cells h_t = f(x_t, h_{t-1}): RNN, LSTM and GRU, each as one step and through torch's fused operation.

In a step, x (B, gates · N) is W_x x_t + b, and `recur` returns W_h h. A fused form takes x (B, L, D), or (T, D) packed
by step (documents.py) with the number of documents per step in `batch_sizes`, as in PackedSequence. `unroll` applies a
step token by token. It resets the state at document borders and skips invalid tokens, and it is the reference for the
fused forms.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CellStates = tuple[Tensor, ...]  # each (B, N); the first is the output of the cell
CellStep = Callable[..., CellStates]  # (x_t (B, …), *states) -> states
Recur = Callable[[Tensor], Tensor]

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
FUSED_RNN = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}


def rnn_step(x: Tensor, h: Tensor, recur: Recur, activation: str = "tanh") -> CellStates:
    """h_t = tanh(W_x x_t + W_h h_{t-1} + b). Elman 1990.

    The gradient from step T to step t is a product of factors diag(1 - h²) W_h, so it shrinks or grows exponentially.
    """
    return (ACTIVATIONS[activation](x + recur(h)),)


def fused_rnn(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, bias: Tensor | None, batch_sizes: Tensor | None = None,
    activation: str = "tanh",
) -> tuple[Tensor, CellStates]:  # fmt: skip
    weights = [w_x, w_h, *bias_pair(bias)]
    settings = (past[0].unsqueeze(0), weights, bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    run = FUSED_RNN[activation]
    outputs, h = run(x, *settings, True) if batch_sizes is None else run(x, batch_sizes, *settings)
    return outputs, (h[0],)


def lstm_step(x: Tensor, h: Tensor, c: Tensor, recur: Recur) -> CellStates:
    """Long short-term memory; x and W_h h hold i, f, g and o.

        i, f, o = σ(W [x_t, h_{t-1}] + b)      g = tanh(W_g [x_t, h_{t-1}] + b_g)
        c_t = f ⊙ c_{t-1} + i ⊙ g              h_t = o ⊙ tanh(c_t)

    Hochreiter & Schmidhuber 1997; forget gate by Gers et al. 2000. Along the cell ∂c_T/∂c_t = Π f, without a matrix.
    """
    i, f, g, o = (x + recur(h)).chunk(4, -1)  # (B, N)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def fused_lstm(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, bias: Tensor | None, batch_sizes: Tensor | None = None
) -> tuple[Tensor, CellStates]:
    h, c = (state.unsqueeze(0) for state in past)
    weights = [w_x, w_h, *bias_pair(bias)]
    settings = ([h, c], weights, bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    outputs, h, c = torch.lstm(x, *settings, True) if batch_sizes is None else torch.lstm(x, batch_sizes, *settings)
    return outputs, (h[0], c[0])


def bias_pair(bias: Tensor | None) -> list[Tensor]:
    """The two biases of torch's cells: this one, and zeros for the product with h."""
    return [] if bias is None else [bias, torch.zeros_like(bias)]


def gru_step(x: Tensor, h: Tensor, recur: Recur, recur_n: Recur, reset: str) -> CellStates:
    """The gated recurrent unit; x holds r, z and n; `recur` returns W_h h of the two gates, `recur_n` that of n.

    r, z = σ(W [x_t, h_{t-1}] + b)         h_t = (1 - z) ⊙ h_{t-1} + z ⊙ n
    reset "before":  n = tanh(W_x x_t + b + W_h (r ⊙ h_{t-1}))            Cho et al. 2014, Chung et al. 2014
    reset "after":   n = tanh(W_x x_t + b + r ⊙ (W_h h_{t-1} + b_h))      cuDNN, torch.nn.GRU
    """
    x_gates, x_n = x.tensor_split([2 * h.shape[-1]], -1)  # (B, 2N), (B, N)
    r, z = (x_gates + recur(h)).sigmoid().chunk(2, -1)  # (B, N)
    n = torch.tanh(x_n + (recur_n(r * h) if reset == "before" else r * recur_n(h)))
    return (torch.lerp(h, n.to(h.dtype), z.to(h.dtype)),)


def fused_gru(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, w_n: Tensor, bias: Tensor | None, bias_n: Tensor | None,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, CellStates]:  # fmt: skip
    """For reset="after"; w_h has the rows of the two gates, w_n and bias_n are those of n.

    z of torch.nn.GRU is 1 - z here, so its weights of z change their sign: σ(-a) = 1 - σ(a).
    """
    h = past[0]
    width = h.shape[1]
    signs = torch.ones_like(w_x[:, :1])
    signs[width : 2 * width] = -1
    weights = [w_x * signs, torch.cat([w_h, w_n]) * signs]
    if bias is not None:
        assert bias_n is not None, "a cell has both biases or none"
        weights += [bias * signs[:, 0], torch.cat([bias_n.new_zeros(2 * width), bias_n])]
    settings = (h.unsqueeze(0), weights, bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    outputs, h = torch.gru(x, *settings, True) if batch_sizes is None else torch.gru(x, batch_sizes, *settings)
    return outputs, (h[0],)


def unroll(
    step: CellStep, x: Tensor, past: CellStates, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, CellStates]:
    """x (B, L, …) -> the output at every token (B, L, N), and the states after the last.

    h_t = step(x_t, h_{t-1}), with h = 0 where a document starts; invalid tokens leave the state unchanged.
    """
    resets = None if segments is None else document_starts(segments, valid)  # (B, L)
    outputs = []
    for t in range(x.shape[1]):
        if resets is not None:
            past = tuple(state.masked_fill(resets[:, t, None], 0) for state in past)
        new = step(x[:, t], *past)
        past = new if valid is None else tuple(n.where(valid[:, t, None], p) for n, p in zip(new, past, strict=True))
        outputs.append(past[0])
    return torch.stack(outputs, 1), past


def document_starts(segments: Tensor, valid: Tensor | None) -> Tensor:
    """(B, L) True at the first valid token of a document, except for the first document, which continues the state."""
    if valid is None:
        valid = torch.ones_like(segments, dtype=torch.bool)
    indices = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    latest = indices.where(valid, -1).cummax(1).values  # the last valid token so far
    previous = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], 1)
    return valid & (previous >= 0) & (segments != segments.gather(1, previous.clamp_min(0)))
