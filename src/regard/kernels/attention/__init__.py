"""Scaled dot-product attention by several backends of one signature.

    attend(q, k, v, layout, options) -> (B, H, L, Ev)

q is (B, H, L, E), k is (B, K, S, E) and v (B, K, S, Ev) with K dividing H; keys and values may be in pages
(arguments.py). `reference` is plain tensor algebra, and every other backend is tested against it. Two functions of a
backend take the description of a call: `unsupported_reason` returns the reason why the backend does not support the
call, and `slower_reason` the reason why another backend is faster. `auto` runs the first backend of the table for which
both return None, chosen once per description. `select_backend` returns its name and the reasons against the earlier
backends.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard.kernels.attention import block_sparse, decode, reference, sdpa, tiled, triton
from regard.kernels.attention.arguments import AttentionCall, Keys, ScoreOptions, describe, gather_pages
from regard.kernels.dispatch import checked_backend, first_suitable
from regard.layout import TokenLayout

Attend = Callable[[Tensor, Keys, Keys, TokenLayout, ScoreOptions], Tensor]
BACKENDS: dict[str, ModuleType] = {
    "decode": decode,
    "triton": triton,
    "block_sparse": block_sparse,
    "sdpa": sdpa,
    "tiled": tiled,
    "reference": reference,
}


def select_backend(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> tuple[str, str]:
    """The backend that `auto` runs, and the reasons against the backends before it."""
    return choose(describe(q, k, v, layout, options))


def choose(call: AttentionCall) -> tuple[str, str]:
    return first_suitable(BACKENDS, call, rejection=unsupported_or_slower)


choose_once = lru_cache(maxsize=4096)(choose)  # layers and decode steps mostly repeat a few calls


def unsupported_or_slower(module: ModuleType, call: AttentionCall) -> str | None:
    reason = unsupported_call(module, call)
    return module.slower_reason(call) if reason is None else reason  # torch.compile cannot test a formatted string


def unsupported(module: ModuleType, *arguments: Any) -> str | None:
    return unsupported_call(module, describe(*arguments))


def unsupported_call(module: ModuleType, call: AttentionCall) -> str | None:
    if call.selects and module is not reference:
        return f"{module.__name__.rpartition('.')[2]} does not return the scores by which a store chooses keys"
    return module.unsupported_reason(call)


def auto(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    call = describe(q, k, v, layout, options)
    # In a graph the choice is made while tracing, and symbolic sizes cannot be hashed.
    name, _ = choose(call) if torch.compiler.is_compiling() else choose_once(call)
    return attend_with(name, q, k, v, layout, options)


def attend_with(name: str, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    if name != "decode":  # the only backend that reads pages in place
        k, v = gather_pages(k), gather_pages(v)
    return BACKENDS[name].attend(q, k, v, layout, options)


def backend(name: str) -> Attend:
    """The attend function of this name; it raises ValueError for arguments that the backend does not support."""
    return auto if name == "auto" else checked_backend("attention", name, BACKENDS, attend_with, unsupported)
