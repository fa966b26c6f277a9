"""The loss of the head, chunked and unchunked, and rotary positions on a GPU: `python -m benchmarks.gpu.fused`.

Loss: width 4096, vocabulary 128256, bf16; forward with backward, and the peak of memory beyond the inputs. Rotation: 32
heads of 128, 65536 tokens, because with fewer the launch overhead dominates. Both are compared with torch.compile of
the plain code.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from regard.kernels import linear_cross_entropy as loss_module
from regard.parts.position.rope import rotate_pairs

TOKENS, WIDTH, VOCAB = 8192, 4096, 128256


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def median_ms(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=50, rep=300, return_mode="median")


def whole_loss(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight)
    correct = ((z.detach().argmax(-1) == targets) * weights).sum()
    return (F.cross_entropy(z.float(), targets, reduction="none") * weights).sum(), correct


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_pairs(x.transpose(1, 2), cos, sin, "half").contiguous()  # the layout that attention's kernels need


def time_rotation(rows: int = 32, length: int = 2048) -> None:
    x = randn(rows, length, 32, 128)
    angles = 6 * torch.rand(rows, 1, length, 64, device="cuda")
    cos_sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    weights = torch.randn(rows, 32, length, 128, device="cuda", dtype=torch.bfloat16)
    for method, run in {"torch.compile": torch.compile(rope, dynamic=False), "triton": rope}.items():

        def forward_backward(run=run) -> None:
            torch.autograd.grad(run(x, *cos_sin), x, weights)

        with torch.no_grad():
            forward = median_ms(functools.partial(run, x, *cos_sin))
        print(
            f"rotation, {method:13} {forward * 1e3:8.1f} us, with backward {median_ms(forward_backward) * 1e3:8.1f} us",
            flush=True,
        )


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += a @ b


def time_products() -> None:
    """Print the ms of accumulating a table's gradient in float32 from bf16 factors of 2048 tokens."""
    total = torch.zeros(VOCAB, WIDTH, device="cuda")
    a, b = torch.randn(2048, VOCAB, device="cuda").bfloat16(), torch.randn(2048, WIDTH, device="cuda").bfloat16()
    for name, run in {"plain": add_matmul, "addmm": loss_module.add_product}.items():
        print(f"total += a @ b, {name}: {median_ms(lambda run=run: run(total, a.T, b)):.2f} ms")


def time_losses(count: int, sizes: tuple[int, ...]) -> None:
    """Print time, memory and errors of chunks of these sizes, compared with the plain loss."""
    x = (torch.randn(count, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5).requires_grad_()
    weight = randn(VOCAB, WIDTH)
    targets = torch.randint(VOCAB, (count,), device="cuda")
    weights = torch.ones(count, device="cuda")
    in_triton, compiled_rows = loss_module.chunk_loss, torch.compile(loss_module.loss_of_logits, dynamic=False)

    def chunked(loss_of_logits: Callable, chunk_size: int) -> tuple[Tensor, Tensor]:
        loss_module.chunk_loss = loss_of_logits
        return loss_module.linear_cross_entropy(x, weight, targets, weights, chunk_size=chunk_size)

    candidates = {
        "plain, eager": lambda: whole_loss(x, weight, targets, weights),
        "plain, torch.compile": functools.partial(
            torch.compile(whole_loss, dynamic=False), x, weight, targets, weights
        ),
    }
    for tokens in sizes:
        candidates[f"chunks of {tokens}, eager"] = functools.partial(chunked, loss_module.loss_of_logits, tokens)
        candidates[f"chunks of {tokens}, rows compiled"] = functools.partial(chunked, compiled_rows, tokens)
        candidates[f"chunks of {tokens}, rows in triton"] = functools.partial(chunked, in_triton, tokens)
    reference = None
    print(f"loss of {count} tokens: forward + backward, peak beyond the inputs, |Δ loss| / loss, ‖Δ dx‖ / ‖dx‖")
    for name, run in candidates.items():
        loss, _ = run()
        gradients = torch.autograd.grad(loss, (x, weight))
        dx, loss = gradients[0].float(), loss.item()
        reference = reference or (loss, dx)
        errors = abs(loss - reference[0]) / reference[0], ((dx - reference[1]).norm() / reference[1].norm()).item()
        del gradients, dx
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

        def forward_backward(run=run) -> None:
            torch.autograd.grad(run()[0], (x, weight))

        forward_backward()
        peak = torch.cuda.max_memory_allocated() - before
        line = f"{median_ms(forward_backward):9.2f} ms {peak / 2**30:8.2f} GiB {errors[0]:10.1e} {errors[1]:10.1e}"
        print(f"  {name:32} {line}", flush=True)
    loss_module.chunk_loss = in_triton


def main() -> None:
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    time_rotation()
    time_products()
    time_losses(TOKENS, (2048, 4096))
    time_losses(4 * TOKENS, (4096, 8192))


if __name__ == "__main__":
    main()
