"""Positions: sinusoids, rotations, and which scheme to choose."""

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Switch
from regard.instruments.panels import heatmap, lines, numbers, scatter, table
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Full
from regard.kernels.attention.reference import attention_scores
from regard.layout import TokenLayout
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope, rotations
from regard.parts.position.rope_scaling import NTK, LinearScaling, Llama3, Scaling, Yarn
from regard.parts.position.sinusoidal import Sinusoidal, sinusoidal_embeddings
from regard.parts.position.t5 import T5Buckets
from regard.spec import toml_value, without_defaults

TRAINED = 2048  # tokens of training, for the scalings
FACTOR = 4.0
SCALINGS: dict[str, Scaling | None] = {
    "none": None,
    "linear": LinearScaling(FACTOR),
    "NTK": NTK(FACTOR),
    "YaRN": Yarn(FACTOR, TRAINED),
    "Llama 3": Llama3(FACTOR, TRAINED),
}
SCHEMES: dict[str, Position] = {
    "none": NoPosition(),
    "learned": Learned(TRAINED),
    "sinusoidal": Sinusoidal(),
    "T5 buckets": T5Buckets(),
    "ALiBi": Alibi(),
    "RoPE": Rope(),
    "RoPE with YaRN": Rope(scaling=Yarn(FACTOR, TRAINED)),
}


