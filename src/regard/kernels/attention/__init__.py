"""Scaled dot-product attention by several backends of one signature.

    attend(q, k, v, at, mask, bias, scale) -> (B, H, L, E)

q is (B, H, L, E), k and v are (B, K, S, E) with K dividing H. `reference` is plain tensor algebra and the oracle of the
others; `auto` is `sdpa`, which takes every case.
"""

from collections.abc import Callable

from torch import Tensor

from regard.kernels.attention import reference, sdpa
from regard.spec import nearest

Attend = Callable[..., Tensor]
BACKENDS = {"sdpa": sdpa, "reference": reference}


def backend(name: str) -> Attend:
    """The attend function of that name; `auto` is the fastest that takes every case."""
    if name == "auto":
        return sdpa.attend
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; {nearest(name, ['auto', *BACKENDS])}")
    return BACKENDS[name].attend
