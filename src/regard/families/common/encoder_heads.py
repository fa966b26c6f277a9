"""Heads of encoders: a config names its class in `architectures`, a spec holds the head itself.

Each family has one function that maps its config to the head of every class; it is used for reading and for writing.
Of the two maps of labels only `id2label` is read; `label2id` is written as its inverse.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import canonical, check_roundtrip
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Dense, Head, MaskedLM, Pooler, PreTraining
from regard.weights.table import Link

Heads = Mapping[str, Head | None]  # by class name; the first class is the default
ClassifierPool = Literal["none", "cls", "mean", "last", "cls_mean"]

LABELS = (Link("classifier.{leaf}", "head.labels.{leaf}"),)
DENSE_AND_LABELS = (
    Link("classifier.dense.{leaf}", "head.dense.dense.{leaf}"),
    Link("classifier.out_proj.{leaf}", "head.labels.{leaf}"),
)


def check_encoder_roundtrip(
    model: Encoder, settings: dict[str, Any], read: Callable[[dict], Encoder], heads: Callable[[Config], Heads]
) -> dict[str, Any]:
    """The settings with those of the head and its class; raises FamilyError unless `read` returns this model."""
    model_type = settings["model_type"]
    settings = settings | head_settings(model.head)
    classes = heads(Config(model_type, settings))
    names = [name for name, head in classes.items() if canonical(head) == canonical(model.head)]
    if not names:
        raise FamilyError(f"no {model_type} class has the head {model.head!r:.160}; choose one of {', '.join(classes)}")
    return check_roundtrip(model_type, model, settings | {"architectures": names[:1]}, read)


def read_classifier(hf_config: Config, pool: ClassifierPool = "cls", dense: Dense | None = None) -> Classification:
    return Classification(hf_config.num_labels(), pool, dense, label_names=hf_config.label_names())


def read_pooler(hf_config: Config) -> Pooler | None:
    """The pooler of a base model, unless `add_pooling_layer`, a key that only our configs have, is false."""
    return Pooler() if hf_config.flag("add_pooling_layer", True) else None


def head_settings(head: Head | None) -> dict[str, Any]:
    """The settings of a head, without the name of its class."""
    masked_lm = head.words if isinstance(head, PreTraining) else head
    names = getattr(head, "label_names", ()) or [f"LABEL_{n}" for n in range(getattr(head, "labels", 2))]
    return {
        "tie_word_embeddings": masked_lm.tied if isinstance(masked_lm, MaskedLM) else True,
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
    }


def bert_head_links(head: Head | None, pooler: str, classifier: tuple[Link, ...]) -> tuple[Link, ...]:
    """Links of heads with BERT's names; `classifier` are those of a classification head with a dense layer."""
    match head:
        case MaskedLM():
            return masked_lm_links(head)
        case PreTraining():
            return (
                *masked_lm_links(head.words, "head.words"),
                Link(pooler, "head.pair.dense.dense.{leaf}"),
                Link("cls.seq_relationship.{leaf}", "head.pair.labels.{leaf}"),
            )
        case Classification() if head.dense:
            return classifier
        case Pooler():
            return (Link(pooler, "head.dense.dense.{leaf}"),)
    return LABELS


def masked_lm_links(head: MaskedLM, ours: str = "head") -> tuple[Link, ...]:
    return (
        Link("cls.predictions.transform.dense.{leaf}", f"{ours}.dense.dense.{{leaf}}"),
        Link("cls.predictions.transform.LayerNorm.{leaf}", f"{ours}.dense.norm.{{leaf}}"),
        Link("cls.predictions.bias" if head.tied else "cls.predictions.decoder.bias", f"{ours}.vocab.bias"),
        Link("cls.predictions.decoder.weight", f"{ours}.vocab.weight"),
    )


def tied_copies(base: str, head: str) -> dict[str, str]:
    """Tensors of a tied head that a file may hold a second time."""
    return {
        f"{head}.decoder.weight": f"{base}embeddings.word_embeddings.weight",
        f"{head}.decoder.bias": f"{head}.bias",
    }
