"""BERT (Devlin et al. 2018): learned positions, token types, LayerNorm after every sublayer, GELU, biases everywhere.

Related families call these functions with the parts in which they differ. `BertModel` returns the hidden states and
keeps its pooler; in files of classes that do not use the pooler it is ignored. Dropout is an option of training and is
not converted. The first files call the weight and bias of a norm gamma and beta.
"""

from typing import Any

from regard.families.common import encoder_heads
from regard.families.common.config_reader import LEGACY_ACTIVATION_NAMES, Config
from regard.families.common.names import ATTENTION, FEEDFORWARD, attention_links, module_links
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, MaskedLM, Pooled, Pooler, PreTraining
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Activation, FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm
from regard.parts.position.base import Position
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

LAYER = {
    "attention.output.LayerNorm": f"{ATTENTION}.norm",
    "intermediate.dense": f"{FEEDFORWARD}.body.up_proj",
    "output.dense": f"{FEEDFORWARD}.body.down_proj",
    "output.LayerNorm": f"{FEEDFORWARD}.norm",
}
OLD_LEAVES = {"gamma": "weight", "beta": "bias"}


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("bert", config)
    return read_encoder(hf_config, uniform_layers(hf_config), read_positions(hf_config), heads(hf_config))


def config(model: Encoder) -> dict[str, Any]:
    return encoder_heads.check_encoder_roundtrip(model, common_config("bert", model), spec, heads)


def table(model: Encoder) -> Table:
    base = base_prefix(model, "bert.")
    pooler = f"{base}pooler.dense.{{leaf}}"
    classifier = (*encoder_heads.LABELS, Link(pooler, "head.dense.dense.{leaf}"))
    links = *encoder_links(base), *encoder_heads.bert_head_links(model.head, pooler, classifier)
    return Table(*links, **ignored_and_derived(base, pooler), leaf_aliases=OLD_LEAVES)


def ignored_and_derived(base: str, pooler: str) -> dict[str, Any]:
    """Arguments of a table: tensors of BERT's heads that are ignored or derived."""
    unused = (pooler, f"{base}embeddings.position_ids", "cls.seq_relationship.{leaf}", "cls.predictions.bias")
    return {"ignored": unused, "derived": encoder_heads.tied_copies(base, "cls.predictions")}


def heads(hf_config: Config) -> encoder_heads.Heads:
    pooler, masked_lm = Dense("tanh"), read_masked_lm(hf_config)
    return {
        "BertModel": encoder_heads.read_pooler(hf_config),
        "BertForMaskedLM": masked_lm,
        "BertForPreTraining": PreTraining(masked_lm, Classification(2, dense=pooler)),
        "BertForSequenceClassification": encoder_heads.read_classifier(hf_config, dense=pooler),
        "BertForTokenClassification": encoder_heads.read_classifier(hf_config, "none"),
    }


def read_masked_lm(hf_config: Config, activation: Activation | None = None) -> MaskedLM:
    activation = activation or hf_config.activation("hidden_act", "gelu")
    return MaskedLM(Dense(activation, read_norm(hf_config)), tied=hf_config.flag("tie_word_embeddings", True))


def read_norm(hf_config: Config) -> LayerNorm:
    return LayerNorm(hf_config.number("layer_norm_eps", 1e-12))


def read_positions(hf_config: Config) -> Learned:
    return Learned(hf_config.integer("max_position_embeddings"))


def read_block(hf_config: Config, attention: Attention) -> Block:
    norm = read_norm(hf_config)
    feedforward = FeedForward(hf_config.integer("intermediate_size"), hf_config.activation("hidden_act", "gelu"))
    return Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), style="post")


def uniform_layers(hf_config: Config, attention: Attention | None = None) -> tuple[Repeat, ...]:
    """The same block in every layer; without an attention, full attention with biases."""
    attention = attention or Attention(hf_config.integer("num_attention_heads"), mask=Full(), bias=True)
    return repeat_blocks((read_block(hf_config, attention),), hf_config.integer("num_hidden_layers"))


def read_encoder(
    hf_config: Config, layers: tuple[Repeat, ...], position: Position, heads: encoder_heads.Heads
) -> Encoder:
    hf_config.accept_only("is_decoder", False)
    hf_config.accept_only("position_embedding_type", "absolute")
    width = hf_config.integer("hidden_size")
    embedding_dim = hf_config.integer("embedding_size", width)
    return Encoder(
        Tokens(hf_config.integer("vocab_size"), types=hf_config.integer("type_vocab_size", 2)),
        width,
        layers,
        position,
        embedding_norm=read_norm(hf_config),
        head=heads[hf_config.architecture(heads)],
        embedding_dim=None if embedding_dim == width else embedding_dim,
        context=position.max_positions or hf_config.integer("max_position_embeddings"),
    )


def common_config(model_type: str, model: Encoder) -> dict[str, Any]:
    """The keys that BERT and related families have."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    return {
        "model_type": model_type,
        "vocab_size": getattr(model.input, "vocab", None),
        "type_vocab_size": getattr(model.input, "types", None),
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "hidden_act": LEGACY_ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": model.position.max_positions or model.context,
        "layer_norm_eps": getattr(model.embedding_norm, "eps", None),
        **({"add_pooling_layer": False} if model.head is None else {}),
    }


def base_prefix(model: Encoder, name: str) -> str:
    """The prefix of the encoder's tensors; a base model has none."""
    return "" if model.head is None or isinstance(model.head, Pooler | Pooled) else name


def encoder_links(base: str) -> tuple[Link, ...]:
    embeddings, layer = f"{base}embeddings", f"{base}encoder.layer.{{i}}"
    return (
        Link(f"{embeddings}.word_embeddings.weight", "input.table.weight"),
        Link(f"{embeddings}.token_type_embeddings.weight", "input.types.weight"),
        Link(f"{embeddings}.position_embeddings.weight", "position.table.weight"),
        Link(f"{embeddings}.LayerNorm.{{leaf}}", "embedding_norm.{leaf}"),
        Link(f"{base}embeddings_project.{{leaf}}", "widen.{leaf}"),
        *attention_links(f"{layer}.attention", "self.query", "self.key", "self.value", "output.dense"),
        *module_links(layer, LAYER),
    )