def sinusoids(width: int, position: int, base: float, tokens: int) -> list[Panel]:
    spec, position = Sinusoidal(base), min(position, tokens - 1)
    vectors = sinusoidal_embeddings(torch.arange(tokens), width, spec)  # (L, D)
    dots = (vectors @ vectors[position]).tolist()
    shown = [0, min(width - 2, width // 4 * 2), width - 2]
    waves = {f"coordinate {i}": list(enumerate(vectors[:, i].tolist())) for i in dict.fromkeys(shown)}
    return [
        heatmap(
            "position down, coordinate across",
            vectors,
            range(tokens),
            range(width),
            "signed",
            "position",
            position,
            shows_numbers=False,
        ),
        heatmap(
            f"fingerprint of position {position}: its vector",
            vectors[position][None],
            [position],
            range(width),
            "signed",
            shows_numbers=False,
        ),
        lines("three coordinates", waves, "position", "value", marks={"position": position}),
        lines(
            "dot product with the chosen position",
            {"dot product": list(enumerate(dots))},
            "position",
            "dot product",
            marks={"position": position},
        ),
        numbers(
            {
                "longest wavelength": 2 * math.pi * base ** ((width - 2) / width),
                "dot product with itself": dots[position],
            }
        ),
    ]


@torch.no_grad()
def scores_at(q: Tensor, k: Tensor, spec: Position, m: int, keys: list[int]) -> list[float]:
    """The scores of a query at position m with the same key at these positions, for any scheme."""
    width = q.shape[-1]
    module, layout = spec.build(width, 1), TokenLayout(torch.tensor([[m, *keys]]))
    x = module.embed(torch.stack([q, *[k] * len(keys)])[None], layout)  # (1, L, E)
    rotated, rotated_keys = module.rotate(x[:, None], x[:, None], layout)
    options = ScoreOptions(Full(), width**-0.5, module.bias(module.share_bias(layout)))
    return attention_scores(rotated, rotated_keys, layout, options)[0, 0, 0, 1:].tolist()


def rope(m: int, n: int, base: float, pair: int, scaling: str) -> list[Panel]:
    spec, width = Rope(base, scaling=SCALINGS[scaling]), 16
    pair = min(pair, width // 2) - 1
    layout = TokenLayout(torch.tensor([[m, n]]))
    cos, sin = (x[0, 0, :, pair].tolist() for x in rotations(layout, spec, width, torch.float64))
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(2, width, dtype=torch.float64, generator=generator)
    frequencies = spec.frequencies(width, layout).flatten()[: width // 2]
    gap = n - m
    shifts = [0, 1, 7, 100, 1000]
    same = [(m + s, n + s, gap, *scores_at(q, k, spec, m + s, [n + s])) for s in shifts]
    distances = list(range(0, 129, 2))
    return [
        scatter(
            "the chosen pair of coordinates, rotated",
            [(cos[0], sin[0], f"query at {m}"), (cos[1], sin[1], f"key at {n}")],
            ["query", "key"],
            arrows=True,
        ),
        table("the score depends on the distance only", ("query at", "key at", "distance", "score"), same),
        lines(
            "score against distance",
            {"score": list(zip(distances, scores_at(q, k, spec, 0, distances), strict=True))},
            "distance",
            "score",
        ),
        numbers(
            {
                "angle per position, radians": float(frequencies[pair]),
                "angle between query and key": float(frequencies[pair]) * gap,
                "positions per turn of the slowest pair": 2 * math.pi / float(frequencies[-1]),
            }
        ),
    ]


REASONS = {
    "learned": "one trained vector per position suffices if no sequence is longer",
    "RoPE": "a score depends on the distance only, and there are no weights",
    "RoPE with YaRN": "scaled angles stay within those of training, and a short training adapts to them",
    "ALiBi": "its bias is a fixed function of the distance, defined at every length",
    "T5 buckets": "all long distances share a trained bucket, and both directions have their own",
}
TIMES = {"never": 1.0, "4 times": 4.0, "32 times": 32.0}


def choose_scheme(model: str, longer: str, tuned: bool) -> str:
    if model == "encoder":
        return "learned" if longer == "never" else "RoPE" if tuned else "T5 buckets"
    if longer == "never":
        return "RoPE"
    return "RoPE with YaRN" if tuned else "ALiBi"


def position_choice(model: str, longer: str, tuned: bool) -> list[Panel]:
    chosen = choose_scheme(model, longer, tuned)
    spec = SCHEMES[chosen]
    if isinstance(spec, T5Buckets):
        spec = replace(spec, bidirectional=model == "encoder")
    if isinstance(spec, Rope) and spec.scaling is not None:
        spec = replace(spec, scaling=Yarn(TIMES[longer], TRAINED))
    place = "stack" if "stack" in spec.places else "attention"
    line = "position = " + toml_value(without_defaults(spec), "position")
    return [
        numbers({"choose": chosen, "because": REASONS[chosen], "place": place}),
        table("in a recipe", (f"a field of the {place}",), [(line,)]),
        table("properties of the parts, with a trained length of 2,048", COLUMNS, [measure(name) for name in SCHEMES]),
    ]


COLUMNS = ("scheme", "weights", "score changes if both move by 100", "position 8,191", "new angles at 8,191")


@cache
def measure(name: str) -> tuple[str, int, str, str, str]:
    spec, width = SCHEMES[name], 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = spec.build(width, 1)
        q, k = torch.randn(2, width)
        torch.manual_seed(1)
        (before,) = scores_at(q, k, spec, 3, [10])
        torch.manual_seed(1)
        (after,) = scores_at(q, k, spec, 103, [110])
    limit = spec.max_positions
    angles = "–"
    if isinstance(spec, Rope):
        layout = TokenLayout(torch.tensor([[0]]))
        plain = Rope(spec.base).frequencies(width, layout)
        reached = 8191 * spec.frequencies(width, layout)
        unseen = (plain * (TRAINED - 1) < 2 * math.pi) & (reached > plain * (TRAINED - 1) * 1.01)
        angles = f"{int(unseen.sum())} of {width // 2} pairs"
    weights = sum(parameter.numel() for parameter in module.parameters())
    moved = "no" if abs(before - after) < 1e-4 else f"by {abs(before - after):.2g}"
    return name, weights, moved, "refused" if limit is not None and limit <= 8191 else "runs", angles


INSTRUMENTS = (
    Instrument(
        "sinusoids", "Sinusoidal positions",
        "Every position has its own pattern of slow and fast waves; the dot product of two depends on their distance.",
        r"P_{t,2i} = \sin\!\left(t / b^{2i/d}\right), \qquad P_{t,2i+1} = \cos\!\left(t / b^{2i/d}\right)",
        (
            Slider("width", "width d", 4, 64, 32, 2),
            Slider("position", "position", 0, 63, 20),
            Slider("base", "base b", 10.0, 10000.0, 10000.0, 10.0),
            Slider("tokens", "positions", 8, 64, 48),
        ),
        Quiz(
            "What is the dot product of a position's vector with itself?",
            "d/2, for every position: each pair contributes sin² + cos² = 1.",
            {"width": 32, "position": 7},
        ),
        sinusoids, ("parts/position/sinusoidal.py",),
    ),
    Instrument(
        "rope", "Rotary positions",
        "Queries and keys are rotated by angles proportional to their positions, so a score depends on n − m only.",
        r"\langle R_m q,\, R_n k\rangle = \langle q,\, R_{n-m} k\rangle, \qquad \theta_i = b^{-2i/d}",
        (
            Slider("m", "position of the query", 0, 128, 3),
            Slider("n", "position of the key", 0, 128, 10),
            Slider("base", "base b", 100.0, 1000000.0, 10000.0, 100.0),
            Slider("pair", "pair of coordinates", 1, 8, 3),
            Selection("scaling", "scaling for 4 times the length", tuple(SCALINGS), "none"),
        ),
        Quiz(
            "Move query and key by the same number of positions. What happens to the score?",
            "Nothing: (2, 5) and (100, 103) have the same score, because only n − m enters.",
            {"m": 100, "n": 103},
        ),
        rope, ("parts/position/rope.py", "parts/position/rope_scaling.py"),
    ),
    Instrument(
        "position-choice", "Which positions?",
        "Three questions about the model lead to a scheme; the table shows what the parts do.",
        r"\text{score}_{ij} = \frac{(R_i q_i)\cdot(R_j k_j)}{\sqrt{d}} + b(i-j)",
        (
            Selection("model", "kind of model", ("decoder", "encoder"), "decoder"),
            Selection("longer", "longer than in training", tuple(TIMES), "4 times"),
            Switch("tuned", "can be trained again at the longer length", True),
        ),
        Quiz(
            "Which scheme needs no second training to run on longer sequences, in a decoder?",
            "ALiBi is chosen here: its bias is a fixed function of the distance. T5 buckets, the last of which has all "
            "longer distances, and a decoder without positions also run unchanged.",
            {"model": "decoder", "longer": "32 times", "tuned": False},
        ),
        position_choice, ("parts/position/alibi.py", "parts/position/t5.py", "parts/position/learned.py"),
    ),
)  # fmt: skip
