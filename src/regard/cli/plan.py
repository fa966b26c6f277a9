"""`regard plan`: the parameters, FLOPs and bytes of a model, counted from its spec."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import PatternOption

if TYPE_CHECKING:
    from regard.formats.base import NumberFormat
    from regard.models.base import Model
    from regard.planning import Plan

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A recipe (name or file), a spec (TOML, JSON), a model folder, a run, a published model "
        "(llama-3.1-8b), or a size (7B).",
    ),
]
ContextFlag = Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; by default the model's context.")]
WeightsFlag = Annotated[
    str | None, typer.Option(help="Format of the weights, if not that of the cache: int8, int4/128, q4_k, nf4 …")
]
RankFlag = Annotated[
    int | None, typer.Option(min=1, max=2**20, metavar="RANK", help="Count LoRA adapters of this rank.")
]
DeviceFlag = Annotated[
    str | None, typer.Option(help="Estimate capacity and speed on this device: h100, a100, rtx4090 …")
]
DraftFlag = Annotated[str | None, typer.Option(metavar="MODEL", help="A smaller model for speculative decoding.")]
TokensFlag = Annotated[
    float | None, typer.Option(help="Number of training tokens; by default a published model's own.")
]
CachesFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND",
        help="Bytes of the engine's store with this cache: int8, int4:64, sinks:4+1020, window:1024, h2o:512 …; repeat "
        "the option to compare.",
    ),
]
FormatsFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize",
        metavar="FORMAT",
        help="Bytes of the weights with linear layers in this format, others in --dtype: int8, int4, nf4, q4_k …; "
        "repeat the option to compare.",
    ),
]
ActivationsFlag = Annotated[
    bool, typer.Option(help="Also count the activations that training keeps for the backward pass.")
]


def plan(
    context_: typer.Context,
    model: ModelName,
    pattern: PatternOption = None,
    context: ContextFlag = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Format of cache and weights: float32, bfloat16, int8 …")] = "float32",
    weights: WeightsFlag = None,
    quantize: FormatsFlag = None,
    cache: CachesFlag = None,
    lora: RankFlag = None,
    targets: Annotated[str, typer.Option(help="Linear layers with adapters, separated by commas.")] = "all-linear",
    device: DeviceFlag = None,
    draft: DraftFlag = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Share of draft tokens that are accepted.")] = 0.8,
    tokens: TokensFlag = None,
    activations: ActivationsFlag = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the parameters, FLOPs and bytes of a model.

    Nothing is built or loaded, so models of any size can be planned. Sizes are printed in GB (10^9) and GiB (2^30).

    \b
    Examples:
      regard plan demo --model.width=1024
      regard plan runs/demo --context 4096 --batch 16 --dtype bfloat16 --json
      regard plan llama-3.1-70b --dtype bfloat16 --weights int4/128 --device h100
      regard plan llama-3.1-8b --dtype bfloat16 --context 8192 --cache int8 --cache int4:64 --cache sinks:4+1020
      regard plan llama-3.1-8b --dtype bfloat16 --quantize int8 --quantize int4
      regard plan llama-3.1-8b --lora 16
      regard plan llama-3.1-8b --lora 16 --targets q_proj,v_proj
      regard plan 7B --draft 100M --acceptance 0.7 --tokens 2e12
    """
    from regard.planning import plan as count
    from regard.planning.groups import lora_groups, speculation_groups, table

    spec = find_spec(model, context_.args, pattern)
    numbers = count(spec, context, batch, dtype, weights, stored_formats(model, spec))
    data = numbers.to_dict() | run_groups(model, numbers, tokens, device)
    if activations:
        data["training_bytes"]["activations"] = numbers.activation_bytes()
    if quantize:
        data |= quantized_groups(numbers, quantize)
    if cache:
        data |= cache_groups(numbers, cache)
    if lora is not None:
        data |= lora_groups(numbers.spec, numbers.parameters, lora, tuple(targets.split(",")))
    if draft is not None:
        small = count(find_spec(draft), numbers.context, batch, dtype, weights)
        data |= speculation_groups(acceptance, small.bytes_read / numbers.bytes_read)
    print(json.dumps(data, indent=2) if as_json else f"plan of {model}: {numbers.conditions}\n\n{table(data)}")


