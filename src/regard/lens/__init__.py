"""Inspecting a model: record and replace the output of any module, compute attention maps and recurrent states.

All of it uses ordinary hooks on the model that trains and serves; there is no second model.
"""

from regard.lens.ablation import ablate
from regard.lens.attention_layers import AttentionLayer, attention_layers
from regard.lens.circuits import CircuitTest, circuit_test
from regard.lens.detectors import HeadScores, score_heads
from regard.lens.hooks import names, patch, record, shapes
from regard.lens.input_attribution import IntegratedGradients, gradient_times_input, integrated_gradients
from regard.lens.inputs import logit_difference
from regard.lens.logit_attribution import Attribution, logit_attribution
from regard.lens.logit_lens import logit_lens
from regard.lens.maps import (
    attention_heads,
    attention_maps,
    entropy,
    named_attention_maps,
    relative_weights,
    row_entropy,
)
from regard.lens.patching import Patching, activation_patching
from regard.lens.path_patching import path_patching
from regard.lens.probes import Probe, control_labels, fit_probe
from regard.lens.recorded import StoredActivations
from regard.lens.recorded_attention import RecordedAttention
from regard.lens.recorded_generation import RecordedGeneration, record_generation
from regard.lens.residual_stream import (
    LargeActivation,
    RankCollapse,
    StreamSizes,
    massive_activations,
    rank_collapse,
)
from regard.lens.rollout import attention_rollout
from regard.lens.sparse_autoencoder import SparseAutoencoder
from regard.lens.steering import steer, steering_vector
from regard.lens.tuned_lens import TunedLens

__all__ = [
    "AttentionLayer",
    "Attribution",
    "CircuitTest",
    "HeadScores",
    "IntegratedGradients",
    "LargeActivation",
    "Patching",
    "Probe",
    "RankCollapse",
    "RecordedAttention",
    "RecordedGeneration",
    "SparseAutoencoder",
    "StoredActivations",
    "StreamSizes",
    "TunedLens",
    "ablate",
    "activation_patching",
    "attention_heads",
    "attention_layers",
    "attention_maps",
    "attention_rollout",
    "circuit_test",
    "control_labels",
    "entropy",
    "fit_probe",
    "gradient_times_input",
    "integrated_gradients",
    "logit_attribution",
    "logit_difference",
    "logit_lens",
    "massive_activations",
    "named_attention_maps",
    "names",
    "patch",
    "path_patching",
    "rank_collapse",
    "record",
    "record_generation",
    "relative_weights",
    "row_entropy",
    "score_heads",
    "shapes",
    "steer",
    "steering_vector",
]
