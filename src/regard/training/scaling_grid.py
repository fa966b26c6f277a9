"""The runs of a scaling study: a grid of model sizes and token counts, as the settings of a sweep's trials.

size       WIDTH or WIDTHxLAYERS; hidden sizes of feed-forward layers grow with the width, the numbers of heads stay
rate       lr · (recipe's width / width)^power, with the recipe's lr
schedule   that of the recipe over the run's own number of steps, with a warm-up of at most a tenth of them. A run
           that is cut off is not a run of that length: its rate never decayed (Hoffmann et al. 2022)
batch      that of the recipe in all runs
"""

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.spec import SpecError, require
from regard.training.overrides import override
from regard.training.recipe import Training, draft_recipe
from regard.training.schedule import Schedule

HIDDEN_STEP = 8  # hidden sizes are rounded to multiples of it
WARMUP_PART = 10  # the warm-up is at most this part of a run
FEWEST_STEPS = 20
MOST_TOKENS = 1e15
COUNTS = 5  # of tokens for a budget, each twice the one before
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


@dataclass(frozen=True)
class GridSize:
    width: int
    layers: int | None = None  # None: those of the recipe

    def __str__(self) -> str:
        return str(self.width) if self.layers is None else f"{self.width}x{self.layers}"


def parse_sizes(text: str) -> list[GridSize]:
    """'32x2,64' -> [GridSize(32, 2), GridSize(64)]"""
    sizes = []
    for part in text.split(","):
        form = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", part)
        if form is None:
            raise SpecError(f"--sizes {text}: {part!r} is not a size; write WIDTH or WIDTHxLAYERS, as 64 or 64x4")
        sizes.append(GridSize(int(form[1]), int(form[2]) if form[2] else None))
    require(all(size.width and size.layers != 0 for size in sizes), f"--sizes {text}: a size must not be 0")
    require(len(set(sizes)) == len(sizes), f"--sizes {text}: a size is given twice")
    return sizes


def parse_tokens(text: str) -> list[int]:
    """'500k,1M' -> [500000, 1000000]"""
    counts = []
    for part in text.split(","):
        form = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)\s*", part.lower())
        if form is None:
            raise SpecError(f"--tokens {text}: {part!r} is not a number of tokens; write 200000, 200k or 1.5M")
        count = float(form[1]) * UNITS[form[2]]
        require(count <= MOST_TOKENS, f"--tokens {text:.80}: {part:.20} is more than {MOST_TOKENS:g} tokens")
        counts.append(round(count))
    require(len(set(counts)) == len(counts), f"--tokens {text}: a number is given twice")
    return counts


def tokens_for_budget(
    seconds: float, seconds_per_token: Sequence[float], seeds: int = 1, at_once: int = 1
) -> list[int]:
    """Token counts, each twice the one before, with which all runs take this time; `at_once` runs at a time."""
    parts = [2.0**-i for i in reversed(range(COUNTS))]
    ends = [0.0] * at_once  # of the last run in each process
    for rate in [*seconds_per_token] * seeds:
        for part in parts:
            heapq.heapreplace(ends, ends[0] + rate * part)
    largest = seconds / max(ends)
    require(largest <= MOST_TOKENS, f"--budget: {largest:.2g} tokens are more than {MOST_TOKENS:g}; give fewer minutes")
    return [round(largest * part) for part in parts]


def grid_settings(
    tables: Mapping[str, Any], sizes: Sequence[GridSize], tokens: Sequence[int], seeds: int, power: float
) -> list[dict[str, str]]:
    """The values of every run by their dotted names: seeds, then sizes, then token counts."""
    check_sizes(tables, sizes, power)
    draft, _ = draft_recipe(tables)
    per_step = draft.data.rows * draft.data.length
    lengths = [length_values(draft.train, count, per_step) for count in tokens]
    for count, values in zip(tokens, lengths, strict=True):
        same = tokens[lengths.index(values)]
        require(
            same == count,
            f"{same:,} and {count:,} tokens are both {values['train.steps']} steps of {per_step:,}; leave one out",
        )
    return [
        size_values(tables, size, power) | values | {"train.seed": str(seed)}
        for seed in range(draft.train.seed, draft.train.seed + seeds)
        for size in sizes
        for values in lengths
    ]


