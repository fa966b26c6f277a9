"""Number formats: the values that a weight can have, the bytes of a large model, and two kinds of quantization.

    post-training         W' = nearest(W)                      once, after training
    quantization-aware    loss(nearest(W)), ∂W'/∂W := 1        in every step of a short training

Both kinds are computed here with the example model (examples.py).
"""

from copy import deepcopy
from functools import cache
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.fake_quantized import FakeQuantization, fake_quantize
from regard.formats.base import NumberFormat
from regard.formats.names import format_named
from regard.instruments.examples import WIDTH, ids, sentence, trained
from regard.instruments.instrument import Instrument, Panel, Quiz, Slider
from regard.instruments.panels import bars, lines, numbers, table
from regard.instruments.words import random_matrix
from regard.planning.groups import format_bytes
from regard.planning.parameters import count_parameters
from regard.planning.published import llama_70b

FORMATS = {  # by the name on the slider, from many bits to few
    "FP16": "fp16", "BF16": "bf16", "FP8 E4M3": "fp8_e4m3", "FP8 E5M2": "fp8_e5m2", "INT8": "int8", "INT6": "int6",
    "INT4": "int4", "NF4": "nf4", "INT3": "int3", "INT2": "int2",
}  # fmt: skip
NAMES = tuple(FORMATS)
ROW = 64  # weights; the first is set by the slider
LARGE = (8192, 8192)  # shape of a weight, for the bits per number with scales
GPU = 80e9  # bytes
STEPS, RATE, SENTENCES = 30, 0.02, 16  # of quantization-aware training


@cache
def weight_row() -> Tensor:
    """(1, 64) random weights from -0.9 to 1; the first one is set later."""
    row = 0.35 * random_matrix(1, ROW, seed=0).clamp(-2, 2)
    row[0, 1], row[0, 2] = 1.0, -0.9
    return row


def round_weight(format: NumberFormat, weight: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The row with this weight, the row as it is read from the format, and the scales of the first weight."""
    row = weight_row().clone()
    row[0, 0] = weight
    stored = format.quantize(row)
    scales = {name: values[0, :1] for name, values in format.grid(stored).items()}
    return row, format.dequantize(stored), scales


def nearest_between(
    format: NumberFormat, scales: dict[str, Tensor], low: float, high: float, count: int
) -> tuple[Tensor, Tensor]:
    """Equally spaced weights, and the nearest numbers of the format."""
    values = torch.linspace(low, high, count)
    return values, format.nearest(values, {name: scale.expand(count) for name, scale in scales.items()})


def staircase(format: NumberFormat, scales: dict[str, Tensor], low: float, high: float) -> list[tuple[float, float]]:
    """The points (W, W') at the ends of each step between two weights, as exact as a plot needs them."""
    values, rounded = nearest_between(format, scales, low, high, 1001)
    ends = (rounded[1:] != rounded[:-1]).nonzero().flatten().tolist()
    kept = sorted({0, len(values) - 1, *ends, *(i + 1 for i in ends)})
    return [(float(values[i]), float(rounded[i])) for i in kept]


def neighbours(format: NumberFormat, scales: dict[str, Tensor], rounded: float, distance: float) -> tuple[float, float]:
    """The next smaller and larger number of the format; itself at the end of the range."""
    _, near = nearest_between(format, scales, rounded - distance, rounded + distance, 1001)
    steps = near[(near - rounded).abs() > 1e-9] - rounded
    below, above = steps[steps < 0], steps[steps > 0]
    return (
        rounded + float(below.max()) if len(below) else rounded,
        rounded + float(above.min()) if len(above) else rounded,
    )


def bits_per_weight(format: NumberFormat) -> float:
    """Scales included."""
    return 8 * format.bytes(LARGE) / (LARGE[0] * LARGE[1])


@cache
def large_parameters() -> int:
    return count_parameters(llama_70b()).total


@cache
def large_bytes() -> dict[str, float]:
    """Bytes of a model of 70B parameters, all of them in one format."""
    bits = {name: bits_per_weight(format_named(short)) for name, short in FORMATS.items()}
    return {name: large_parameters() * b / 8 for name, b in bits.items()}


def sentences(seed: str, count: int) -> Tensor:
    rng = Random(seed)
    return torch.tensor([ids(sentence(rng)) for _ in range(count)])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, -2), rows[:, 1:].flatten())


