"""A plan as groups of numbers: data for JSON, and rows of formatted numbers for a table.

The name of a group determines the unit of its numbers: bytes if it contains "bytes" (a row shows GB = 10⁹ and
GiB = 2³⁰, because papers and vendors mix them), FLOPs if it contains "flops", otherwise a count.
"""

from collections import Counter
from typing import Any

from regard.models.base import Model
from regard.parts.state import PerToken, declarations
from regard.planning.cost import Costs
from regard.planning.flops import (
    attention_equals_rest,
    causal_pairs,
    flops_by_part,
    full_pairs,
    window_pairs,
    window_reach,
)
from regard.planning.memory import (
    FORMATS,
    LISTED,
    STORED,
    cached_tokens_that_fit,
    format_of,
    score_bytes,
    sequences_to_exceed_weights,
    standard_traffic,
    tiled_traffic,
    tokens_to_match_weights,
)
from regard.planning.parameters import all_bodies
from regard.planning.scaling import BESIROGLU, flops_6nd
from regard.planning.speed import best_drafts, device_of, expected_tokens, speedup
from regard.planning.training import (
    BITS_PER_PARAMETER,
    adapted_shapes,
    full_training_bytes,
    lora_parameters,
    lora_training_bytes,
)

Groups = dict[str, Any]
MOST_TRAINED = 1e18  # tokens
PREFIXES = {1000: ["", *"kMGTPEZY"], 1024: ["", *(f"{prefix}i" for prefix in "KMGTPEZY")]}


def groups(plan: Costs) -> Groups:
    """The numbers of a plan. A crossover that does not exist is None."""
    crossing = attention_equals_rest(plan.spec)
    stored = (STORED,) if plan.weights == STORED else ()
    return {
        "context": plan.context,
        "batch": plan.batch,
        "dtype": plan.dtype,
        "weights": plan.weights,
        "parameters": {"total": plan.parameters, "active": plan.count.active} | plan.count.parts,
        "weight_bytes": {name: plan.weight_bytes(name) for name in (*stored, *LISTED)},
        **attention_groups(plan),
        "flops_per_token": {
            "forward": plan.forward_flops,
            "training": plan.training_flops,
            "6N": flops_6nd(plan.count.active, 1),
        },
        "crossovers": {"attention_equals_rest": crossing, "if_causal": crossing and 2 * crossing},
        **(decoding_groups(plan) if plan.decoder else {}),
        "training_bytes": {"total": sum(plan.training_bytes.values())} | plan.training_bytes,
    }


def attention_groups(plan: Costs) -> Groups:
    """The shapes of attention, the pairs of a query and a key, and the bytes of materialized scores."""
    if not plan.attention_shapes:
        return {}
    shapes = {
        f"attention_{heads}x{head_dim}_kv_{kv_heads}": {"layers": layers, "head_dim": head_dim}
        for (heads, kv_heads, head_dim), layers in plan.attention_shapes.items()
    }
    heads, itemsize = max(heads for heads, _, _ in plan.attention_shapes), max(16, format_of(plan.dtype).bits) // 8
    scores = {name: score_bytes(plan.context, n, itemsize) for name, n in (("per_head", 1), ("per_layer", heads))}
    pairs = {"full": full_pairs(plan.context), "causal": causal_pairs(plan.context)}
    return shapes | {"pairs": pairs} | window_groups(plan) | {"score_bytes": scores}


def window_groups(plan: Costs) -> Groups:
    """Layers, reach and pairs of every causal window; pairs include those with attention sinks, if the mask has any."""
    windows = Counter(
        (state.window, state.window + state.first)
        for body, width in all_bodies(plan.spec)
        for state in declarations(body.memory(width))
        if isinstance(state, PerToken) and state.window and state.window + state.first == body.max_keys
    )
    return {
        f"window_of_{window}": {
            "layers": layers,
            "reach": window_reach(layers, window),
            "pairs": window_pairs(plan.context, keys),
            "times_fewer_than_full": full_pairs(plan.context) / window_pairs(plan.context, keys),
            "times_fewer_than_causal": causal_pairs(plan.context) / window_pairs(plan.context, keys),
        }
        for (window, keys), layers in sorted(windows.items())
    }


def decoding_groups(plan: Costs) -> Groups:
    assert plan.decoder is not None
    weights, kv = plan.weight_bytes(), plan.kv_bytes_per_token
    return {
        "decode_flops": {"total": plan.decode_flops} | flops_by_part(plan.decoder, 1, plan.context),
        "cache_bytes": {
            "kv_per_token": kv,
            "kv": plan.kv_bytes(),
            "kv_without_ring_buffers": plan.kv_bytes(ring=False),
            "states": plan.state_bytes,
        },
        "bytes_read_per_step": {"weights": plan.weights_read, "cache": plan.cache_read},
        "intensity": {"decode": round(plan.intensity, 3)},
        "cache_equals_weights": {
            "tokens": tokens_to_match_weights(weights, kv),
            "sequences_of_this_context": sequences_to_exceed_weights(weights, kv, plan.context),
        },
    }


