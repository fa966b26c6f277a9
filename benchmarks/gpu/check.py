"""Compare the Triton attention on a GPU with the reference in float64: all features, random shapes, gradients."""

import multiprocessing
import os
import random
import sys
from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from regard.kernels.attention import reference, triton
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full
from regard.kernels.attention.patterns.window import SinksAndWindow, Window
from regard.kernels.attention.statistics import attend_with_statistics
from regard.layout import Bias, TokenLayout

MASKS = [Causal(), Full(), Window(100), Window(40, causal=False), SinksAndWindow(5, 70)]
SHAPES = [(4, 4, 16, 16), (4, 2, 64, 64), (4, 1, 80, 48), (2, 2, 128, 128), (2, 2, 192, 128), (2, 1, 256, 256)]


def make_layout(kind: str, batch: int, length: int) -> TokenLayout:
    slots = torch.arange(length, device="cuda").expand(batch, length)
    cuts = torch.sort(torch.randint(1, length, (batch, 4), device="cuda")).values
    documents = torch.searchsorted(cuts, slots.contiguous(), right=True)
    starts = torch.cat([torch.zeros_like(cuts[:, :1]), cuts], 1).gather(1, documents)
    match kind:
        case "ordered":
            return TokenLayout.whole(batch, length, "cuda")
        case "packed":
            return TokenLayout(slots - starts, documents, valid=documents < 4, consecutive=True)
        case "left-padded":
            pad = torch.randint(1, length // 2, (batch, 1), device="cuda")
            return TokenLayout((slots - pad).clamp_min(0), valid=slots >= pad, consecutive=True)
        case _:
            return TokenLayout(slots[:, -(length // 3) :]).with_keys(slots, valid=slots % 17 != 5)


def make_bias(kind: str, heads: int) -> Bias | None:
    if kind == "slopes":
        return Slopes(2.0 ** -torch.arange(1.0, heads + 1, device="cuda"))
    if kind == "buckets":
        return Buckets(torch.randn(16, heads, device="cuda", requires_grad=True), 50, True)
    return None


def outputs(attend, tensors: list[Tensor], layout: TokenLayout, options: ScoreOptions, weights: Tensor) -> list[Tensor]:
    out = attend(*tensors, layout, options)
    learned = [*tensors, *([options.bias.table] if isinstance(options.bias, Buckets) else [])]
    learned += [] if options.sinks is None else [options.sinks]
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), learned)]


def eager(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    """Plain PyTorch: softmax in float32, the weights and their product with the values in the dtype of the inputs."""
    weights = reference.attention_weights(q, k, layout, options)
    return weights.to(q.dtype) @ reference.per_head(v, q)


def check(seed: int) -> tuple[float, str]:
    """(error, name) of a random case. The error is relative to the tolerance: twice plain PyTorch's plus one ulp."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mask, kind = rng.choice(MASKS), rng.choice(["ordered", "packed", "left-padded", "decode"])
    dtype = rng.choice([torch.bfloat16, torch.float16])
    heads, kv_heads, dim, value_dim = rng.choice(SHAPES)
    batch, length = 2, rng.choice([64, 128, 333, 512])
    bias, cap, sinks = rng.choice(["", "slopes", "buckets"]), rng.choice([None, 2.0]), rng.choice([False, True])
    layout = make_layout(kind, batch, length)
    q, k, v = (
        torch.randn(batch, h, n, d, device="cuda", dtype=dtype, requires_grad=True)
        for h, n, d in [
            (heads, layout.positions.shape[1], dim),
            (kv_heads, length, dim),
            (kv_heads, length, value_dim),
        ]
    )
    sink = torch.randn(heads, device="cuda", requires_grad=True) if sinks else None
    options = ScoreOptions(mask, dim**-0.5, make_bias(bias, heads), cap, sink)
    weights = torch.randn(*q.shape[:3], value_dim, device="cuda", dtype=dtype)
    valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
    valid = valid.unsqueeze(1)  # (B, 1, L): outputs of padding are undefined
    weights = weights * valid.unsqueeze(-1)
    name = " ".join(map(str, (mask, kind, heads, kv_heads, dim, value_dim, length, dtype, bias, cap, sinks)))
    reason = triton.unsupported_reason(describe(q, k, v, layout, options))
    assert reason is None, reason
    ours = outputs(triton.attend, [q, k, v], layout, options, weights)
    eager_outputs = outputs(eager, [q, k, v], replace(layout), options, weights)
    exact = outputs(
        reference.attend, [x.detach().double().requires_grad_() for x in (q, k, v)], layout, options, weights
    )
    worst = 0.0
    for f, p, e in zip(ours, eager_outputs, exact, strict=True):
        assert f.isfinite().all(), name
        if f is ours[0]:
            f, p, e = (x * valid.unsqueeze(-1) for x in (f, p, e))
        # Gradients of shared parameters sum the rounding errors of all queries.
        summed = 1 if f.dim() == 4 else batch * q.shape[2]
        ulp = summed**0.5 * torch.finfo(dtype).eps * e.abs().max().item()
        worst = max(worst, (f - e).abs().max().item() / (2 * (p - e).abs().max().item() + ulp + 1e-30))
    _, a = triton.attend_with_statistics(q, k, v, layout, options, first_tokens=2)
    _, b = attend_with_statistics(q.double(), k.double(), v.double(), layout, options, first_tokens=2)
    for field in ("entropy", "first_weight", "top_weight", "log_sum"):
        error = ((getattr(a, field) - getattr(b, field)) * valid).abs().max().item()
        assert error < 2e-3, (name, field, error)
    differ = ((a.top_key < 0) != (b.top_key < 0)) & valid  # queries without keys have no top key
    assert not differ.any(), name
    return worst, name


def report(seed: int) -> str:
    try:
        worst, name = check(seed)
    except (AssertionError, OutOfResources) as error:
        return f"FAILED {seed}: {error}"
    return f"{worst:.2f}  {name}"


def check_all(count: int) -> None:
    """Print each error relative to its tolerance. Most of the time is compilation, so cases run in parallel."""
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        for line in pool.imap_unordered(report, range(count)):
            print(line, flush=True)


if __name__ == "__main__":
    check_all(int(sys.argv[1]))
