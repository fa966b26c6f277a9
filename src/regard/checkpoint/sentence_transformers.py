"""Sentence encoders in the format of sentence-transformers: `modules.json` lists the modules after the encoder.

    0 Transformer (the folder itself)      1 Pooling (its own config.json)      2 Normalize, optional

`sentence_bert_config.json` has the length to which sentences are truncated. A folder without `modules.json` holds only
the encoder. A sentence encoder does not use the pooler of the encoder's class, so it is not loaded. Reimers & Gurevych
2019.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import MAX_JSON_BYTES, read_json
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Pooled
from regard.parts.input import Tokens
from regard.parts.pooling import Pool

MODULES = "modules.json"
LENGTH_CONFIGS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert"))
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def read_sentence_encoder(folder: Path, spec: Encoder) -> Encoder:
    """The encoder with the head and length of a sentence encoder if the folder holds one; otherwise unchanged."""
    head = read_pooling_head(folder)
    if head is None:
        return spec
    limits = [
        limit for limit in (read_max_length(folder), spec.context, spec.position.max_positions) if limit is not None
    ]
    return replace(spec, head=head, context=min(limits, default=None))


def read_max_length(folder: Path) -> int | None:
    file = next((folder / name for name in LENGTH_CONFIGS if (folder / name).is_file()), None)
    length = None if file is None else read_json(file).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(f"{file}: max_seq_length={length!r:.80} must be a positive integer or null")
    return length


def is_sentence_encoder(spec: Model) -> TypeGuard[Encoder]:
    """Whether the spec is a text encoder with a pooling that `modules.json` can describe."""
    head = spec.head if isinstance(spec, Encoder) and isinstance(spec.input, Tokens) else None
    if not isinstance(head, Pooled) or head.pool not in POOLS.values():
        return False
    return head == Pooled(head.pool, normalize=head.normalize)


def without_sentence_head(spec: Model) -> Model:
    """The base model of a sentence encoder; other models are returned unchanged."""
    if not is_sentence_encoder(spec):
        return spec
    return replace(spec, head=None, context=spec.position.max_positions or spec.context)


def sentence_files(spec: Model) -> dict[str, bytes]:
    """The files of a sentence encoder that its base model lacks, by path in the folder; none for other models."""
    if not is_sentence_encoder(spec):
        return {}
    assert isinstance(spec.head, Pooled)
    paths = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if spec.head.normalize else {})}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(paths.items())
    ]
    pooling = {key: pool == spec.head.pool for key, pool in POOLS.items()}
    files = {
        MODULES: modules,
        "1_Pooling/config.json": {"word_embedding_dimension": spec.width, **pooling},
        LENGTH_CONFIGS[0]: {"max_seq_length": spec.context or spec.position.max_positions, "do_lower_case": False},
    }
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in files.items()}


def read_pooling_head(folder: Path) -> Pooled | None:
    """The head that `modules.json` describes; None without that file."""
    file = folder / MODULES
    if not file.is_file() or file.stat().st_size > MAX_JSON_BYTES:
        return None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        types = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} must be a list of modules, each with a type and a path ({error!r})") from error
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or paths[0]:
        raise CheckpointError(
            f"{file} lists {', '.join(types)}; the modules must be Transformer, Pooling and optionally Normalize. "
            f"Remove {MODULES} to load the encoder only"
        )
    if Path(paths[1]).name != paths[1]:
        raise CheckpointError(f"{file}: {paths[1]!r} must be the name of a folder inside {folder}")
    pooling = folder / paths[1]
    return Pooled(read_pool(read_json(pooling / "config.json"), pooling), normalize=len(types) == 3)


def read_pool(config: dict[str, Any], folder: Path) -> Pool:
    modes = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    if len(modes) != 1 or modes[0] not in POOLS:
        raise CheckpointError(
            f"{folder}: the pooling modes are {', '.join(modes) or 'empty'}; exactly one of {', '.join(POOLS)} is "
            "supported"
        )
    return POOLS[modes[0]]
