"""Inspecting a model: record and replace the output of any module, compute attention maps and recurrent states.

All of it uses ordinary hooks on the model that trains and serves; there is no second model.
"""

from regard.lens.detectors import HeadScores, score_heads
from regard.lens.hooks import names, patch, record, shapes
from regard.lens.input_attribution import IntegratedGradients, gradient_times_input, integrated_gradients
from regard.lens.maps import (
    attention_heads,
    attention_maps,
    attention_weights,
    entropy,
    named_attention_maps,
    row_entropy,
)
from regard.lens.probes import Probe, control_labels, fit_probe
from regard.lens.recorded_attention import RecordedAttention
from regard.lens.rollout import attention_rollout

__all__ = [
    "HeadScores",
    "IntegratedGradients",
    "Probe",
    "RecordedAttention",
    "attention_heads",
    "attention_maps",
    "attention_rollout",
    "attention_weights",
    "control_labels",
    "entropy",
    "fit_probe",
    "gradient_times_input",
    "integrated_gradients",
    "named_attention_maps",
    "names",
    "patch",
    "record",
    "row_entropy",
    "score_heads",
    "shapes",
]