def training_run_groups(plan: Costs, tokens: float) -> Groups:
    """FLOPs of training on this many tokens, and the model size and token count that are optimal for 6ND FLOPs."""
    if not 1 <= tokens <= MOST_TRAINED:
        raise ValueError(f"tokens={tokens} must be from 1 to {MOST_TRAINED:.0e}")
    compute = flops_6nd(plan.count.active, tokens)
    best_parameters, best_tokens = BESIROGLU.optimum(compute)
    return {
        "training_run_flops": {"total": plan.training_flops * tokens, "6ND": compute},
        "training_run": {
            "tokens": tokens,
            "tokens_per_parameter": tokens / plan.count.active,
            "optimal_parameters_for_6ND": best_parameters,
            "optimal_tokens_for_6ND": best_tokens,
        },
    }


def lora_groups(spec: Model, parameters: int, rank: int, targets: tuple[str, ...]) -> Groups:
    """The size of an adapter, and the memory for training it and for training all parameters."""
    adapters = lora_parameters(spec, rank, targets)
    return {
        "lora": {
            "rank": rank,
            "layers": len(adapted_shapes(spec, targets)),
            "parameters": adapters,
            "times_smaller": parameters / adapters,
            "capacity_bits": BITS_PER_PARAMETER * adapters,
        },
        "lora_bytes": {
            "adapter_in_float16": 2 * adapters,
            "full_training": sum(full_training_bytes(parameters).values()),
            "lora_training": sum(lora_training_bytes(parameters, adapters).values()),
            "qlora_training": sum(lora_training_bytes(parameters, adapters, "nf4").values()),
        },
    }


def device_groups(name: str, plan: Costs) -> Groups:
    """The traffic of attention, the cached tokens that fit on a device, and upper bounds on its speed."""
    device = device_of(name)
    step = device.seconds(plan.batch * plan.decode_flops, plan.bytes_read)
    prompt = device.seconds(plan.batch * plan.flops(plan.context, plan.context), plan.weights_read)
    occupied = plan.weight_bytes() + plan.state_bytes
    fast_memory = device.shared_memory // 2  # in numbers of 16 bits
    traffic = {
        f"traffic_bytes_head_dim_{head_dim}": {
            "materialized_scores": 2 * standard_traffic(plan.context, head_dim),
            "tiled": 2 * tiled_traffic(plan.context, head_dim, fast_memory),
        }
        for _, _, head_dim in plan.attention_shapes
    }
    return traffic | {
        f"{name}_bytes": {"memory": device.memory, "free_beside_weights": device.memory - occupied},
        f"on_{name}": {
            "cached_tokens_that_fit": cached_tokens_that_fit(device.memory, occupied, plan.kv_bytes_per_token),
            "seconds_to_first_token": prompt,
            "decode_tokens_per_second": plan.batch / step,
        },
    }


def speculation_groups(acceptance: float, cost: float) -> Groups:
    """The number of draft tokens with the largest speed-up, and that speed-up."""
    drafts = best_drafts(acceptance, cost)
    return {
        "speculation": {
            "acceptance": acceptance,
            "draft_step_cost": cost,
            "best_drafts": drafts,
            "tokens_per_pass": expected_tokens(acceptance, drafts),
            "speedup": speedup(acceptance, drafts, cost),
        }
    }


def rows(data: Groups) -> list[tuple[str, str, str]]:
    """(group, quantity, formatted number)"""
    return [
        (
            group.replace("_", " "),
            quantity if quantity in FORMATS else quantity.replace("_", " "),
            format_value(group, number, values),
        )
        for group, values in data.items()
        if isinstance(values, dict)
        for quantity, number in values.items()
    ]


def table(data: Groups) -> str:
    """The rows as text in three columns; the name of a group is in its first row only."""
    lines, widths = rows(data), [max(map(len, column)) for column in zip(*rows(data), strict=True)]
    previous_groups = ["", *(group for group, _, _ in lines)]
    return "\n".join(
        f"{'' if group == previous else group:{widths[0]}}  {quantity:{widths[1]}}  {number:>{widths[2]}}"
        for previous, (group, quantity, number) in zip(previous_groups, lines, strict=False)
    )


def format_value(group: str, number: float | None, values: dict[str, Any]) -> str:
    if number is None:
        return "never"
    if group == "parameters":
        return f"{format_number(number)} ({number / values['total']:.1%})"
    if "bytes" in group:
        return format_bytes(number)
    if "flops" in group:
        return format_number(number, "FLOP")
    return f"{number:,}" if isinstance(number, int) else format_number(number)


def format_number(number: float, unit: str = "", step: int = 1000) -> str:
    """12_345_678, "B", 1024 -> '11.8 MiB'"""
    scaled, prefixes = float(number), PREFIXES[step]
    while abs(scaled) >= step and len(prefixes) > 1:
        scaled, prefixes = scaled / step, prefixes[1:]
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}"
    return f"{digits} {prefixes[0]}{unit}".rstrip()


def format_bytes(number: float) -> str:
    """1_342_177_280 -> '1.34 GB (1.25 GiB)'"""
    if abs(number) < 1000:
        return format_number(number, "B")
    return f"{format_number(number, 'B')} ({format_number(number, 'B', 1024)})"
