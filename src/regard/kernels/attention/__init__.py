"""Scaled dot-product attention by several backends of one signature.

    attend(q, k, v, layout, options) -> (B, H, L, Ev)

q is (B, H, L, E), k is (B, K, S, E) and v (B, K, S, Ev) with K dividing H; keys and values may be in pages (pages.py).
`reference` is plain tensor algebra, and every other backend is tested against it. `refuses` returns the reason why a
backend does not support the arguments, `slower` the reason why another one is faster. `auto` runs the first backend of
the table for which both return None; `why` returns its name and the reasons against the earlier ones.
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from regard.kernels.attention import block_sparse, decode, reference, sdpa, tiled, triton
from regard.kernels.attention.pages import Pages, gather_pages
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.dispatch import checked_backend, first_suitable
from regard.layout import TokenLayout

Keys = Tensor | Pages
Attend = Callable[[Tensor, Keys, Keys, TokenLayout, ScoreOptions], Tensor]
BACKENDS: dict[str, ModuleType] = {
    "decode": decode,
    "triton": triton,
    "block_sparse": block_sparse,
    "sdpa": sdpa,
    "tiled": tiled,
    "reference": reference,
}


def why(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> tuple[str, str]:
    """The backend that `auto` runs, and the reasons against the backends before it."""
    return first_suitable(BACKENDS, q, k, v, layout, options, objection=objection)


def objection(
    module: ModuleType, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions
) -> str | None:
    return module.refuses(q, k, v, layout, options) or module.slower(q, k, v, layout, options)


def auto(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    return attend_with(why(q, k, v, layout, options)[0], q, k, v, layout, options)


def attend_with(name: str, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    if name != "decode":  # the only backend that reads pages in place
        k, v = gather_pages(k), gather_pages(v)
    return BACKENDS[name].attend(q, k, v, layout, options)


def backend(name: str) -> Attend:
    """The attend function of this name; it raises ValueError for arguments that the backend does not support."""
    return auto if name == "auto" else checked_backend("attention", name, BACKENDS, attend_with)
