"""`regard lens`: where attention goes, and what recurrences carry, for a text of yours."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import DeviceOption, ModelArgument

if TYPE_CHECKING:
    from torch import Tensor


def lens(
    model: ModelArgument,
    text: Annotated[str, typer.Option("--text", "-t", help="The text to look at.")],
    layer: Annotated[int | None, typer.Option(help="Only this layer, from 0.")] = None,
    head: Annotated[int | None, typer.Option(help="Only this head, from 0.")] = None,
    states: Annotated[
        bool, typer.Option("--states", help="What recurrent layers carry, instead of attention.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw the maps into this PNG or SVG.")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens, maps and entropies as one object.")] = False,
) -> None:
    """Show where every head looks in a text.

    The table has what the last token looks at, and how spread out each head's attention is (entropy, in nats).

    \b
    Examples:
      regard lens runs/demo --text "Anna is in the barn. Where is Anna?"
      regard lens runs/demo --text "Anna is in the barn." --layer 1 --out attention.png
      regard lens runs/demo --text "Anna is in the barn." --states
    """
    from regard.cli.open_model import open_model
    from regard.lens import attention_maps
    from regard.lens.state_maps import states as carried

    network, tokenizer = open_model(model, device)
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text, special=True)]
    if not ids:
        raise ValueError("the text has no tokens; give --text some words to look at")
    if len(ids) > (network.spec.context or len(ids)):
        raise ValueError(f"the text has {len(ids)} tokens, {model} reads {network.spec.context}; shorten it")
    tokens = [tokenizer.decode_token(id) for id in ids]
    if states:
        found = {
            name: array for name, array in carried(network, ids).items() if layer in (None, int(name.split(".")[2]))
        }
        show_states(found, tokens, out, as_json)
        return
    maps = {i: weights for i, weights in enumerate(attention_maps(network, ids)) if weights is not None}
    if not maps:
        raise ValueError(f"{model} has no attention layer to look at; what recurrent layers carry is shown by --states")
    chosen = {
        (i, h): weights[h]
        for i, weights in maps.items()
        for h in range(len(weights))
        if layer in (None, i) and head in (None, h)
    }
    if not chosen:
        raise ValueError(f"there is no layer {layer}, head {head}; attention layers: {', '.join(map(str, maps))}")
    show_attention(chosen, tokens, text, out, as_json)


def show_attention(
    maps: "dict[tuple[int, int], Tensor]", tokens: list[str], text: str, out: Path | None, as_json: bool
) -> None:
    """Of each layer and head: what the last token looks at; drawn, what every token does."""
    from rich.console import Console
    from rich.table import Table

    from regard.lens import entropy

    spread = {where: float(entropy(weights[None])[0]) for where, weights in maps.items()}
    if as_json:
        found = [
            {"layer": layer, "head": head, "entropy": spread[layer, head], "weights": weights.tolist()}
            for (layer, head), weights in maps.items()
        ]
        print(json.dumps({"tokens": tokens, "maps": found}))
    elif out is not None:
        from regard.report.plots import attention_grid

        attention_grid(maps, tokens, out)
        Console(stderr=True).print(f"drawn into {out}")
    else:
        table = Table("layer", "head", "entropy", "the last token looks at", title=repr(text), title_justify="left")
        for (layer, head), weights in maps.items():
            best = weights[-1].topk(min(3, len(tokens)))
            looks = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            told = ", ".join(f"{tokens[j]!r} {weight:.2f}" for weight, j in looks)
            table.add_row(str(layer), str(head), f"{spread[layer, head]:.2f}", told)
        Console().print(table)


def show_states(found: "dict[str, Tensor]", tokens: list[str], out: Path | None, as_json: bool) -> None:
    """The norm of what is carried after each token; drawn, every number of it."""
    from rich.console import Console
    from rich.table import Table

    if not found:
        raise ValueError("there is no recurrent layer to look at; where attention goes is shown without --states")
    norms = {name: array.flatten(1).norm(dim=1).tolist() for name, array in found.items()}
    if as_json:
        print(json.dumps({"tokens": tokens, "norms": norms}))
    elif out is not None:
        from regard.report.plots import state_grid

        state_grid(found, tokens, out)
        Console(stderr=True).print(f"drawn into {out}")
    else:
        table = Table("token", *norms, title="norm of what is carried after each token", title_justify="left")
        for token, *row in zip(tokens, *norms.values(), strict=True):
            table.add_row(repr(token), *(f"{norm:.2f}" for norm in row))
        Console().print(table)
