"""Scaled dot-product attention by several backends of one signature.

    attend(q, k, v, at, scores) -> (B, H, L, Ev)

q is (B, H, L, E), k is (B, K, S, E) and v (B, K, S, Ev) with K dividing H. `reference` is plain tensor algebra and the
oracle of the others. A backend says which cases it does not take (`refuses`), and which another does better (`slower`);
`auto` takes the first of the table that has nothing to say, and `why` tells which and for what reason.
"""

from collections.abc import Callable

from torch import Tensor

from regard.at import At
from regard.kernels.attention import folded, reference, sdpa, tiled
from regard.kernels.attention.scores import Scores
from regard.spec import nearest

Attend = Callable[[Tensor, Tensor, Tensor, At, Scores], Tensor]
BACKENDS = {"folded": folded, "sdpa": sdpa, "tiled": tiled, "reference": reference}


def why(q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores) -> tuple[str, str]:
    """The backend that `auto` takes for this case, and why those before it were passed over."""
    passed = []
    for name, module in BACKENDS.items():
        reason = module.refuses(q, k, v, at, scores) or module.slower(q, k, v, at, scores)
        if reason is None:
            return name, "; ".join(passed) or f"{name} is the fastest and takes this case"
        passed.append(reason)
    raise AssertionError("reference takes every case")


def auto(q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores) -> Tensor:
    return BACKENDS[why(q, k, v, at, scores)[0]].attend(q, k, v, at, scores)


def backend(name: str) -> Attend:
    """The attend function of that name, which raises ValueError for a case that it does not take."""
    if name == "auto":
        return auto
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; {nearest(name, ['auto', *BACKENDS])}")
    module = BACKENDS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores) -> Tensor:
        reason = module.refuses(q, k, v, at, scores)
        if reason is not None:
            raise ValueError(f"attention backend {name!r}: {reason}; choose another, or auto")
        return module.attend(q, k, v, at, scores)

    attend.__name__ = name
    return attend
