"""`regard plan train`: memory, FLOPs and time of a training run, and the devices on which it fits."""

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from regard.models.base import Model
    from regard.planning.speed import Device
    from regard.planning.training_plan import ParallelSplit, TrainingJob

ROWS, LENGTH, STEPS = 8, 2048, 1000  # of a model without a recipe
BYTES_PER_TOKEN = 4  # of English text with a BPE tokenizer; byte and character tokenizers have 1
GPUS_HELP = "The devices: h100, 8xh100, 2xrtx4090 …, or cpu for this machine; by default a table of all."
SPLIT_HELP = (
    "How the devices are used, as in train.parallel: replicate=2,tensor=4, also expert and context; the rest shard."
)


def plan_train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe (name or file), a published model, or a size (7B).")
    ],
    start: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="The model that a recipe such as dpo tunes.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="DEVICES", help=GPUS_HELP)] = None,
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help=SPLIT_HELP)] = None,
    utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Assumed share of the devices' peak FLOP/s; 0.4 by default.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows per step, instead of the recipe's.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per row, instead of the recipe's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan a training run: memory per device, tokens, FLOPs, and time.

    Nothing is built or allocated. Memory is counted with and without activation checkpointing. Times assume a share of
    the peak FLOP/s, which is printed; a CPU's peak is measured. On GPUs the recipe's precision "auto" is bfloat16.

    \b
    Examples:
      regard plan train llama --model.width=384
      regard plan train dpo --from smollm2 --gpus cpu
      regard plan train 7B --gpus 8xh100 --rows 64 --length 4096
      regard plan train 70B --gpus 64xh100 --split replicate=2,shard=8,tensor=4
      regard plan train mixtral-8x7b --gpus 16xh100 --split expert=8
    """
    from regard.planning.training_plan import UTILIZATION

    settings = run_settings(recipe, start, context.args, {"rows": rows, "length": length, "steps": steps})
    share = UTILIZATION if utilization is None else utilization
    count, name = parse_devices(gpus)
    if name is None:
        if split is not None:
            raise typer.BadParameter("--split needs --gpus, for example --gpus 8xh100")
        data = overview(settings, share)
    else:
        data = device_plan(settings, name, parse_split(split, count), share)
    print(json.dumps(data, indent=2) if as_json else f"plan to train {recipe}\n\n{format_plan(data)}")


def run_settings(
    name: str, start: str | None, overrides: Sequence[str], options: Mapping[str, int | None]
) -> dict[str, Any]:
    """The spec, sizes and settings of a recipe, or of a model with the default sizes."""
    from regard.cli.plan import find_spec
    from regard.planning.model_plan import default_context
    from regard.training.overrides import parse_overrides
    from regard.training.recipe import FINE_TUNING_LENGTH, RECIPES, Data, draft_recipe, find_recipe, read_recipe

    is_recipe = (RECIPES / f"{name}.toml").is_file() or Path(name).suffix == ".toml"
    changes = parse_overrides(overrides) | ({} if start is None else {"from": start})
    if start is not None and not is_recipe:
        raise typer.BadParameter(
            f"{name} is a model, and --from is for a recipe; use regard plan train finetune --from"
        )
    tables = read_recipe(find_recipe(name), changes) if is_recipe else {}
    spec = find_spec(name, overrides) if start is None else draft_recipe(tables)[0].model
    train, data = tables.get("train", {}), tables.get("data", {})
    sizes = {"rows": ROWS, "length": LENGTH, "steps": STEPS}
    if tables:
        default = FINE_TUNING_LENGTH if "from" in tables else Data.length
        sizes |= {"rows": data.get("rows", Data.rows), "length": data.get("length", default)}
        sizes["steps"] = train.get("steps", STEPS)
    limit = default_context(spec)
    sizes["length"] = min(sizes["length"], limit) if limit else sizes["length"]
    sizes |= {key: value for key, value in options.items() if value is not None}
    return {
        "spec": spec,
        **sizes,
        "accumulate": train.get("accumulate", 1),
        "optimizer": train.get("optimizer", {}).get("kind", "adamw"),
        "precision": train.get("precision", "auto"),
        "trained": adapter_size(spec, tables.get("adapter")),
        "corpus": corpus_tokens(data, tables.get("tokenizer", {})),
    }


def adapter_size(spec: "Model", adapter: Mapping[str, Any] | None) -> int | None:
    """The number of parameters of a recipe's adapters; None if it has none."""
    from regard.adapt.lora import LoRA
    from regard.planning.training import lora_parameters
    from regard.spec import parse_spec

    if adapter is None:
        return None
    lora = parse_spec(adapter, "adapter", LoRA)
    assert isinstance(lora, LoRA)
    return lora_parameters(spec, lora.rank, lora.targets, lora.dora)


