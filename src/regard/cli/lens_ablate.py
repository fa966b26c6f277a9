"""`regard lens ablate`: what a model predicts without some of its heads, neurons or layers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_inspected import encode, open_inspected
from regard.cli.open_model import DeviceOption, ModelArgument

if TYPE_CHECKING:
    from torch import Tensor

    from regard.language_model import LanguageModel


def ablate(
    model: ModelArgument,
    text: Annotated[str, typer.Option("--text", "-t", help="The text whose next token is predicted.")],
    heads: Annotated[str, typer.Option(help="Heads to remove, as LAYER.HEAD: 4.7,5.0")] = "",
    neurons: Annotated[str, typer.Option(help="Neurons, as LAYER.INDEX; of experts LAYER.EXPERT.INDEX.")] = "",
    layers: Annotated[str, typer.Option(help="Layers to skip: 2,3")] = "",
    mean_over: Annotated[
        str | None, typer.Option(help="A text: heads and neurons get their mean over its tokens, not 0.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Show so many tokens, or heads.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw the effect of each head into this PNG or SVG file.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove heads, neurons or layers, and compare the predictions of the next token.

    Without --heads, --neurons and --layers every head is removed in turn. The effect is the divergence
    KL(whole || ablated) of the predictions, in nats: 0 if the head does not matter for this token.

    \b
    Examples:
      regard lens ablate runs/demo --text "Anna is in the barn. Where is Anna? Anna is in the"
      regard lens ablate runs/demo --text "Anna is in the" --heads 0.1,1.3 --mean-over "Ben was in the garden."
      regard lens ablate runs/demo --text "Anna is in the" --layers 1 --json
    """
    llm = open_inspected(model, device)
    ids = encode(model, llm, text)
    mean = None if mean_over is None else encode(model, llm, mean_over)
    if heads or neurons or layers:
        chosen = {"heads": pairs(heads, 2), "neurons": pairs(neurons, 2, 3), "layers": [n for (n,) in pairs(layers, 1)]}
        whole, ablated = (predict(llm, ids), predict(llm, ids, mean_over=mean, **chosen))
        show_predictions(llm, whole, ablated, top, as_json)
    else:
        show_heads(each_head(llm, ids, mean), top, out, as_json)


def pairs(text: str, *lengths: int) -> list[tuple[int, ...]]:
    """ "4.7,5.0" -> [(4, 7), (5, 0)]; lengths: how many numbers an entry may have"""
    found = []
    for entry in filter(None, text.split(",")):
        numbers = entry.strip().split(".")
        if len(numbers) not in lengths or not all(number.isdecimal() for number in numbers):
            form = " or ".join(".".join("N" * length) for length in lengths)
            raise ValueError(f"{entry!r} is not of the form {form}; separate several by commas")
        found.append(tuple(map(int, numbers)))
    return found


def predict(llm: "LanguageModel", ids: list[int], **ablated) -> "Tensor":
    """(V,) log-probabilities of the next token"""
    import torch

    from regard.lens import ablate as remove

    tokens = torch.tensor([ids], device=next(llm.model.parameters()).device)
    with torch.no_grad(), remove(llm.model, **ablated):
        return llm.model(tokens)[0, -1].float().log_softmax(-1)


def divergence(whole: "Tensor", ablated: "Tensor") -> float:
    """KL(whole || ablated)"""
    return float((whole.exp() * (whole - ablated)).sum())


def each_head(llm: "LanguageModel", ids: list[int], mean: list[int] | None) -> "dict[tuple[int, int], float]":
    """The effect of removing each head with a softmax or an implied matrix of its own."""
    from rich.console import Console
    from rich.progress import track

    from regard.lens import map_kinds

    whole, counts = predict(llm, ids), map_kinds(llm.model)
    heads = [
        (layer, head)
        for layer, mixers in enumerate(counts)
        if not any(mixer.kind is not None and mixer.kind.channels for mixer in mixers)
        for head in range(sum(mixer.heads for mixer in mixers))
    ]
    if not heads:
        raise ValueError("the model has no heads; choose --neurons or --layers")
    console = Console(stderr=True)
    steps = track(heads, "removing heads", console=console, transient=True, disable=not console.is_terminal)
    return {head: divergence(whole, predict(llm, ids, heads=[head], mean_over=mean)) for head in steps}


def show_predictions(llm: "LanguageModel", whole: "Tensor", ablated: "Tensor", top: int, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = dict.fromkeys([*whole.topk(top).indices.tolist(), *ablated.topk(top).indices.tolist()])
    rows = [(llm.tokenizer.decode_token(id), float(whole[id].exp()), float(ablated[id].exp())) for id in shown]
    effect = divergence(whole, ablated)
    if as_json:
        entries = [{"token": token, "whole": before, "ablated": after} for token, before, after in rows]
        print(json.dumps({"divergence": effect, "tokens": entries}))
        return
    table = Table("next token", "whole", "ablated", caption=f"KL(whole || ablated) = {effect:.3f} nats")
    for token, before, after in rows:
        table.add_row(Text(repr(token)), f"{before:.3f}", f"{after:.3f}")
    Console().print(table)


def show_heads(effects: "dict[tuple[int, int], float]", top: int, out: Path | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps([{"layer": i, "head": h, "divergence": value} for (i, h), value in effects.items()]))
    elif out is not None:
        import torch

        from regard.report.plots import heat_map

        layers = sorted({layer for layer, _ in effects})
        count = 1 + max(head for _, head in effects)
        values = torch.tensor([[effects.get((layer, head), 0.0) for head in range(count)] for layer in layers])
        heat_map(values, [f"layer {layer}" for layer in layers], [str(head) for head in range(count)], out)
        Console(stderr=True).print(f"written: {out}")
    else:
        table = Table("layer", "head", "KL(whole || ablated)", caption="the heads that matter most for the next token")
        for (layer, head), value in sorted(effects.items(), key=lambda item: -item[1])[:top]:
            table.add_row(str(layer), str(head), f"{value:.4f}")
        Console().print(table)
