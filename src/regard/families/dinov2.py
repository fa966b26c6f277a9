"""DINOv2 (Oquab et al. 2023): a vision transformer trained without labels, with a learned scale behind every sublayer.

Its largest has a gated feed-forward of two thirds of the width that the plain one would have. The classifier reads
[CLS] beside the mean of the patches. The vector that took the place of hidden patches in its training is not kept.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, architecture, ends
from regard.families.common.images import only_squares, patches
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.vit import ATTENTION, FEEDFORWARD, LOOK, attention, encoder, links, looks
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Pooled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, PositionWise, SwiGLU
from regard.parts.norm import LayerNorm
from regard.weights.ops import Split
from regard.weights.table import Link, Table

LAYER = LOOK | {"norm1": f"{ATTENTION}.norm", "norm2": f"{FEEDFORWARD}.norm"}
PLAIN = {"mlp.fc1": f"{FEEDFORWARD}.body.up_proj", "mlp.fc2": f"{FEEDFORWARD}.body.down_proj"}
GATED = {"mlp.weights_out": f"{FEEDFORWARD}.body.down_proj"}
SCALES = (
    Link("encoder.layer.{i}.layer_scale1.lambda1", f"{ATTENTION}.scale"),
    Link("encoder.layer.{i}.layer_scale2.lambda1", f"{FEEDFORWARD}.scale"),
)
PACKED = Link(
    "encoder.layer.{i}.mlp.weights_in.{leaf}",
    (f"{FEEDFORWARD}.body.gate_proj.{{leaf}}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}"),
    Split(),
)


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("dinov2", config)
    norm, scale = LayerNorm(theirs.number("layer_norm_eps", 1e-6)), theirs.number("layerscale_value", 1.0)
    block = Block((Sublayer(attention(theirs), norm, scale=scale), Sublayer(feedforward(theirs), norm, scale=scale)))
    return encoder(theirs, only_squares(patches(theirs, 14), "dinov2"), block, heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, PositionWise)
    gated, hidden = isinstance(feedforward, SwiGLU), feedforward.hidden_dim(model.width)
    ratios = [n for n in range(1, 65) if (two_thirds(n * model.width) if gated else n * model.width) == hidden]
    written = {
        "model_type": "dinov2",
        **looks(model, attention),
        "mlp_ratio": ratios[0] if ratios else 4,
        "use_swiglu_ffn": gated,
        "hidden_act": "gelu" if gated else THEIRS[feedforward.activation],
        "layerscale_value": model.blocks[0].sublayers[0].scale,
        "use_mask_token": False,
        **ends(model.head),
    }
    theirs = Config("dinov2", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("dinov2", model, written, spec)


def table(model: Encoder) -> Table:
    gated = isinstance(model.layers[0].blocks[0].sublayers[1].body, SwiGLU)
    layer = LAYER | (GATED if gated else PLAIN)
    found = links(model, "dinov2.", layer, *SCALES, *((PACKED,) if gated else ()))
    return Table(*found, *LABELS, ignored=("embeddings.mask_token", "dinov2.embeddings.mask_token"))


def heads(theirs: Config) -> Heads:
    return {
        "Dinov2Model": Pooled("cls", normalize=False),
        "Dinov2ForImageClassification": Classification(theirs.labels(), "cls_mean"),
    }


def feedforward(theirs: Config) -> PositionWise:
    hidden = theirs.integer("hidden_size", 768) * theirs.integer("mlp_ratio", 4)
    if theirs.flag("use_swiglu_ffn", False):
        return SwiGLU(two_thirds(hidden), bias=True)
    return FeedForward(hidden, theirs.choice("hidden_act", OURS, "gelu"))


def two_thirds(hidden: int) -> int:
    """As many weights in three matrices as in two, up to a multiple of 8."""
    return -(-int(hidden * 2 / 3) // 8) * 8