def check_sizes(tables: Mapping[str, Any], sizes: Sequence[GridSize], power: float) -> None:
    """Raise SpecError if the recipe has no model of one of these sizes, or two of them are the same model."""
    draft, _ = draft_recipe(tables)
    require(draft.start is None, "a scaling study trains new models; give a recipe with [model], without `from`")
    models = [draft_recipe(override(tables, size_values(tables, size, power)))[0].model for size in sizes]
    for size, model in zip(sizes, models, strict=True):
        same = sizes[models.index(model)]
        require(same == size, f"--sizes: {same} and {size} are the same model; leave one out")


def run_title(tables: Mapping[str, Any], values: Mapping[str, str], with_seed: bool) -> str:
    """The size, the tokens and the learning rate of a run."""
    draft, _ = draft_recipe(override(tables, values))
    layers = values.get("model.layers.0.times")
    if layers is not None:
        layers = int(layers) * len(tables["model"]["layers"][0]["blocks"])
    tokens = draft.train.steps * draft.data.rows * draft.data.length
    title = f"{GridSize(int(values['model.width']), layers)}, {tokens:,} tokens, lr {draft.train.lr:g}"
    return f"{title}, seed {draft.train.seed}" if with_seed else title


def size_values(tables: Mapping[str, Any], size: GridSize, power: float) -> dict[str, str]:
    """The values of a size, and its learning rate."""
    model = tables.get("model", {})
    width = model.get("width") if isinstance(model, Mapping) else None
    if not isinstance(width, int):
        raise SpecError(
            "the recipe has no model.width, and --sizes scales the width of one stack; choose a recipe such as llama"
        )
    ratio = size.width / width
    try:
        rate = tables.get("train", {}).get("lr", Training.lr) * ratio**-power
    except OverflowError:
        rate = math.inf
    require(
        0 < rate < math.inf,
        f"--lr-power {power:g} gives the width {size.width} the learning rate {rate:g}; choose a power such as 0.5",
    )
    values = {"model.width": str(size.width)}
    for name, hidden in hidden_sizes(model, "model"):
        values[name] = str(max(1, round(hidden * ratio / HIDDEN_STEP)) * HIDDEN_STEP)
    if size.layers is not None:
        runs = model.get("layers")
        blocks = len(runs[0].get("blocks", [])) if isinstance(runs, list) and len(runs) == 1 else 0
        require(blocks > 0, f"--sizes {size}: model.layers is not one repeated pattern of blocks; give widths alone")
        require(
            size.layers % blocks == 0,
            f"--sizes {size}: the pattern has {blocks} layers, which do not divide {size.layers}; give a multiple",
        )
        values["model.layers.0.times"] = str(size.layers // blocks)
    return values | {"train.lr": f"{rate:.4g}"}


def hidden_sizes(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """The dotted names of all hidden sizes in a table, and their values."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        if key == "hidden" and isinstance(child, int):
            yield f"{name}.{key}", child
        else:
            yield from hidden_sizes(child, f"{name}.{key}")


def length_values(train: Training, tokens: int, per_step: int) -> dict[str, str]:
    """The steps and the warm-up of a run of this many tokens."""
    steps = round(tokens / per_step)
    require(
        steps >= FEWEST_STEPS,
        f"{tokens:,} tokens are {steps} steps of {per_step:,} tokens; give at least {FEWEST_STEPS * per_step:,} tokens "
        "(or minutes for them), or lower data.rows",
    )
    schedule: Schedule = train.schedule
    warmup = min(schedule.warmup, steps // WARMUP_PART)
    return {
        "train.steps": str(steps),
        "train.schedule.kind": schedule.kind,
        "train.schedule.warmup": str(warmup),
    }
