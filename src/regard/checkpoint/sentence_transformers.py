"""Sentence encoders as sentence-transformers keeps them: `modules.json` lists what stands behind the encoder.

    0 Transformer (the folder itself)      1 Pooling (its own config.json)      2 Normalize, or nothing

A folder without it is the encoder alone. Reimers & Gurevych 2019.
"""

import json
from pathlib import Path
from typing import Any

from regard.checkpoint.folder import CheckpointError
from regard.checkpoint.weight_files import LARGEST_JSON, read_json
from regard.models.heads import Pooled
from regard.parts.pooling import Pool

MODULES = "modules.json"
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def sentence_head(folder: Path) -> Pooled | None:
    file = folder / MODULES
    if not file.is_file() or file.stat().st_size > LARGEST_JSON:
        return None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} should list modules, each with a type and a path ({error!r})") from error
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or places[0]:
        raise CheckpointError(
            f"{file} lists {', '.join(kinds)}; read are Transformer, Pooling and Normalize. Without {MODULES} the "
            "encoder is read alone"
        )
    if Path(places[1]).name != places[1]:
        raise CheckpointError(f"{file}: {places[1]!r} should be the name of a folder beside it")
    return Pooled(pool_of(read_json(folder / places[1] / "config.json"), folder / places[1]), normalize=len(kinds) == 3)


def pool_of(config: dict[str, Any], folder: Path) -> Pool:
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in POOLS:
        raise CheckpointError(
            f"{folder}: it pools by {', '.join(chosen) or 'nothing'}; read is one of {', '.join(POOLS)}"
        )
    return POOLS[chosen[0]]
