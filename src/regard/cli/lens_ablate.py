"""`regard lens ablate`: what a model predicts without some of its heads, neurons or layers."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from regard.cli.open_inspected import TargetOption, encode_inputs, open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

if TYPE_CHECKING:
    from torch import Tensor

    from regard.language_model import LanguageModel
    from regard.lens.inputs import ModelInputs

PairPart = Literal["encoder", "decoder", "cross"]
STACKS = {
    "layers": (None, False),
    "encoder": ("source", False),
    "decoder": ("target", False),
    "cross": ("target", True),
}


class AblatedHead(NamedTuple):
    attention: str  # "layers", or of an encoder-decoder a PairPart
    layer: int
    head: int


def ablate(
    model: ModelArgument,
    text: Annotated[str, typer.Option("--text", "-t", help="The text whose next token is predicted.")],
    heads: Annotated[str, typer.Option(help="Heads to remove, as LAYER.HEAD: 4.7,5.0")] = "",
    neurons: Annotated[str, typer.Option(help="Neurons, as LAYER.INDEX; of experts LAYER.EXPERT.INDEX.")] = "",
    layers: Annotated[str, typer.Option(help="Layers to skip: 2,3")] = "",
    part: Annotated[
        PairPart | None,
        typer.Option(help="Of an encoder-decoder: count these layers; cross: the decoder to the source."),
    ] = None,
    target: TargetOption = None,
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
    KL(whole || ablated) of the predictions, in nats: 0 if the head does not matter for this token. The text is the
    source of an encoder-decoder, and the next token of its output is predicted.

    \b
    Examples:
      regard lens ablate runs/demo --text "Ben is in the cellar. Where is Ben? Ben is in the"
      regard lens ablate runs/demo --text "Anna is in the" --heads 0.1,1.3 --mean-over "Ben was in the garden."
      regard lens ablate runs/demo --text "Anna is in the" --layers 1 --json
      regard lens ablate models/t5 --text "translate English to German: a cat" --part cross --heads 0.1
    """
    llm = open_inspected(model, device)
    from regard.lens import ablate as remove
    from regard.lens.inputs import check_predicts_next

    check_predicts_next(llm.model)
    inputs = encode_inputs(model, llm, text, target)
    mean = None if mean_over is None else encode_inputs(model, llm, mean_over, target)
    check_part(model, llm, part, needed=bool(heads or neurons or layers))
    if heads or neurons or layers:
        stack, to_source = STACKS[part or "layers"]
        removed, skipped = [(layer, head) for layer, head in pairs(heads, 2)], [layer for (layer,) in pairs(layers, 1)]
        ablation = remove(llm.model, removed, pairs(neurons, 2, 3), skipped, mean, stack, to_source)
        show_predictions(llm, predict(llm, inputs), predict(llm, inputs, ablation), top, as_json)
    else:
        show_heads(each_head(llm, inputs, mean, part), top, out, as_json)


def check_part(name: Path, llm: "LanguageModel", part: PairPart | None, needed: bool) -> None:
    from regard.lens.inputs import is_encoder_decoder

    if is_encoder_decoder(llm.model):
        if needed and part is None:
            raise ValueError(f"{name} is an encoder-decoder; choose --part encoder, decoder or cross")
    elif part is not None:
        raise ValueError(f"{name} is not an encoder-decoder; leave --part out")


def pairs(text: str, *lengths: int) -> list[tuple[int, ...]]:
    """ "4.7,5.0" -> [(4, 7), (5, 0)]; lengths: how many numbers an entry may have"""
    found = []
    for entry in filter(None, text.split(",")):
        numbers = entry.strip().split(".")
        if len(numbers) not in lengths or not all(number.isascii() and number.isdecimal() for number in numbers):
            form = " or ".join(".".join("N" * length) for length in lengths)
            raise ValueError(f"{entry!r} is not of the form {form}; separate several by commas")
        found.append(tuple(map(int, numbers)))
    return found


