"""`regard lens patch`: which layer and position carries the difference between two texts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.open_inspected import TargetOption, encode_inputs, open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

if TYPE_CHECKING:
    from torch import Tensor

    from regard.language_model import LanguageModel


def patch(
    model: ModelArgument,
    clean: Annotated[str, typer.Option(help="The text whose activations are patched in.")],
    corrupted: Annotated[str, typer.Option(help="A text of as many tokens, with another next token.")],
    answer: Annotated[str, typer.Option(help="The next token of the clean text.")],
    wrong: Annotated[str, typer.Option(help="The next token of the corrupted text.")],
    names: Annotated[
        str | None, typer.Option(help="The activations, such as '*.body' (see `regard lens names`).")
    ] = None,
    by: Annotated[Literal["position", "head"], typer.Option(help="Patch one position, or one head, at a time.")] = (
        "position"
    ),
    target: TargetOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw a heat map into this PNG or SVG file.")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with tokens and effects.")] = False,
) -> None:
    """Run the model on a corrupted text with one activation at a time from a clean text.

    The effect is the share of logit(answer) - logit(wrong) that the patch restores: 1 is the clean run, 0 none. By
    default the residual stream is patched, after each layer and at each position. Of an encoder-decoder the texts are
    the source, whose residual stream in the encoder is patched by default.

    \b
    Examples:
      regard lens patch runs/demo --clean "Anna is in the" --corrupted "Ben is in the" --answer " barn" --wrong " shed"
      regard lens patch runs/demo --clean "Anna is" --corrupted "Ben is" --answer " in" --wrong " at" -o layers.png
      regard lens patch runs/demo --clean "Anna" --corrupted "Ben" --answer " is" --wrong " at" --names "*.z" --by head
      regard lens patch models/t5 --clean "a cat" --corrupted "a dog" --answer " Katze" --wrong " Hund" --target "eine"
    """
    llm = open_inspected(model, device)
    from rich.console import Console
    from rich.progress import Progress

    from regard.lens import activation_patching, logit_difference
    from regard.lens.inputs import check_predicts_next, residual_names

    check_predicts_next(llm.model)
    first, second = (encode_inputs(model, llm, text, target) for text in (clean, corrupted))
    tokens = read_tokens(llm, first)
    patterns = names or [name for name in residual_names(llm.model) if not name.startswith("target.")]
    metric = logit_difference(llm.tokenizer.single_id(answer), llm.tokenizer.single_id(wrong))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("patching", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = activation_patching(llm.model, first, second, metric, patterns, by, update)
    if as_json:
        effects = {name: values.tolist() for name, values in found.effects.items()}
        values = {"clean": found.clean, "corrupted": found.corrupted, "effects": effects}
        print_json({"tokens": tokens["source"]} | values)
    elif out is not None:
        from regard.report.plots import heat_map

        if len({len(values) for values in found.effects.values()}) > 1:
            raise ValueError("the activations have different numbers of cells; choose --names of one kind to draw them")
        cells = labels(next(iter(found.effects)), len(found.matrix[0]), tokens, by)
        heat_map(found.matrix, list(found.effects), cells, out)
        console.print(f"written: {out}")
    else:
        show(found.effects, tokens, by)


def read_tokens(llm: "LanguageModel", inputs: list[int] | tuple[list[int], list[int]]) -> dict[str, list[str]]:
    """The tokens of the text ("source"), and of an encoder-decoder's output ("target")."""
    source, target = inputs if isinstance(inputs, tuple) else (inputs, [])
    return {
        side: [llm.tokenizer.decode_token(id) for id in ids] for side, ids in (("source", source), ("target", target))
    }


def labels(name: str, count: int, tokens: dict[str, list[str]], by: str) -> list[str]:
    """One per cell of an activation: the tokens of its positions, or numbers."""
    side = tokens["target" if name.startswith("target.") else "source"]
    return side if by == "position" and len(side) == count else [str(i) for i in range(count)]


def show(effects: "dict[str, Tensor]", tokens: dict[str, list[str]], by: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("activation", "largest effects")
    for name, values in effects.items():
        cells = labels(name, len(values), tokens, by)
        best = values.abs().topk(min(3, len(cells))).indices.tolist()
        row = ", ".join(f"{cells[i]!r} ({i}) {values[i].item():.2f}" for i in best)
        table.add_row(name, Text(row))  # Text: a token with brackets is not markup
    Console().print(table)
