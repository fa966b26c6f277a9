"""DeiT (Touvron et al. 2020): a vision transformer with one more token, which learned from a teacher.

The token stands behind [CLS]. One class reads [CLS] alone, another has a classifier on each and says their mean.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import LABELS, Heads, architecture
from regard.families.common.images import patches
from regard.families.common.roundtrip import check_roundtrip
from regard.families.vit import LAYER, POOLER, encoder, layer, links, pooler, settings
from regard.models.distilled import Distilled
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.weights.ops import Reshape
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("deit", config)
    return encoder(theirs, patches(theirs, 16, registers=1), layer(theirs), heads(theirs))


def config(model: Encoder) -> dict[str, Any]:
    written = {"model_type": "deit", **settings(model)}
    theirs = Config("deit", written)
    written["architectures"] = [architecture(model.head, theirs, heads(theirs))]
    return check_roundtrip("deit", model, written, spec)


def table(model: Encoder) -> Table:
    token = Link("embeddings.distillation_token", "input.registers", Reshape((1, 1, -1)))
    both = (
        Link("cls_classifier.{leaf}", "head.labels.{leaf}"),
        Link("distillation_classifier.{leaf}", "head.teacher.{leaf}"),
    )
    return Table(*links(model, "deit.", LAYER, token), POOLER, *(both if isinstance(model.head, Distilled) else LABELS))


def heads(theirs: Config) -> Heads:
    return {
        "DeiTModel": pooler(theirs),
        "DeiTForImageClassification": Classification(theirs.labels()),
        "DeiTForImageClassificationWithTeacher": Distilled(theirs.labels()),
    }