def train_briefly(model: nn.Module) -> None:
    """Gradient descent with momentum."""
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(STEPS):
        grads = torch.autograd.grad(loss_of(model, sentences(f"train {step}", SENTENCES)), parameters)
        with torch.no_grad():
            for parameter, grad, velocity in zip(parameters, grads, velocities, strict=True):
                velocity.mul_(0.9).add_(grad)
                parameter.sub_(RATE * (1 - step / STEPS) * velocity)


@cache
def example_losses(name: str | None) -> tuple[float, float]:
    """The loss of the example model on new sentences, before and after a short training, with its linear layers
    rounded to this format in every forward; None: with the weights as they are."""
    model, test = deepcopy(trained("language-model")).requires_grad_(True), sentences("test", 256)
    if name is not None:
        group = str(WIDTH) if name.startswith(("int", "nf")) and name != "int8" else None
        fake_quantize(model, FakeQuantization(format_named(name, group), head=True))
    with torch.enable_grad():
        before = float(loss_of(model, test).detach())
        train_briefly(model)
        return before, float(loss_of(model, test).detach())


def precision(format: int, weight: float) -> list[Panel]:
    name, chosen = NAMES[format], format_named(FORMATS[NAMES[format]])
    row, read, scales = round_weight(chosen, weight)
    rounded = float(read[0, 0])
    bound = float(chosen.error_bound(chosen.quantize(row)).flatten()[0])
    below, above = neighbours(chosen, scales, rounded, 4 * bound)
    low, high = max(-1.0, weight - 8 * bound), min(1.0, weight + 8 * bound)
    sizes, losses = large_bytes(), {kind: example_losses(kind) for kind in (None, FORMATS[name])}
    (plain, plain_trained), (post, aware) = losses.values()
    return [
        lines(
            f"{name}: each weight becomes the nearest number of the grid",
            {"W": [(-1.0, -1.0), (1.0, 1.0)], "W′": staircase(chosen, scales, -1.0, 1.0)},
            "weight W",
            "W′",
            marks={"W": weight},
        ),
        lines(
            f"the grid around {weight:.4g}",
            {"W": [(low, low), (high, high)], "W′": staircase(chosen, scales, low, high)},
            "weight W",
            "W′",
            marks={"W": weight},
            from_zero=False,
        ),
        numbers(
            {
                "weight W": weight,
                "stored as W′": f"{rounded:.5g}",
                "error |W − W′|": f"{abs(weight - rounded):.2g}",
                "next numbers": f"{below:.5g} and {above:.5g}",
                f"root mean square error of {ROW} weights": float((row - read).pow(2).mean().sqrt()),
                "bits per weight, with scales": bits_per_weight(chosen),
                "Llama 3.1 70B": format_bytes(sizes[name]),
                "GPUs of 80 GB for these weights": -(-int(sizes[name]) // int(GPU)),
            }
        ),
        bars(
            f"weights of Llama 3.1 70B, {large_parameters() / 1e9:.1f}B parameters",
            {name: size / 1e9 for name, size in sizes.items()},
            "GB",
            sets="format",
            selected=format,
        ),
        bars(
            "loss of the example model on 256 new sentences; its linear layers in this format",
            {
                "float32": plain,
                f"float32, {STEPS} more steps": plain_trained,
                f"{name}, post-training": post,
                f"{name}, quantization-aware": aware,
            },
            "nats",
            digits=4,
        ),
        table(
            "two kinds of quantization",
            ("kind", "what it does", "loss above float32"),
            [
                ("post-training", "the trained weights are rounded once", f"{post - plain:+.4f}"),
                (
                    "quantization-aware",
                    f"{STEPS} steps of training round the weights in every forward",
                    f"{aware - plain:+.4f}",
                ),
            ],
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "precision", "Weights of fewer bits",
        "A weight is stored as the nearest number of a format; fewer bits have a coarser grid and take less memory.",
        r"W' = s \cdot \mathrm{nearest}(W / s), \qquad |W - W'| \le \tfrac12\,\text{distance of neighbours}",
        (
            Slider("format", "format", 0, len(NAMES) - 1, 0, names=NAMES),
            Slider("weight", "weight W", -0.9, 1.0, 0.62, 0.01),
        ),
        Quiz(
            "Which number is stored for 0.62 in FP16?",
            "0.62012, so the error is 0.00012. 0.625 would be the nearest sixteenth, which is a grid of 4 bits after "
            "the point, not FP16.",
            {"format": NAMES.index("FP16"), "weight": 0.62},
        ),
        precision, ("formats/floats.py", "formats/integers.py", "formats/nf4.py", "adapt/fake_quantized.py"),
    ),
)  # fmt: skip
