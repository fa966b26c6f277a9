"""Sentence encoders in the format of sentence-transformers: `modules.json` lists the modules after the encoder.

    0 Transformer (the folder itself)      1 Pooling (its own config.json)      2 Normalize, optional

A folder without `modules.json` holds only the encoder. Reimers & Gurevych 2019.
"""

import json
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.weight_files import MAX_JSON_BYTES, read_json
from regard.models.heads import Pooled
from regard.parts.pooling import Pool

MODULES = "modules.json"
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


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
            f"{file} lists {', '.join(types)}; supported are Transformer, Pooling and optionally Normalize. Remove "
            f"{MODULES} to load the encoder alone"
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
