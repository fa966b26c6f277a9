"""`regard plan`: what a model costs before it is built."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import Pattern

if TYPE_CHECKING:
    from regard.plan.parts import Planned

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    context_: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A recipe (by name or file), a spec (TOML, JSON), a model folder, a run, a published model "
            "(llama-3.1-8b), or a size (7B)."
        ),
    ],
    pattern: Pattern = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text; by default the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the cache, and of weights: float32, bfloat16, int8 …")] = "float32",
    weights: Annotated[str | None, typer.Option(help="Format of the weights, if another: int8, int4/128 …")] = None,
    lora: Annotated[int | None, typer.Option(min=1, metavar="RANK", help="Count adapters of this rank.")] = None,
    targets: Annotated[str, typer.Option(help="Linear layers that they adapt.")] = "q_proj,v_proj",
    device: Annotated[str | None, typer.Option(help="What fits and how fast: h100, a100, rtx4090 …")] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A small model that drafts for this one.")] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Share of its drafts that are accepted.")] = 0.8,
    tokens: Annotated[float | None, typer.Option(help="Train on so many; a published model's own by default.")] = None,
    activations: Annotated[bool, typer.Option(help="Count what training keeps for its backward, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count parameters, FLOPs and bytes of a model.

    Nothing is built or loaded, so any size can be planned. Sizes are printed in GB (10^9) and GiB (2^30).

    \b
    Examples:
      regard plan demo --model.width=1024
      regard plan runs/demo --context 4096 --batch 16 --dtype bfloat16 --json
      regard plan llama-3.1-70b --dtype bfloat16 --weights int4/128 --device h100
      regard plan llama-3.1-8b --lora 16 --targets q_proj,v_proj
      regard plan 7B --draft 100M --acceptance 0.7 --tokens 2e12
    """
    from regard.models.pattern import retile
    from regard.plan import groups
    from regard.plan import plan as count
    from regard.plan.activations import activation_bytes
    from regard.plan.adapters import lora_plan
    from regard.plan.devices import device_plan
    from regard.plan.published import PUBLISHED
    from regard.plan.scaling import training_plan
    from regard.plan.speculation import speculation_plan

    spec = planned(model, context_.args)
    if pattern is not None:
        spec = retile(spec, pattern)
    numbers = count(spec, context, batch, dtype, weights)
    data = groups(numbers)
    if tokens is None and model in PUBLISHED:
        tokens = PUBLISHED[model].tokens
    if tokens is not None:
        data |= training_plan(numbers.count.active, tokens)
    if lora is not None:
        data |= lora_plan(spec, numbers.parameters, lora, tuple(targets.split(",")))
    if device is not None:
        data |= device_plan(device, numbers)
    if draft is not None:
        small = count(planned(draft, []), numbers.context, batch, dtype, weights)
        read, target = (n.weights_read + n.memory_read for n in (small, numbers))
        data |= speculation_plan(acceptance, read / target)
    if activations:
        data["training_bytes"]["activations"] = activation_bytes(spec, batch, numbers.context)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        draw(model, data)


def planned(name: str, overrides: list[str]) -> "Planned":
    """The spec that a name, a size or a file stands for."""
    from regard.cli.open_model import read_spec
    from regard.plan.dial import depth_of, dial
    from regard.plan.published import PUBLISHED
    from regard.training.recipe import dotted, override

    if name in PUBLISHED:
        spec = PUBLISHED[name].spec()
        return type(spec).from_dict(override({"model": spec.to_dict()}, dotted(overrides))["model"])
    if asked := re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", name):
        return dial(depth_of(float(asked[1]) * UNITS[asked[2]]))
    return read_spec(name, overrides)


def draw(name: str, data: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from regard.plan import rows

    table = Table("", "quantity", "amount", title=f"plan of {name}", title_justify="left")
    table.columns[2].justify = "right"
    last = None
    for group, quantity, number in rows(data):
        table.add_row(group if group != last else "", quantity, number)
        last = group
    Console().print(table)
