"""Scaled dot-product attention by several backends of one signature.

    attend(q, k, v, at, scores) -> (B, H, L, Ev)

q is (B, H, L, E), k is (B, K, S, E) and v (B, K, S, Ev) with K dividing H. `reference` is plain tensor algebra and the
oracle of the others. A backend says which cases it does not take (`refuses`), and which another does better (`slower`);
`auto` takes the first of the table that has nothing to say, and `why` tells which and for what reason. Keys and values
may come in pages (pages.py).
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from regard.kernels.attention import block_sparse, decode, reference, sdpa, tiled, triton
from regard.kernels.attention.pages import Pages, gathered
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.dispatch import first, named
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


def why(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, scores: ScoreOptions) -> tuple[str, str]:
    """The backend that `auto` takes for this case, and why those before it were passed over."""
    return first(BACKENDS, q, k, v, layout, scores, against=objection)


def objection(module: ModuleType, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return module.refuses(q, k, v, layout, scores) or module.slower(q, k, v, layout, scores)


def auto(q: Tensor, k: Keys, v: Keys, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    return attend_by(why(q, k, v, layout, scores)[0], q, k, v, layout, scores)


def attend_by(name: str, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    if name != "decode":  # which alone reads pages where they lie
        k, v = gathered(k), gathered(v)
    return BACKENDS[name].attend(q, k, v, layout, scores)


def backend(name: str) -> Attend:
    """The attend function of that name, which raises ValueError for a case that it does not take."""
    return auto if name == "auto" else named("attention", name, BACKENDS, attend_by)
