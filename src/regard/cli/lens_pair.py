"""The attention of an encoder-decoder for `regard lens`: of the encoder, the decoder, and the decoder to the source."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regard.cli.open_inspected import encode_pair, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from regard.language_model import LanguageModel
    from regard.parts.tap import MapKind


class HeadMap(NamedTuple):
    attention: str  # "encoder", "decoder" or "cross"
    layer: int
    head: int
    kind: "MapKind"
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
        raise ValueError(f"there is no {chosen(layer, head)} with a map")
    if as_json:
        maps = [
            one._asdict()
            | {
                "kind": one.kind.label,
                "weights": one.weights.tolist(),
                "entropy": entropy_of(one.weights, one.kind),
            }
            for one in found
        ]
        print_json(tokens | {"maps": maps})
    elif out is not None:
        draw(found, tokens, out)
    else:
        show_table(found, tokens, text)


def chosen(layer: int | None, head: int | None) -> str:
    """ "layer 3, head 1", or the one that was chosen"""
    named = {"layer": layer, "head": head}
    return ", ".join(f"{name} {index}" for name, index in named.items() if index is not None)


def head_maps(llm: "LanguageModel", source: list[int], ids: list[int]) -> list[HeadMap]:
    from regard.lens import RecordedAttention, attention_layers
    from regard.lens.maps import map_kind

    recorded, found = RecordedAttention(llm.model, source, ids), []
    for number, layer in enumerate(attention_layers(llm.model)):
        kinds = [map_kind(module) for module, _ in recorded.layers[number] for _ in range(module.heads)]
        weights = recorded.weights(number)
        for head, kind in enumerate(kinds):
            assert weights is not None, "a layer whose mixers ran has a map"
            found.append(HeadMap(layer.stack, layer.index, head, kind, weights[head]))
    return found


def draw(found: list[HeadMap], tokens: dict[str, list[str]], out: Path) -> None:
    from rich.console import Console

    from regard.report.plots import attention_grid

    cross = {(one.layer, one.head): one.weights for one in found if one.attention == "cross"}
    if not cross:
        raise ValueError("--out draws the attention of the decoder to the source, and no such layer and head is chosen")
    attention_grid(cross, tokens["target"], out, keys=tokens["source"])
    Console(stderr=True).print(f"written: {out}")


def show_table(found: list[HeadMap], tokens: dict[str, list[str]], text: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = any(one.kind.implied for one in found)
    columns = ["attention", "layer", "head", *(["map"] if several else []), "entropy", "the last token attends to"]
    table = Table(*columns, title=Text(repr(text)), title_justify="left")  # Text: "[/INST]" is not markup
    for attention, layer, head, kind, weights in found:
        keys = Text(largest_keys(weights, tokens["target" if attention == "decoder" else "source"]))
        map_cells = [kind.label] if several else []
        table.add_row(attention, str(layer), str(head), *map_cells, f"{entropy_of(weights, kind):.2f}", keys)
    Console().print(table)


def entropy_of(weights: "Tensor", kind: "MapKind") -> float:
    """The mean entropy of the rows (L, S); of an implied matrix that of its relative weights."""
    from regard.lens import entropy, relative_weights

    return float(entropy(relative_weights(weights) if kind.implied else weights))


def largest_keys(weights: "Tensor", keys: list[str]) -> str:
    """The three keys with the largest weights in the last row (L, S)."""
    largest = weights[-1].abs().topk(min(3, len(keys))).indices.tolist()
    return ", ".join(f"{keys[j]!r} {weights[-1, j].item():.2f}" for j in largest)
