"""RoPE in the metadata of llama.cpp: a base, a scaling type, or one divisor per frequency (`rope_freqs.weight`).

The scaling of Llama 3 has no metadata keys, only its divisors. They are read as LongRope factors that are equal for
every length.
"""

from collections.abc import Mapping
from typing import Any

import torch

from regard.families import FamilyError
from regard.layout import TokenLayout
from regard.parts.position.base import rope_frequencies
from regard.parts.position.rope_scaling import Llama3

ROPE_KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
DIVISORS = "rope_freqs.weight"


def rope_parameters(metadata: Mapping[str, Any], divisors: list[float] | None, context: int) -> dict[str, Any]:
    """`rope_parameters` of a family's config, from the metadata keys above and the divisors."""
    parameters: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 10000.0)}
    scaling = metadata.get("rope.scaling.type", "none")
    if divisors is not None:
        if scaling != "none":
            raise FamilyError(f"rope.scaling.type={scaling!r:.80} with {DIVISORS} is not supported; remove one of them")
        parameters |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0}
        return parameters | {"original_max_position_embeddings": context, "attention_factor": 1.0}
    if scaling == "none":
        return parameters | {"rope_type": "default"}
    if scaling not in ("linear", "yarn"):
        raise FamilyError(f"rope.scaling.type={scaling!r:.80} is not supported; choose none, linear or yarn")
    parameters |= {"rope_type": scaling, "factor": metadata.get("rope.scaling.factor", 1.0)}
    length = metadata.get("rope.scaling.original_context_length")
    if scaling == "yarn" and length is not None:
        parameters["original_max_position_embeddings"] = length
    return parameters


def rope_metadata(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata keys of `rope_parameters`."""
    metadata: dict[str, Any] = {"rope.freq_base": float(parameters["rope_theta"])}
    if parameters["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": parameters["rope_type"], "rope.scaling.factor": float(parameters["factor"])}
    if "original_max_position_embeddings" in parameters and parameters["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    return metadata


def llama3_as_divisors(parameters: Mapping[str, Any], head_dim: int, context: int) -> dict[str, Any]:
    """The same `rope_parameters`, with the scaling of Llama 3 written as divisors."""
    if parameters.get("rope_type") != "llama3":
        return dict(parameters)
    names = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    scaling = Llama3(parameters["factor"], *(parameters[name] for name in names))
    base, layout = parameters["rope_theta"], TokenLayout.whole(1, 1)
    divisors = rope_frequencies(base, head_dim, layout) / scaling.frequencies(base, head_dim, layout)
    stored = divisors.to(torch.float32)  # the dtype in the file
    return rope_parameters({"rope.freq_base": base}, stored.tolist(), context)
