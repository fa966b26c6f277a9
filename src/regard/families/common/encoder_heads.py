"""Which head an encoder has: a config names the class in `architectures`, a spec holds the head itself.

A family says once which class has which head, as a function of the config, and that serves both ways. Labels have names
there and numbers here: the names are not kept.
"""

from collections.abc import Mapping
from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import canonical
from regard.models.heads import Head, MaskedLM, PreTraining
from regard.weights.table import Link

Heads = Mapping[str, Head | None]  # by class, the plain encoder first

LABELS = (Link("classifier.{leaf}", "head.labels.{leaf}"),)
DENSE_AND_LABELS = (
    Link("classifier.dense.{leaf}", "head.dense.dense.{leaf}"),
    Link("classifier.out_proj.{leaf}", "head.labels.{leaf}"),
)


def architecture(head: Head | None, theirs: Config, heads: Heads) -> str:
    """The class that has this head."""
    found = [name for name, known in heads.items() if canonical(known) == canonical(head)]
    if not found:
        raise FamilyError(f"no {theirs.model_type} class has the head {head!r:.160}; there are {', '.join(heads)}")
    return found[0]


def ends(head: Head | None) -> dict[str, Any]:
    """What a config says of its head beside the class."""
    words = head.words if isinstance(head, PreTraining) else head
    count = getattr(head, "labels", 2)
    return {
        "tie_word_embeddings": words.tied if isinstance(words, MaskedLM) else True,
        "id2label": {str(n): f"LABEL_{n}" for n in range(count)},
        "label2id": {f"LABEL_{n}": n for n in range(count)},
    }


def predictions(head: MaskedLM, ours: str = "head") -> tuple[Link, ...]:
    """A masked head; untied, its bias has another name."""
    return (
        Link("cls.predictions.transform.dense.{leaf}", f"{ours}.dense.dense.{{leaf}}"),
        Link("cls.predictions.transform.LayerNorm.{leaf}", f"{ours}.dense.norm.{{leaf}}"),
        Link("cls.predictions.bias" if head.tied else "cls.predictions.decoder.bias", f"{ours}.vocab.bias"),
        Link("cls.predictions.decoder.weight", f"{ours}.vocab.weight"),
    )


def pretraining(head: PreTraining, pooler: str) -> tuple[Link, ...]:
    return (
        *predictions(head.words, "head.words"),
        Link(pooler, "head.pair.dense.dense.{leaf}"),
        Link("cls.seq_relationship.{leaf}", "head.pair.labels.{leaf}"),
    )


def copies(base: str, head: str) -> dict[str, str]:
    """What a tied head's file may hold twice."""
    return {
        f"{head}.decoder.weight": f"{base}embeddings.word_embeddings.weight",
        f"{head}.decoder.bias": f"{head}.bias",
    }
