"""DINOv2 (Oquab et al. 2023): a vision transformer trained without labels, with a learned scale after every sublayer.

The largest model has a SwiGLU with two thirds of the hidden width of the feed-forward. The classifier reads [CLS]
concatenated with the mean of the patches. For images of another size the positions are interpolated. The mask
token of the pretraining is not loaded.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.encoder_heads import LABELS, Heads, check_encoder_roundtrip, read_classifier
from regard.families.common.images import read_patches, require_squares
from regard.families.common.names import ATTENTION, FEEDFORWARD, GATE_UP
from regard.families.common.roundtrip import bodies
from regard.families.vit import encoder_links, read_attention, read_encoder, shape_config
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, PositionWise, SwiGLU
from regard.parts.norm import LayerNorm
from regard.weights.ops import Split
from regard.weights.table import Link, Table

NORMS = {"norm1": f"{ATTENTION}.norm", "norm2": f"{FEEDFORWARD}.norm"}
MLP = {"mlp.fc1": f"{FEEDFORWARD}.body.up_proj", "mlp.fc2": f"{FEEDFORWARD}.body.down_proj"}
SWIGLU = {"mlp.weights_out": f"{FEEDFORWARD}.body.down_proj"}
SCALES = (
    Link("encoder.layer.{i}.layer_scale1.lambda1", f"{ATTENTION}.scale"),
    Link("encoder.layer.{i}.layer_scale2.lambda1", f"{FEEDFORWARD}.scale"),
)
GATE_AND_UP = Link("encoder.layer.{i}.mlp.weights_in.{leaf}", GATE_UP, Split())


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("dinov2", config)
    norm, scale = LayerNorm(hf_config.number("layer_norm_eps", 1e-6)), hf_config.number("layerscale_value", 1.0)
    sublayers = (Sublayer(body, norm, scale=scale) for body in (read_attention(hf_config), read_feedforward(hf_config)))
    patches = replace(require_squares(read_patches(hf_config, 14), "dinov2"), any_size=True)
    return read_encoder(hf_config, patches, Block(tuple(sublayers)), heads(hf_config))


def config(model: Encoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, PositionWise)
    gated, hidden = isinstance(feedforward, SwiGLU), feedforward.hidden_dim(model.width)
    ratios = [n for n in range(1, 65) if (two_thirds(n * model.width) if gated else n * model.width) == hidden]
    settings = shape_config("dinov2", model, attention) | {
        "mlp_ratio": ratios[0] if ratios else 4,
        "use_swiglu_ffn": gated,
        "hidden_act": "gelu" if gated else ACTIVATION_NAMES[feedforward.activation],
        "layerscale_value": model.blocks[0].sublayers[0].scale,
        "use_mask_token": False,
    }
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    gated = isinstance(model.layers[0].blocks[0].sublayers[1].body, SwiGLU)
    names, links = (SWIGLU, (GATE_AND_UP,)) if gated else (MLP, ())
    return Table(
        *encoder_links(model, "dinov2.", NORMS | names, *SCALES, *links),
        *LABELS,
        ignored=("embeddings.mask_token", "dinov2.embeddings.mask_token"),
    )


def heads(hf_config: Config) -> Heads:
    return {
        "Dinov2Model": Pooled("cls", normalize=False),
        "Dinov2ForImageClassification": read_classifier(hf_config, "cls_mean"),
    }


def read_feedforward(hf_config: Config) -> PositionWise:
    hidden = hf_config.integer("hidden_size", 768) * hf_config.integer("mlp_ratio", 4)
    if hf_config.flag("use_swiglu_ffn", False):
        return SwiGLU(two_thirds(hidden), bias=True)
    return FeedForward(hidden, hf_config.activation("hidden_act", "gelu"))


def two_thirds(hidden: int) -> int:
    """Rounded up to a multiple of 8: three matrices then have about as many weights as two of the full width."""
    return -(-int(hidden * 2 / 3) // 8) * 8
