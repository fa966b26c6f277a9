"""The low-rank products of many adapters at once: each row of a batch has its own adapter, or none.

    y_n += s_i B_i A_i x_n          i = index[n];  -1: no adapter, y_n is not changed

A (G, r, in), B (G, out, r) and s (G,) hold one adapter per entry. Adapters of a smaller rank than r are filled with
zeros. Chen et al. 2023 (Punica), Sheng et al. 2023 (S-LoRA). A batch has few adapters: on a CPU, the rows of each are
multiplied together; on a GPU, kernels without a decision of the host (triton_many_lora.py) can be part of a CUDA graph.
"""

import torch
from torch import Tensor

from regard.compat import HAS_TRITON

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_TOKENS = 4  # per adapter: then copying its matrices for every row takes less time than one product per adapter


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """Add the products to y (…, out) in place. x (…, in) with the tokens of row n at n · T / N … (n + 1) · T / N."""
    rows = len(index)
    y_rows, x_rows = y.view(rows, -1, y.shape[-1]), x.reshape(rows, -1, x.shape[-1])  # (N, L, out), (N, L, in)
    if x.is_cuda and HAS_TRITON and x.dtype in TRITON_DTYPES:
        from regard.kernels.triton_many_lora import add_lora_triton, launch

        run = add_lora_triton if torch.compiler.is_compiling() else launch
    elif x.is_cuda:
        run = gathered
    else:
        run = add_lora_grouped if torch.compiler.is_compiling() else grouped
    run(y_rows, x_rows, a, b, scale, index)


def reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """One row at a time. y (N, L, out), x (N, L, in)"""
    for row, adapter in enumerate(index.tolist()):
        if adapter >= 0:
            y[row] += scale[adapter] * (x[row] @ a[adapter].T @ b[adapter].T)


def gathered(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """With a copy of the matrices per row, for dtypes that the kernels do not support."""
    y += torch.where(index[:, None, None] >= 0, products(x, a, b, scale, index.clamp(min=0).long()), 0)


def grouped(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """The rows of each adapter together, or each with a copy of its matrices if there are many adapters."""
    groups: dict[int, list[int]] = {}
    for row, adapter in enumerate(index.tolist()):
        if adapter >= 0:
            groups.setdefault(adapter, []).append(row)
    if len(groups) > 2 and x.shape[0] * x.shape[1] <= FEW_TOKENS * len(groups):
        rows = torch.tensor([row for group in groups.values() for row in group])
        y.index_add_(0, rows, products(x[rows], a, b, scale, index[rows].long()).to(y.dtype))  # the scale is in float32
        return
    for adapter, rows in groups.items():
        if len(rows) == len(index):
            y += scale[adapter] * (x @ a[adapter].T @ b[adapter].T)
        else:
            chosen = torch.tensor(rows)
            y.index_add_(0, chosen, scale[adapter] * (x[chosen] @ a[adapter].T @ b[adapter].T))


def products(x: Tensor, a: Tensor, b: Tensor, scale: Tensor, adapters: Tensor) -> Tensor:
    """s B A x of each row, x (N, L, in), with the matrices of its adapter (N,): (N, L, out)"""
    return scale[adapters, None, None] * (x @ a[adapters].mT @ b[adapters].mT)


@torch.library.custom_op("regard::add_lora_grouped", mutates_args=("y",))
def add_lora_grouped(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """`grouped` as an operator for compiled graphs: its groups depend on the index."""
    grouped(y, x, a, b, scale, index)


@add_lora_grouped.register_fake
def _(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    return None
