"""`regard lens names`: the activations of a model that can be recorded and patched."""

import re
from typing import Annotated

import typer

from regard.cli.open_inspected import encode, open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

LAYER = re.compile(r"\bblocks\.\d+")


def names(
    model: ModelArgument,
    pattern: Annotated[str, typer.Argument(metavar="[PATTERN]", help="Only names that match it; * is allowed.")] = "*",
    text: Annotated[str, typer.Option("--text", "-t", help="The text that the model reads.")] = "The cat sat.",
    every: Annotated[bool, typer.Option("--all", help="Every name, instead of one line for equal layers.")] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: name to shape.")] = False,
) -> None:
    """List the names and shapes of all activations in one forward, in the order of computation.

    `regard.record` and `regard.patch` take these names. The same activation of all layers is one line, with * for the
    number of the layer.

    \b
    Examples:
      regard lens names runs/demo
      regard lens names minilm "*.pattern"
      regard lens names runs/demo "stack.blocks.0.*" --json
    """
    llm = open_inspected(model, device)
    from regard.lens import names as names_of
    from regard.lens import shapes
    from regard.lens.inputs import rows_of
    from regard.models.encoder_decoder import EncoderDecoderModule

    ids = encode(model, llm, text)
    inputs = (ids, ids[:1]) if isinstance(llm.model, EncoderDecoderModule) else ids
    matching = set(names_of(llm.model, pattern))
    found = {name: shape for name, shape in shapes(llm.model, *rows_of(llm.model, inputs)).items() if name in matching}
    if as_json:
        print_json(found)
        return
    show(found if every else merge_layers(found))


def merge_layers(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """One entry for the same activation of all layers, if they have one shape; its name has * for the layer."""
    general = {name: LAYER.sub("blocks.*", name) for name in shapes}
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(general[name], set()).add(shape)
    return {general[name] if len(found[general[name]]) == 1 else name: shape for name, shape in shapes.items()}


def show(shapes: dict[str, tuple[int, ...]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("name", no_wrap=True), "shape")
    for name, shape in shapes.items():
        table.add_row(name, str(shape))
    Console().print(table)
