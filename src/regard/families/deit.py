"""DeiT (Touvron et al. 2020): a vision transformer with a distillation token, which was trained on a teacher's labels.

The token follows [CLS]. One class classifies [CLS] only; another has a classifier for each of the two tokens and
returns the mean of their logits.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, check_encoder_roundtrip, read_classifier
from regard.families.common.images import read_patches
from regard.families.vit import LAYER, POOLER, common_config, encoder_links, read_block, read_encoder, read_pooler
from regard.models.encoder import Encoder
from regard.models.heads import Distilled
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table

DISTILLATION_TOKEN = Link("embeddings.distillation_token", "input.registers", Reshape((1, 1, -1)))
TWO_CLASSIFIERS = (
    Link("cls_classifier.{leaf}", "head.labels.{leaf}"),
    Link("distillation_classifier.{leaf}", "head.teacher.{leaf}"),
)


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("deit", config)
    return read_encoder(hf_config, read_patches(hf_config, 16, registers=1), read_block(hf_config), heads(hf_config))


def config(model: Encoder) -> dict[str, Any]:
    return check_encoder_roundtrip(model, common_config("deit", model), spec, heads)


def table(model: Encoder) -> Table:
    classifiers = TWO_CLASSIFIERS if isinstance(model.head, Distilled) else LABELS
    return Table(*encoder_links(model, "deit.", LAYER, DISTILLATION_TOKEN), POOLER, *classifiers)


def heads(hf_config: Config) -> Heads:
    return {
        "DeiTModel": read_pooler(hf_config),
        "DeiTForImageClassification": read_classifier(hf_config),
        "DeiTForImageClassificationWithTeacher": Distilled(hf_config.num_labels(), hf_config.label_names()),
    }
