"""`regard lens`: the attention weights, or the states of recurrent layers, on a text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.lens_pair import chosen, entropy_of, largest_keys, show_pair
from regard.cli.open_inspected import encode, open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

if TYPE_CHECKING:
    from torch import Tensor

    from regard.parts.tap import MapKind


def lens(
    model: ModelArgument,
    text: Annotated[str, typer.Option("--text", "-t", help="The text that the model reads.")],
    layer: Annotated[int | None, typer.Option(help="Show only this layer, counted from 0.")] = None,
    head: Annotated[int | None, typer.Option(help="Show only this head, counted from 0.")] = None,
    states: Annotated[
        bool, typer.Option("--states", help="Show the states of recurrent layers instead of attention.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw the maps into this PNG or SVG file.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The output of an encoder-decoder; by default the one that it generates.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with tokens, maps and entropies.")
    ] = False,
) -> None:
    """Show the attention weights of every head of a decoder, an encoder or an encoder-decoder on a text.

    The table lists, per head, the tokens that the last token attends to most, and the mean entropy of the attention in
    nats: 0 for a single key, log n for n equal ones. Linear attention and state spaces have no softmax: their implied
    matrix is shown, the one whose product with the values is the output, and may have negative entries.

    \b
    Examples:
      regard lens runs/demo --text "Anna is in the barn. Where is Anna?"
      regard lens runs/demo --text "Anna is in the barn." --layer 1 --out attention.png
      regard lens runs/demo --text "Anna is in the barn." --states
      regard lens minilm --text "A cat sleeps." --layer 0
      regard lens models/t5 --text "translate English to German: a cat" --target "eine Katze"
      regard lens names runs/demo
    """
    llm = open_inspected(model, device)
    from regard.lens import attention_layers, attention_maps
    from regard.lens.recurrent_states import states as recurrent_states
    from regard.models.decoder import DecoderModule
    from regard.models.encoder_decoder import EncoderDecoderModule

    if isinstance(llm.model, EncoderDecoderModule):
        if states:
            raise ValueError(f"{model} is an encoder-decoder; --states shows the recurrent layers of decoders")
        show_pair(model, llm, text, target, layer, head, out, as_json)
        return
    if target is not None:
        raise ValueError(f"{model} is not an encoder-decoder; leave --target out")
    network, ids = llm.model, encode(model, llm, text)
    tokens = [llm.tokenizer.decode_token(id) for id in ids]
    if states:
        if not isinstance(network, DecoderModule):
            raise ValueError(f"{model} is an encoder; --states shows the recurrent layers of decoders")
        found = recurrent_states(network, ids)
        selected = {name: array for name, array in found.items() if layer in (None, int(name.split(".")[2]))}
        show_states(selected, tokens, out, as_json)
        return
    maps = {i: weights for i, weights in enumerate(attention_maps(network, ids)) if weights is not None}
    if not maps:
        raise ValueError(f"{model} has no layer with an attention map; regard lens names lists its activations")
    selected = {
        (i, h): weights[h]
        for i, weights in maps.items()
        for h in range(len(weights))
        if layer in (None, i) and head in (None, h)
    }
    if not selected:
        raise ValueError(f"there is no {chosen(layer, head)}; attention layers: {', '.join(map(str, maps))}")
    layers = attention_layers(network)
    show_attention(selected, {(i, h): layers[i].kinds[h] for i, h in selected}, tokens, text, out, as_json)


def show_attention(
    maps: "dict[tuple[int, int], Tensor]",
    kinds: "dict[tuple[int, int], MapKind]",
    tokens: list[str],
    text: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """The (L, L) maps by (layer, head): as JSON, as a picture, or the largest weights of the last row as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    entropies = {key: entropy_of(weights, kinds[key]) for key, weights in maps.items()}
    if as_json:
        entries = [
            {
                "layer": layer,
                "head": head,
                "kind": kinds[layer, head].label,
                "entropy": entropies[layer, head],
                "weights": weights.tolist(),
            }
            for (layer, head), weights in maps.items()
        ]
        print_json({"tokens": tokens, "maps": entries})
    elif out is not None:
        from regard.report.plots import attention_grid

        attention_grid(maps, tokens, out)
        Console(stderr=True).print(f"written: {out}")
    else:
        several = any(kind.implied for kind in kinds.values())
        columns = ["layer", "head", *(["map"] if several else []), "entropy", "the last token attends to"]
        table = Table(*columns, title=Text(repr(text)), title_justify="left")  # Text: "[/INST]" is not markup
        for (layer, head), weights in maps.items():
            kind = [kinds[layer, head].label] if several else []
            keys = Text(largest_keys(weights, tokens))
            table.add_row(str(layer), str(head), *kind, f"{entropies[layer, head]:.2f}", keys)
        Console().print(table)


def show_states(states: "dict[str, Tensor]", tokens: list[str], out: Path | None, as_json: bool) -> None:
    """The states after each token: their norms as JSON or as a table, or all their numbers as a picture."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not states:
        raise ValueError("there is no recurrent layer to show; omit --states to show the attention")
    norms = {name: array.flatten(1).norm(dim=1).tolist() for name, array in states.items()}
    if as_json:
        print_json({"tokens": tokens, "norms": norms})
    elif out is not None:
        from regard.report.plots import state_grid

        state_grid(states, tokens, out)
        Console(stderr=True).print(f"written: {out}")
    else:
        table = Table("token", *norms, title="norm of the state after each token", title_justify="left")
        for token, *row in zip(tokens, *norms.values(), strict=True):
            table.add_row(Text(repr(token)), *(f"{norm:.2f}" for norm in row))
        Console().print(table)