def predict(
    llm: "LanguageModel", inputs: "ModelInputs", ablation: AbstractContextManager[None] | None = None
) -> "Tensor":
    """(V,) log-probabilities of the next token"""
    import torch

    from regard.lens.inputs import rows_of

    with torch.no_grad(), ablation or nullcontext():
        return llm.model(*rows_of(llm.model, inputs))[0, -1].float().log_softmax(-1)


def divergence(whole: "Tensor", ablated: "Tensor") -> float:
    """KL(whole || ablated)"""
    return float((whole.exp() * (whole - ablated)).sum())


def each_head(
    llm: "LanguageModel", inputs: "ModelInputs", mean: "ModelInputs | None", part: PairPart | None
) -> dict[AblatedHead, float]:
    """The effect of removing each head with a softmax or an implied matrix of its own."""
    from rich.console import Console
    from rich.progress import track

    from regard.lens import ablate as remove

    heads = [head for head in removable_heads(llm) if part in (None, head.attention)]
    if not heads:
        raise ValueError("there are no heads; choose --neurons or --layers" + (", or another --part" if part else ""))
    whole, effects, console = predict(llm, inputs), {}, Console(stderr=True)
    for head in track(heads, "removing heads", console=console, transient=True, disable=not console.is_terminal):
        stack, to_source = STACKS[head.attention]
        ablation = remove(llm.model, [head[1:]], mean_over=mean, stack=stack, to_source=to_source)
        effects[head] = divergence(whole, predict(llm, inputs, ablation))
    return effects


def removable_heads(llm: "LanguageModel") -> list[AblatedHead]:
    from regard.lens.ablation import output_taps
    from regard.lens.attention_layers import modules_of_layers
    from regard.lens.maps import map_kind
    from regard.parts.tap import HasAttentionMap

    found = []
    for attention, layer, modules in modules_of_layers(llm.model):
        mixers = [module for module in modules if isinstance(module, HasAttentionMap) and output_taps(module)]
        if not any(map_kind(mixer).channels for mixer in mixers):
            found += [AblatedHead(attention, layer, head) for head in range(sum(mixer.heads for mixer in mixers))]
    return found


def show_predictions(llm: "LanguageModel", whole: "Tensor", ablated: "Tensor", top: int, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    count = min(top, len(whole))
    shown = dict.fromkeys([*whole.topk(count).indices.tolist(), *ablated.topk(count).indices.tolist()])
    rows = [(llm.tokenizer.decode_token(id), float(whole[id].exp()), float(ablated[id].exp())) for id in shown]
    effect = divergence(whole, ablated)
    if as_json:
        entries = [{"token": token, "whole": before, "ablated": after} for token, before, after in rows]
        print_json({"divergence": effect, "tokens": entries})
        return
    table = Table("next token", "whole", "ablated", caption=f"KL(whole || ablated) = {effect:.3f} nats")
    for token, before, after in rows:
        table.add_row(Text(repr(token)), f"{before:.3f}", f"{after:.3f}")
    Console().print(table)


def show_heads(effects: dict[AblatedHead, float], top: int, out: Path | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        entries = [head._asdict() | {"divergence": value} for head, value in effects.items()]
        print_json([{key: x for key, x in entry.items() if x != "layers"} for entry in entries])
    elif out is not None:
        import torch

        from regard.report.plots import heat_map

        layers = dict.fromkeys(head[:2] for head in effects)
        count = 1 + max(head.head for head in effects)
        values = torch.tensor(
            [[effects.get(AblatedHead(*layer, head), 0.0) for head in range(count)] for layer in layers]
        )
        heat_map(values, [layer_label(*layer) for layer in layers], [str(head) for head in range(count)], out)
        Console(stderr=True).print(f"written: {out}")
    else:
        table = Table("layer", "head", "KL(whole || ablated)", caption="the heads that matter most for the next token")
        for (attention, layer, head), value in sorted(effects.items(), key=lambda item: -item[1])[:top]:
            table.add_row(layer_label(attention, layer).removeprefix("layer "), str(head), f"{value:.4f}")
        Console().print(table)


def layer_label(attention: str, layer: int) -> str:
    return f"layer {layer}" if attention == "layers" else f"{attention} {layer}"
