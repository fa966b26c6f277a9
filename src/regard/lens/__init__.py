"""Inspecting a model: record and replace the output of any module, compute attention maps and recurrent states.

All of it uses ordinary hooks on the model that trains and serves; there is no second model.
"""

from regard.lens.hooks import patch, record
from regard.lens.maps import (
    attention_heads,
    attention_maps,
    attention_weights,
    entropy,
    named_attention_maps,
    row_entropy,
)
from regard.lens.recorded_attention import RecordedAttention

__all__ = [
    "RecordedAttention",
    "attention_heads",
    "attention_maps",
    "attention_weights",
    "entropy",
    "named_attention_maps",
    "patch",
    "record",
    "row_entropy",
]
