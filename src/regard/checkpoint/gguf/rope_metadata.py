"""RoPE as llama.cpp keeps it: a base, a kind of scaling, or a divisor for every pair (`rope_freqs.weight`).

Llama 3's scaling has no keys there, only its divisors; they are read as LongRope's, the same at every length.
"""

from collections.abc import Mapping
from typing import Any

import torch

from regard.families import FamilyError
from regard.layout import TokenLayout
from regard.parts.position.base import rope_frequencies
from regard.parts.position.rope_scaling import Llama3

KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
DIVISORS = "rope_freqs.weight"


def settings(said: Mapping[str, Any], divisors: list[float] | None, context: int) -> dict[str, Any]:
    """`rope_parameters` as a family reads them, from the keys above and the divisors."""
    found: dict[str, Any] = {"rope_theta": said.get("rope.freq_base", 10000.0)}
    kind = said.get("rope.scaling.type", "none")
    if divisors is not None:
        if kind != "none":
            raise FamilyError(f"rope.scaling.type={kind!r:.80} together with {DIVISORS} has no part here")
        found |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0}
        return found | {"original_max_position_embeddings": context, "attention_factor": 1.0}
    if kind == "none":
        return found | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise FamilyError(f"rope.scaling.type={kind!r:.80} has no part here; read are none, linear and yarn")
    found |= {"rope_type": kind, "factor": said.get("rope.scaling.factor", 1.0)}
    length = said.get("rope.scaling.original_context_length")
    return found if kind == "linear" or length is None else found | {"original_max_position_embeddings": length}


def metadata(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `rope_parameters`."""
    written: dict[str, Any] = {"rope.freq_base": float(parameters["rope_theta"])}
    if parameters["rope_type"] in ("linear", "yarn"):
        written |= {"rope.scaling.type": parameters["rope_type"], "rope.scaling.factor": float(parameters["factor"])}
    if "original_max_position_embeddings" in parameters and parameters["rope_type"] == "yarn":
        written["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    return written


def divided(parameters: Mapping[str, Any], head_dim: int, context: int) -> dict[str, Any]:
    """The same rope, but Llama 3's scaling spelled out as divisors."""
    if parameters.get("rope_type") != "llama3":
        return dict(parameters)
    length, names = parameters["original_max_position_embeddings"], ("low_freq_factor", "high_freq_factor")
    scaling = Llama3(parameters["factor"], length, *(parameters[name] for name in names))
    base, layout = parameters["rope_theta"], TokenLayout.whole(1, 1)
    divisors = (rope_frequencies(base, head_dim, layout) / scaling.frequencies(base, head_dim, layout)).to(
        torch.float32
    )  # as stored
    return settings({"rope.freq_base": base}, divisors.tolist(), context)
