"""`regard plan`: the parameters, FLOPs and bytes of a model, counted from its spec."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import PatternOption

if TYPE_CHECKING:
    from regard.models.base import Model

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    context_: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A recipe (name or file), a spec (TOML, JSON), a model folder, a run, a published model "
            "(llama-3.1-8b), or a size (7B).",
        ),
    ],
    pattern: PatternOption = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; by default the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Format of cache and weights: float32, bfloat16, int8 …")] = "float32",
    weights: Annotated[
        str | None, typer.Option(help="Format of the weights, if not that of the cache: int8, int4/128 …")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, metavar="RANK", help="Count LoRA adapters of this rank.")] = None,
    targets: Annotated[str, typer.Option(help="Linear layers with adapters, separated by commas.")] = "q_proj,v_proj",
    device: Annotated[
        str | None, typer.Option(help="Estimate capacity and speed on this device: h100, a100, rtx4090 …")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A smaller model for speculative decoding.")
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Share of draft tokens that are accepted.")] = 0.8,
    tokens: Annotated[
        float | None, typer.Option(help="Number of training tokens; by default a published model's own.")
    ] = None,
    activations: Annotated[
        bool, typer.Option(help="Also count the activations that training keeps for the backward pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the parameters, FLOPs and bytes of a model.

    Nothing is built or loaded, so models of any size can be planned. Sizes are printed in GB (10^9) and GiB (2^30).

    \b
    Examples:
      regard plan demo --model.width=1024
      regard plan runs/demo --context 4096 --batch 16 --dtype bfloat16 --json
      regard plan llama-3.1-70b --dtype bfloat16 --weights int4/128 --device h100
      regard plan llama-3.1-8b --lora 16 --targets q_proj,v_proj
      regard plan 7B --draft 100M --acceptance 0.7 --tokens 2e12
    """
    from regard.models.pattern import retile
    from regard.planning import plan as count
    from regard.planning.groups import device_groups, groups, lora_groups, speculation_groups, training_run_groups
    from regard.planning.published import PUBLISHED
    from regard.planning.training import activation_bytes

    spec = find_spec(model, context_.args)
    if pattern is not None:
        spec = retile(spec, pattern)
    numbers = count(spec, context, batch, dtype, weights)
    data = groups(numbers)
    if tokens is None and model in PUBLISHED:
        tokens = PUBLISHED[model].tokens
    if tokens is not None:
        data |= training_run_groups(numbers, tokens)
    if lora is not None:
        data |= lora_groups(spec, numbers.parameters, lora, tuple(targets.split(",")))
    if device is not None:
        data |= device_groups(device, numbers)
    if draft is not None:
        small = count(find_spec(draft, []), numbers.context, batch, dtype, weights)
        draft_bytes, target_bytes = (n.weights_read + n.cache_read for n in (small, numbers))
        data |= speculation_groups(acceptance, draft_bytes / target_bytes)
    if activations:
        data["training_bytes"]["activations"] = activation_bytes(spec, batch, numbers.context)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        print_table(model, data)


def find_spec(name: str, overrides: list[str]) -> "Model":
    """The spec of a published model, of a size such as 7B, or of whatever `read_spec` finds."""
    from regard.cli.open_model import read_spec
    from regard.planning.published import PUBLISHED, depth_for, scaled_llama
    from regard.training.recipe import dotted, override

    if name in PUBLISHED:
        spec = PUBLISHED[name].spec()
    elif size := re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", name):
        spec = scaled_llama(depth_for(float(size[1]) * UNITS[size[2]]))
    else:
        return read_spec(name, overrides, other_names={"published models": PUBLISHED})
    return type(spec).from_dict(override({"model": spec.to_dict()}, dotted(overrides))["model"])


def print_table(name: str, data: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from regard.planning import rows

    table = Table("", "quantity", "amount", title=f"plan of {name}", title_justify="left")
    table.columns[2].justify = "right"
    last = None
    for group, quantity, number in rows(data):
        table.add_row(group if group != last else "", quantity, number)
        last = group
    Console().print(table)
