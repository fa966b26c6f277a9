"""The attention of an encoder-decoder for `regard lens`: of the encoder, the decoder, and the decoder to the source."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regard.cli.open_inspected import encode_pair

if TYPE_CHECKING:
    from torch import Tensor

    from regard.language_model import LanguageModel

BLOCK = re.compile(r"(source|target)\.stack\.blocks\.(\d+)\.")


class HeadMap(NamedTuple):
    attention: str  # "encoder", "decoder" or "cross"
    layer: int
    head: int
    weights: "Tensor"  # (L, S)


def show_pair(
    name: Path,
    llm: "LanguageModel",
    text: str,
    target: str | None,
    layer: int | None,
    head: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """All maps as JSON or as a table; a picture has those of cross-attention."""
    source, ids = encode_pair(name, llm, text, target)
    tokens = {
        side: [llm.tokenizer.decode_token(id) for id in row] for side, row in (("source", source), ("target", ids))
    }
    found = [one for one in head_maps(llm, source, ids) if layer in (None, one.layer) and head in (None, one.head)]
    if not found:
        raise ValueError(f"there is no layer {layer}, head {head} with a map")
    if as_json:
        from regard.lens import entropy

        maps = [
            one._asdict() | {"weights": one.weights.tolist(), "entropy": float(entropy(one.weights[None])[0])}
            for one in found
        ]
        print(json.dumps(tokens | {"maps": maps}))
    elif out is not None:
        from regard.report.plots import attention_grid

        cross = {(one.layer, one.head): one.weights for one in found if one.attention == "cross"}
        attention_grid(cross, tokens["target"], out, keys=tokens["source"])
    else:
        show_table(found, tokens, text)


def head_maps(llm: "LanguageModel", source: list[int], ids: list[int]) -> list[HeadMap]:
    import torch

    from regard.lens import named_attention_maps

    device = next(llm.model.parameters()).device
    rows = [torch.tensor([row], device=device) for row in (source, ids)]
    found, heads = [], dict[tuple[str, int], int]()
    for module, weights in named_attention_maps(llm.model, *rows).items():
        place = BLOCK.match(module)
        assert place is not None, f"{module} is in no layer"
        reads_source = getattr(llm.model.get_submodule(module), "reads_source", False)
        attention = "cross" if reads_source else {"source": "encoder", "target": "decoder"}[place[1]]
        for one in weights[0]:
            head = heads[attention, int(place[2])] = heads.get((attention, int(place[2])), -1) + 1
            found.append(HeadMap(attention, int(place[2]), head, one))
    return found


def show_table(found: list[HeadMap], tokens: dict[str, list[str]], text: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from regard.lens import entropy

    table = Table(
        "attention", "layer", "head", "entropy", "the last token attends to", title=repr(text), title_justify="left"
    )
    for attention, layer, head, weights in found:
        keys = tokens["target" if attention == "decoder" else "source"]
        best = weights[-1].abs().topk(min(3, len(keys))).indices.tolist()
        row = ", ".join(f"{keys[j]!r} {weights[-1, j].item():.2f}" for j in best)
        table.add_row(attention, str(layer), str(head), f"{float(entropy(weights[None])[0]):.2f}", Text(row))
    Console().print(table)
