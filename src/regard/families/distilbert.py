"""DistilBERT (Sanh et al. 2019): BERT at half its depth, without token types and without a pooler.

`sinusoidal_pos_embds` describes the initialization of the position table only; the table in the file is loaded.
"""

from typing import Any

from regard.families.bert import base_prefix
from regard.families.common.config_reader import LEGACY_ACTIVATION_NAMES, Config
from regard.families.common.encoder_heads import LABELS, Heads, check_encoder_roundtrip, read_classifier
from regard.families.common.names import ATTENTION, FEEDFORWARD, attention_links, module_links
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Dense, MaskedLM
from regard.models.stack import repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

NORM = LayerNorm(1e-12)
LAYER = {
    "sa_layer_norm": f"{ATTENTION}.norm",
    "ffn.lin1": f"{FEEDFORWARD}.body.up_proj",
    "ffn.lin2": f"{FEEDFORWARD}.body.down_proj",
    "output_layer_norm": f"{FEEDFORWARD}.norm",
}
CLASSIFIER = (Link("pre_classifier.{leaf}", "head.dense.dense.{leaf}"), *LABELS)
MASKED_LM = (
    Link("vocab_transform.{leaf}", "head.dense.dense.{leaf}"),
    Link("vocab_layer_norm.{leaf}", "head.dense.norm.{leaf}"),
    Link("vocab_projector.{leaf}", "head.vocab.{leaf}"),
)


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("distilbert", config)
    context = hf_config.integer("max_position_embeddings")
    feedforward = FeedForward(hf_config.integer("hidden_dim"), hf_config.activation("activation", "gelu"))
    attention = Attention(hf_config.integer("n_heads"), mask=Full(), bias=True)
    block = Block((Sublayer(attention, NORM), Sublayer(feedforward, NORM)), style="post")
    classes = heads(hf_config)
    return Encoder(
        Tokens(hf_config.integer("vocab_size")),
        hf_config.integer("dim"),
        repeat_blocks((block,), hf_config.integer("n_layers")),
        Learned(context),
        embedding_norm=NORM,
        head=classes[hf_config.architecture(classes)],
        context=context,
    )


def heads(hf_config: Config) -> Heads:
    dense = Dense(hf_config.activation("activation", "gelu"), NORM)
    return {
        "DistilBertModel": None,
        "DistilBertForMaskedLM": MaskedLM(dense, tied=hf_config.flag("tie_word_embeddings", True)),
        "DistilBertForSequenceClassification": read_classifier(hf_config, dense=Dense("relu")),
        "DistilBertForTokenClassification": read_classifier(hf_config, "none"),
    }


def config(model: Encoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    settings = {
        "model_type": "distilbert",
        "vocab_size": getattr(model.input, "vocab", None),
        "dim": model.width,
        "n_layers": len(model.blocks),
        "n_heads": attention.heads,
        "hidden_dim": feedforward.hidden_dim(model.width),
        "activation": LEGACY_ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": model.position.max_positions,
    }
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = base_prefix(model, "distilbert.")
    embeddings, layer = f"{base}embeddings", f"{base}transformer.layer.{{i}}"
    return Table(
        Link(f"{embeddings}.word_embeddings.weight", "input.table.weight"),
        Link(f"{embeddings}.position_embeddings.weight", "position.table.weight"),
        Link(f"{embeddings}.LayerNorm.{{leaf}}", "embedding_norm.{leaf}"),
        *attention_links(f"{layer}.attention", "q_lin", "k_lin", "v_lin", "out_lin"),
        *module_links(layer, LAYER),
        *(MASKED_LM if isinstance(model.head, MaskedLM) else CLASSIFIER),
        ignored=(f"{embeddings}.position_ids",),
        derived={"vocab_projector.weight": f"{embeddings}.word_embeddings.weight"},
    )