def corpus_tokens(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> float | None:
    """Tokens of the data, estimated from the size of its files; None if there are no files."""
    tables = [data, *(source for source in data.get("sources", ()) if isinstance(source, Mapping))]
    paths = [Path(str(table["path"])) for table in tables if table.get("path")]
    if not paths or not all(path.exists() for path in paths):
        return None
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    per_token = 1 if tokenizer.get("by") in ("byte", "character") else BYTES_PER_TOKEN
    return sum(file.stat().st_size for file in files) / per_token


def parse_devices(text: str | None) -> tuple[int, str | None]:
    """'8xh100' -> (8, 'h100')"""
    if text is None:
        return 1, None
    form = re.fullmatch(r"(?:([0-9]+)x)?([a-z]\w*)", text)
    if form is None or form[1] == "0":
        raise ValueError(f"--gpus {text} is not a number of devices, such as 8xh100, or one device, such as h100")
    return int(form[1] or 1), form[2]


def parse_split(text: str | None, count: int) -> "ParallelSplit":
    """The split of `count` devices; without `shard`, all remaining ones shard."""
    from regard.planning.training_plan import ParallelSplit

    try:
        pairs = dict(pair.split("=") for pair in text.split(",")) if text else {}
        sizes = {name.strip(): int(value) for name, value in pairs.items()}
        split = ParallelSplit(**({"shard": max(1, count // prod(sizes.values()))} | sizes))
    except (TypeError, ValueError, ZeroDivisionError):
        raise ValueError(
            f"--split {text}: write it as replicate=2,shard=4, with whole numbers from 1; the names are those of "
            "train.parallel: replicate, shard, expert, context, tensor"
        ) from None
    if split.devices != count:
        raise ValueError(f"--split {text} uses {split.devices} devices, but --gpus has {count}; make them equal")
    return split


def make_job(settings: Mapping[str, Any], device: str) -> "TrainingJob":
    from regard.planning.training_plan import TrainingJob

    precision = settings["precision"]
    mixed = precision in ("bfloat16", "fp8") or precision == "auto" and device != "cpu"
    names = ("spec", "rows", "length", "steps", "accumulate", "optimizer", "trained")
    return TrainingJob(mixed=mixed, **{name: settings[name] for name in names})


def describe_run(job: "TrainingJob", settings: Mapping[str, Any]) -> dict[str, Any]:
    corpus = settings["corpus"]
    epochs = {} if corpus is None else {"epochs_estimated_from_file_sizes": job.tokens / corpus}
    counts = {"parameters": job.costs.parameters, "active_parameters": job.costs.count.active}
    counts |= {} if job.trained is None else {"trained_parameters": job.trained}
    sizes = {"steps": job.steps, "tokens_per_step": job.tokens_per_step, "tokens": job.tokens}
    ratio = {"tokens_per_parameter": job.tokens / job.costs.count.active}
    return {"run": {**counts, **sizes, **ratio, **epochs}, "run_flops": job.flops}


def overview(settings: Mapping[str, Any], utilization: float) -> dict[str, Any]:
    """The run, its memory on one device, and a line per device."""
    from regard.planning.speed import DEVICES

    job = make_job(settings, "h100")
    devices = {name: device_line(job, device, utilization) for name, device in DEVICES.items()}
    return {
        **describe_run(job, settings),
        "memory_bytes_on_one_gpu": with_total(job.memory()),
        "with_activation_checkpointing_bytes": with_total(job.memory(checkpointing=True)),
        "utilization": utilization,
        "devices": devices,
    }


def device_line(job: "TrainingJob", device: "Device", utilization: float) -> dict[str, Any]:
    plain, checkpointed = job.smallest_split(device), job.smallest_split(device, checkpointing=True)
    line: dict[str, Any] = {
        "memory_bytes": device.memory,
        "fits_on": plain and plain.devices,
        "with_checkpointing_on": checkpointed and checkpointed.devices,
    }
    if chosen := plain or checkpointed:
        seconds = job.seconds_per_step(device, chosen, utilization, checkpointing=plain is None)
        line |= {"split": str(chosen), "seconds_per_step": seconds, "total_seconds": seconds * job.steps}
    return line


def device_plan(settings: Mapping[str, Any], name: str, split: "ParallelSplit", utilization: float) -> dict[str, Any]:
    """The run on a given number of devices of one kind."""
    from regard.planning.machine import measure_cpu
    from regard.planning.speed import device_of
    from regard.planning.training_plan import USABLE
    from regard.training.parallel.context_parallel import check_context

    device, job = measure_cpu() if name == "cpu" else device_of(name), make_job(settings, name)
    if split.expert > 1 and not job.expert_parameters:
        raise ValueError(f"--split expert={split.expert}: this model has no experts; use shard")
    if split.context > 1:
        check_context(job.spec)
    memory, checkpointed = job.memory(split), job.memory(split, checkpointing=True)
    usable = USABLE * device.memory
    fits = "yes" if sum(memory.values()) <= usable else "no"
    if fits == "no" and sum(checkpointed.values()) <= usable:
        fits = "with activation checkpointing"
    seconds = job.seconds_per_step(device, split, utilization, checkpointing=fits.startswith("with"))
    return {
        **describe_run(job, settings),
        "memory_bytes_per_device": with_total(memory),
        "with_activation_checkpointing_bytes": with_total(checkpointed),
        "exchange_bytes_per_step_and_device": {k: round(v) for k, v in job.exchange(split).items() if v},
        "device_bytes": {"memory": device.memory, "usable": round(usable)},
        "fits": fits,
        "split": str(split),
        "utilization": utilization,
        "peak_flops_per_second": {"per_device": device.flops},
        "time": {
            "seconds_per_step": seconds,
            "tokens_per_second": job.tokens_per_step / seconds,
            "total_seconds": seconds * job.steps,
            "device_hours": seconds * job.steps * split.devices / 3600,
        },
    }


def with_total(sizes: Mapping[str, int]) -> dict[str, int]:
    return {"total": sum(sizes.values()), **sizes}


def format_plan(data: Mapping[str, Any]) -> str:
    """The groups of numbers as a table, then a line per device, and the assumptions."""
    from regard.planning.groups import format_number, table

    lines = [table({name: group for name, group in data.items() if name != "devices"}), ""]
    if "devices" in data:
        rows = [("device", "memory", "fits on", "checkpointed on", "split", "step", "run")]
        for name, line in data["devices"].items():
            numbers = (line["fits_on"], line["with_checkpointing_on"])
            times = [format_seconds(line[key]) if key in line else "–" for key in ("seconds_per_step", "total_seconds")]
            memory = format_number(line["memory_bytes"], "B")
            rows.append((name, memory, *(str(n or "none") for n in numbers), line.get("split", "–"), *times))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    else:
        lines.append(f"fits: {data['fits']}  (split: {data['split']})")
        lines.append(f"one step: {format_seconds(data['time']['seconds_per_step'])}   "
            f"whole run: {format_seconds(data['time']['total_seconds'])}")  # fmt: skip
    lines += [
        "",
        f"Times assume {data['utilization']:.0%} of the peak FLOP/s; small models are slower, because launching an",
        "operation takes time too. A tenth of a device's memory is left free; the process itself is not counted.",
    ]
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """5400 -> '1.5 h'"""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
