"""A plan as groups of numbers: plain data for JSON, and rows of text for people.

A group's name says what its numbers are: bytes carry both their units in a row, FLOPs theirs, all else is a count.
"""

from collections import Counter
from typing import Any

from regard.parts.state import PerToken, each
from regard.plan.attention import causal_pairs, full_pairs, score_bytes, window_pairs, window_reach
from regard.plan.cost import Plan, flops_by_part
from regard.plan.crossover import attention_equals_rest, texts_as_heavy, tokens_as_heavy
from regard.plan.formats import FORMATS, format_of
from regard.plan.parts import all_bodies
from regard.plan.units import amount, size

Groups = dict[str, Any]


def groups(plan: Plan) -> Groups:
    """Sizes are in bytes; what never happens is None."""
    crossing = attention_equals_rest(plan.spec)
    return {
        "context": plan.context,
        "batch": plan.batch,
        "dtype": plan.dtype,
        "weights": plan.weights,
        "parameters": {"total": plan.parameters, "active": plan.count.active} | plan.count.parts,
        "weight_bytes": {name: plan.weight_bytes(name) for name in FORMATS},
        **attention(plan),
        "flops_per_token": {"forward": plan.forward_flops, "training": plan.training_flops},
        "crossovers": {"attention_equals_rest": crossing, "in_a_causal_text": crossing and 2 * crossing},
        **(decoding(plan) if plan.writer else {}),
        "training_bytes": {"total": sum(plan.training_bytes.values())} | plan.training_bytes,
    }


def attention(plan: Plan) -> Groups:
    """The shapes of attention, and what n² means here: pairs, and bytes if the scores were written down."""
    if not plan.attentions:
        return {}
    shapes = {
        f"attention_{heads}x{head_dim}_on_{kv_heads}": {"layers": layers, "head_dim": head_dim}
        for (heads, kv_heads, head_dim), layers in plan.attentions.items()
    }
    heads, itemsize = max(heads for heads, _, _ in plan.attentions), max(16, format_of(plan.dtype).bits) // 8
    scores = {name: score_bytes(plan.context, n, itemsize) for name, n in (("of_a_head", 1), ("of_a_layer", heads))}
    pairs = {"full": full_pairs(plan.context), "causal": causal_pairs(plan.context)}
    return shapes | {"pairs": pairs} | windows(plan) | {"score_bytes": scores}


def windows(plan: Plan) -> Groups:
    """Causal windows of consecutive keys. The first tokens, which some attend to as well, count as pairs."""
    found = Counter(
        (declared.window, body.max_keys)
        for body, width in all_bodies(plan.spec)
        for declared in each(body.memory(width))
        if isinstance(declared, PerToken) and declared.window and declared.window + declared.first == body.max_keys
    )
    return {
        f"window_of_{window}": {
            "layers": layers,
            "reach": window_reach(layers, window),
            "pairs": window_pairs(plan.context, keys),
            "times_fewer_than_full": full_pairs(plan.context) / window_pairs(plan.context, keys),
            "times_fewer_than_causal": causal_pairs(plan.context) / window_pairs(plan.context, keys),
        }
        for (window, keys), layers in sorted(found.items())
    }


def decoding(plan: Plan) -> Groups:
    """What writing a token costs."""
    assert plan.writer is not None
    weights, kv = plan.weight_bytes(), plan.kv_bytes_per_token
    return {
        "decode_flops": {"total": plan.decode_flops} | flops_by_part(plan.writer, 1, plan.context),
        "memory_bytes": {
            "kv_per_token": kv,
            "kv": plan.kv_bytes(),
            "kv_without_rings": plan.kv_bytes(ring=False),
            "states": plan.state_bytes,
        },
        "bytes_read_in_a_step": {"weights": plan.weights_read, "memory": plan.memory_read},
        "intensity": {"decode": round(plan.intensity, 3)},
        "cache_equals_weights": {
            "tokens": tokens_as_heavy(weights, kv),
            "texts_of_this_context": texts_as_heavy(weights, kv, plan.context),
        },
    }


def rows(data: Groups) -> list[tuple[str, str, str]]:
    """(group, quantity, amount)"""
    return [
        (group.replace("_", " "), quantity.replace("_", " "), written(group, number, values))
        for group, values in data.items()
        if isinstance(values, dict)
        for quantity, number in values.items()
    ]


def written(group: str, number: float | None, values: dict[str, Any]) -> str:
    if number is None:
        return "never"
    if group == "parameters":
        return f"{amount(number)} ({number / values['total']:.1%})"
    if "bytes" in group:
        return size(number)
    if "flops" in group:
        return amount(number, "FLOP")
    return f"{number:,}" if isinstance(number, int) else amount(number)
