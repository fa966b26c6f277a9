"""Prefill and decode: what the planner estimates for a device, and a request that an engine measures now."""

import time
from functools import cache

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.instruments.examples import example_subject
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Subject
from regard.instruments.panels import bars, numbers, table
from regard.instruments.vocabulary import EXAMPLE, SERVED
from regard.models.decoder import Decoder
from regard.planning.cost import Costs
from regard.planning.groups import format_bytes, format_number
from regard.planning.model_plan import Plan, plan
from regard.planning.speed import device_of

PLANNED = ("gpt2", "llama-7b", "mistral-7b", "llama-3.1-8b")
PROMPT, NEW = 8, 6  # tokens of the measured request


@cache
def planned(name: str) -> Plan:
    return plan(name, context=1, dtype="bfloat16")


@cache
def example_engine() -> Engine:
    return Engine(example_subject().model, rows=1)


def arrivals(engine: Engine, ids: list[int], new: int) -> list[float]:
    """Seconds from the submission of a request to each of its new tokens."""
    start, times = time.perf_counter(), []
    request = engine.submit(ids, Sampling(max_new=new, temperature=0))
    while request.finish is None:
        times += [time.perf_counter() - start for _ in engine.step()]
    return times


def prompt_of(subject: Subject) -> list[int]:
    """Any ids. With the new tokens they fill no block of the cache, so the next request computes all of them again."""
    return [id % subject.model.spec.vocab for id in range(PROMPT)]


def measured_arrivals(subject: Subject | None, of: str) -> tuple[str, list[float]]:
    """The name of the model that was measured, and when its tokens arrived."""
    if of == EXAMPLE:
        chosen = example_subject()
        return chosen.name, arrivals(example_engine(), prompt_of(chosen), NEW)
    if subject is None or subject.arrivals is None:
        raise ValueError("no decoder is served whose engine could be measured; choose the example model")
    return subject.name, subject.arrivals(prompt_of(subject), NEW)


def timeline(name: str, times: list[float]) -> list[Panel]:
    steps = [times[0], *(b - a for a, b in zip(times, times[1:], strict=False))]
    labels = [f"prefill of {PROMPT} and token 1", *(f"token {i}" for i in range(2, len(times) + 1))]
    rest = steps[1:]
    return [
        bars(
            f"measured now by the engine: {name}, {PROMPT} prompt tokens in one pass",
            [(label, 1000 * seconds) for label, seconds in zip(labels, steps, strict=True)],
            "ms",
        ),
        numbers(
            {
                "measured time to the first token, ms": 1000 * times[0],
                "measured time per later token, ms": 1000 * sum(rest) / len(rest),
                "prompt tokens per second": PROMPT / times[0],
                "new tokens per second": len(rest) / sum(rest),
            },
            f"measured: {name}",
        ),
    ]


def prefill(
    subject: Subject | None, model: str, device: str, prompt: int, new: int, batch: int, of: str
) -> list[Panel]:
    costs, machine = planned(model), device_of(device)

    def at(context: int) -> Costs:
        return Costs(costs.spec, context, batch, costs.dtype, costs.weights, costs.count)

    most = costs.spec.context if isinstance(costs.spec, Decoder) else None
    if most is not None and prompt + new > most:
        raise ValueError(f"{prompt} prompt and {new} new tokens exceed the {most:,} of {model}; choose fewer")
    whole, last = at(prompt), at(prompt + new // 2)  # the middle of the decode steps
    first = machine.seconds(batch * whole.flops(prompt, prompt), whole.weights_read)
    step = machine.seconds(batch * last.decode_flops, last.bytes_read)
    rows = [
        ("prefill", prompt * batch, batch * whole.flops(prompt, prompt), whole.weights_read),
        ("one decode step, in the middle", batch, batch * last.decode_flops, last.bytes_read),
    ]
    ridge, end = machine.flops / machine.bandwidth, at(prompt + new)
    return [
        bars(
            f"timeline of {model} on {device}, estimates",
            {"prefill": 1000 * first, f"{new} decode steps": 1000 * new * step},
            "ms",
        ),
        *timeline(*measured_arrivals(subject, of)),
        table(
            "what limits each phase",
            ("phase", "tokens", "FLOPs", "bytes read", "FLOPs per byte", "limited by"),
            [
                (name, n, format_number(f), format_bytes(b), f / b, "compute" if f / b > ridge else "memory bandwidth")
                for name, n, f, b in rows
            ],
        ),
        numbers(
            {
                "time to the first token, ms": 1000 * first,
                "time per later token, ms": 1000 * step,
                "tokens per second": batch / step,
                "weights and cache / memory of the device": (end.weight_bytes() + end.kv_bytes()) / machine.memory,
                "FLOPs per byte at which the device is balanced": ridge,
            },
            f"estimates: {model} on {device}",
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "prefill-decode", "Prefill and decode",
        "A long prompt is one parallel pass that computes; every new token is a step that mostly reads memory.",
        r"t \approx \max\!\left(\frac{\text{FLOPs}}{\text{FLOP/s}},\; "
        r"\frac{\text{bytes read}}{\text{bandwidth}}\right)",
        (
            Selection("model", "model", PLANNED, "llama-3.1-8b"),
            Selection("device", "device", ("a100", "h100", "h200", "rtx4090"), "h100"),
            Slider("prompt", "prompt tokens", 8, 8192, 512, 8),
            Slider("new", "new tokens", 1, 256, 32),
            Slider("batch", "sequences", 1, 64, 1),
            Selection("of", "measured model", (EXAMPLE, SERVED), EXAMPLE),
        ),
        Quiz(
            "What raises the number of tokens per second most: a faster processor or more sequences at once?",
            "More sequences: a decode step reads the weights once for all of them, so 64 give 50 times as many tokens.",
            {"batch": 64},
        ),
        prefill, ("planning/cost.py", "planning/speed.py", "engine/engine.py"), reads_model=True,
    ),
)  # fmt: skip
