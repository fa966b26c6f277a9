"""The loss of the head in chunks and whole, and rotary positions, on a GPU: `python -m benchmarks.gpu.fused`.

Loss: width 4096, vocabulary 128256, bf16; forward with backward, and the peak of memory beyond the inputs. Rotation: 32
heads of 128, 65536 tokens, as the launch overhead dominates with fewer. Both are compared with torch.compile of the
plain code.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from regard.kernels import linear_cross_entropy as plain
from regard.parts.position.rope import rotate_pairs

TOKENS, WIDTH, VOCAB = 8192, 4096, 128256


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def median(work: Callable[[], object]) -> float:
    return do_bench(work, warmup=50, rep=300, return_mode="median")


def whole_loss(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight)
    correct = ((z.detach().argmax(-1) == targets) * weights).sum()
    return (F.cross_entropy(z.float(), targets, reduction="none") * weights).sum(), correct


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_pairs(x.transpose(1, 2), cos, sin, "half").contiguous()  # the layout that attention's kernels need


def rotation(rows: int = 32, length: int = 2048) -> None:
    x = randn(rows, length, 32, 128)
    angles = 6 * torch.rand(rows, 1, length, 64, device="cuda")
    cos_sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    weights = torch.randn(rows, 32, length, 128, device="cuda", dtype=torch.bfloat16)
    for method, work in {"torch.compile": torch.compile(rope, dynamic=False), "triton": rope}.items():

        def both(work=work) -> None:
            torch.autograd.grad(work(x, *cos_sin), x, weights)

        with torch.no_grad():
            forward = median(functools.partial(work, x, *cos_sin))
        print(f"rotation, {method:13} {forward * 1e3:8.1f} us, with backward {median(both) * 1e3:8.1f} us", flush=True)


def add_plain(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += a @ b


def products() -> None:
    """Print the ms of accumulating a table's gradient in float32 from bf16 factors of 2048 tokens."""
    total = torch.zeros(VOCAB, WIDTH, device="cuda")
    a, b = torch.randn(2048, VOCAB, device="cuda").bfloat16(), torch.randn(2048, WIDTH, device="cuda").bfloat16()
    for name, work in {"plain": add_plain, "addmm": plain.add_product}.items():
        print(f"total += a @ b, {name}: {median(lambda work=work: work(total, a.T, b)):.2f} ms")


def losses(count: int, sizes: tuple[int, ...]) -> None:
    """Print time, memory and errors of chunks of these sizes, compared with the plain loss."""
    x = (torch.randn(count, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5).requires_grad_()
    weight = randn(VOCAB, WIDTH)
    targets = torch.randint(VOCAB, (count,), device="cuda")
    weights = torch.ones(count, device="cuda")
    in_triton, compiled_rows = plain.chunk_loss, torch.compile(plain.loss_of_logits, dynamic=False)

    def chunked(loss_of_logits: Callable, tokens: int) -> tuple[Tensor, Tensor]:
        plain.chunk_loss = loss_of_logits
        return plain.linear_cross_entropy(x, weight, targets, weights, tokens=tokens)

    works = {
        "plain, eager": lambda: whole_loss(x, weight, targets, weights),
        "plain, torch.compile": functools.partial(
            torch.compile(whole_loss, dynamic=False), x, weight, targets, weights
        ),
    }
    for tokens in sizes:
        works[f"chunks of {tokens}, eager"] = functools.partial(chunked, plain.loss_of_logits, tokens)
        works[f"chunks of {tokens}, rows compiled"] = functools.partial(chunked, compiled_rows, tokens)
        works[f"chunks of {tokens}, rows in triton"] = functools.partial(chunked, in_triton, tokens)
    exact = None
    print(f"loss of {count} tokens: forward + backward, peak beyond the inputs, |Δ loss| / loss, ‖Δ dx‖ / ‖dx‖")
    for name, work in works.items():
        loss, _ = work()
        found = torch.autograd.grad(loss, (x, weight))
        dx, loss = found[0].float(), loss.item()
        exact = exact or (loss, dx)
        errors = abs(loss - exact[0]) / exact[0], ((dx - exact[1]).norm() / exact[1].norm()).item()
        del found, dx
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

        def both(work=work) -> None:
            torch.autograd.grad(work()[0], (x, weight))

        both()
        peak = torch.cuda.max_memory_allocated() - before
        line = f"{median(both):9.2f} ms {peak / 2**30:8.2f} GiB {errors[0]:10.1e} {errors[1]:10.1e}"
        print(f"  {name:32} {line}", flush=True)
    plain.chunk_loss = in_triton


def main() -> None:
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rotation()
    products()
    losses(TOKENS, (2048, 4096))
    losses(4 * TOKENS, (4096, 8192))


if __name__ == "__main__":
    main()