def run_groups(name: str, numbers: "Plan", tokens: float | None, device: str | None) -> dict[str, Any]:
    """The cost of training on `tokens` tokens, and of running on a device, if they are given."""
    from regard.planning.groups import device_groups, training_run_groups
    from regard.planning.published import PUBLISHED

    if tokens is None and name in PUBLISHED:
        tokens = PUBLISHED[name].tokens
    training = {} if tokens is None else training_run_groups(numbers, tokens)
    return training | ({} if device is None else device_groups(device, numbers))


def quantized_groups(numbers: "Plan", names: Sequence[str]) -> dict[str, Any]:
    """The weights as `--quantize` of the other commands stores them."""
    from regard.formats.names import format_named
    from regard.planning.memory import format_of
    from regard.planning.parameters import quantized_size

    bits = format_of(numbers.dtype).bits
    sizes = {name: quantized_size(numbers.spec, format_named(name), bits) for name in names}
    return {
        "quantized_bytes": {name: size.bytes for name, size in sizes.items()},
        "bits_per_quantized_weight": {name: round(size.bits_per_weight, 3) for name, size in sizes.items()},
    }


def cache_groups(numbers: "Plan", names: Sequence[str]) -> dict[str, Any]:
    """What the contiguous store of an engine allocates, and how much more it allocates for twice the context."""
    import torch

    from regard.engine.caches import store_bytes

    if numbers.dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"--cache is for a model in float32, bfloat16 or float16, not --dtype {numbers.dtype}")
    if numbers.context < 2:
        raise ValueError("--cache counts the bytes of further tokens; give a --context of at least 2")
    decoder, dtype = numbers.decoder, getattr(torch, numbers.dtype)
    if decoder is None:
        raise ValueError(f"a model of kind {numbers.spec.kind} keeps no keys and values; leave --cache out")
    source = 0 if decoder is numbers.spec else numbers.context

    def size(name: str | None, context: int) -> int:
        return store_bytes(decoder, name, numbers.batch, context, dtype, source)

    sizes = {"all_tokens": size(None, numbers.context)} | {name: size(name, numbers.context) for name in names}
    shorter = numbers.context // 2
    growth = {name: sizes[name] - size(None if name == "all_tokens" else name, shorter) for name in sizes}
    per_token = {name: grown // (numbers.batch * (numbers.context - shorter)) for name, grown in growth.items()}
    return {"store_bytes": sizes, "store_bytes_per_further_token": per_token}


def stored_formats(name: str, spec: "Model") -> "dict[str, NumberFormat]":
    """The formats of the layers of a folder that `regard quantize` has written, by their names."""
    from regard.checkpoint.model_folder import MODEL_TYPE
    from regard.checkpoint.quantized_layers import read_layer_types, use_layer_types
    from regard.checkpoint.weight_files import read_json
    from regard.cli.open_model import has_weights, model_folder
    from regard.models.base import build_on_meta

    file = model_folder(Path(name)) / "config.json" if has_weights(name) else None
    config = read_json(file) if file is not None and file.is_file() else {}
    if file is None or config.get("model_type") != MODEL_TYPE:
        return {}
    types = read_layer_types(file.parent, config)
    if types:
        use_layer_types(build_on_meta(spec), types)  # raises CheckpointError for names and shapes that do not fit
    return {layer: format for layer, (format, _) in types.items()}


def find_spec(name: str, overrides: Sequence[str] = (), pattern: str | None = None) -> "Model":
    """The spec of a published model, of a size such as 7B, or of a name that `read_spec` knows."""
    from regard.cli.open_model import read_spec
    from regard.models.pattern import retile
    from regard.planning.published import PUBLISHED, find_published
    from regard.training.overrides import override, parse_overrides

    spec = find_published(name)
    if spec is None:
        return read_spec(name, list(overrides), pattern, other_names={"published models": PUBLISHED})
    spec = type(spec).from_dict(override({"model": spec.to_dict()}, parse_overrides(list(overrides)))["model"])
    return spec if pattern is None else retile(spec, pattern)
