"""Whole models drawn from their specs: the encoder-decoder of 2017, and shapes along a forward."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.instruments.instrument import Instrument, Panel, Quiz, Slider
from regard.instruments.panels import bars, diagram, equation, numbers, table
from regard.lens.hooks import record
from regard.models.presets import transformer_2017
from regard.planning.groups import format_number
from regard.planning.parameters import Parameters, count_parameters
from regard.planning.part_tree import part_tree

PARTS = 10  # of the drawing
EQUATIONS = {  # by the label of the part; x of the encoder, y of the decoder, M masks later tokens
    "tokens": r"x = \sqrt{d}\,E[\mathrm{ids}]",
    "embedding": r"y = \sqrt{d}\,E[\mathrm{ids}]",
    "sinusoidal": r"x + P",
    "attention": r"\mathrm{softmax}\!\left(\frac{Q_x K_x^\top}{\sqrt{d_k}}\right) V_x",
    "causal attention": r"\mathrm{softmax}\!\left(\frac{Q_y K_y^\top}{\sqrt{d_k}} + M\right) V_y",
    "cross attention": r"\mathrm{softmax}\!\left(\frac{Q_y K_x^\top}{\sqrt{d_k}}\right) V_x",
    "feedforward": r"W_{\mathrm{down}}\,\mathrm{relu}(W_{\mathrm{up}}\,x)",
    "unembedding": r"p = \mathrm{softmax}(E\,y)",
}


class Drawn(NamedTuple):
    """A part in the drawing."""

    stack: str
    kind: str
    label: str
    x: float
    y: float


@cache
def drawn_parts() -> list[Drawn]:
    """The parts of both stacks from bottom to top, read from the tree of the spec; norms are not drawn."""
    parts = []
    for x, stack in zip((0.2, 0.8), part_tree(transformer_2017(), 1)["stacks"], strict=True):
        blocks = [block for run in stack["runs"] for block in run["blocks"]]
        bodies = [sublayer["body"] for block in blocks for sublayer in block["sublayers"]]
        column = [*stack["before"], *bodies, *stack["after"]]
        for i, part in enumerate(column):
            causal = any(inner["kind"] == "causal" for inner in part["inner"])
            label = f"causal {part['kind']}" if causal else part["kind"].replace("_", " ")
            parts.append(Drawn(stack["name"], part["kind"], label, x, 1 - i / (len(column) - 1)))
    assert len(parts) == PARTS
    return parts


def drawn_edges() -> list[tuple[str, str, float]]:
    """Up each column, and from the end of the encoder to cross-attention."""
    parts = drawn_parts()
    edges = [(str(i), str(i + 1), 1.0) for i in range(PARTS - 1) if parts[i].stack == parts[i + 1].stack]
    last = max(i for i, part in enumerate(parts) if part.stack == "source")
    return [*edges, *((str(last), str(i), 2.0) for i, part in enumerate(parts) if part.kind == "cross_attention")]


@cache
def counted(layers: int, width: int) -> Parameters:
    return count_parameters(transformer_2017(width=width, heads=8, hidden=4 * width, layers=layers))


def encoder_decoder(layers: int, width: int, part: int) -> list[Panel]:
    counts, parts = counted(layers, width), drawn_parts()
    chosen, nodes = (
        parts[part - 1],
        [{"id": str(i), "label": p.label, "x": p.x, "y": p.y} for i, p in enumerate(parts)],
    )
    table_of_words = chosen.kind in ("tokens", "embedding", "unembedding")
    weights = counts.parts.get("embedding" if table_of_words else f"{chosen.stack} {chosen.kind}", 0)
    return [
        diagram(f"{layers} layers on each side; K and V cross over", nodes, drawn_edges(), "part", part - 1),
        equation(f"{chosen.stack}: {chosen.label}", chosen.label),
        bars("weights by part", {name.replace("_", " "): count for name, count in counts.parts.items()}),
        numbers(
            {
                "its weights in all layers": weights,
                "all weights": format_number(counts.total),
            }
        ),
    ]


STAGES = (
    ("encoder: embeddings and positions", "source.stack.input"),
    ("encoder: queries of each head", "source.stack.blocks.0.sublayers.0.body.q"),
    ("encoder: weights", "source.stack.blocks.0.sublayers.0.body.pattern"),
    ("encoder: after attention, added and normed", "source.stack.blocks.0.sublayers.0"),
    ("encoder: hidden channels", "source.stack.blocks.0.sublayers.1.body.neurons"),
    ("encoder: after the feed-forward layer", "source.stack.blocks.0"),
    ("decoder: embeddings and positions", "target.stack.input"),
    ("decoder: after masked self-attention", "target.stack.blocks.0.sublayers.0"),
    ("decoder: weights on the source", "target.stack.blocks.0.sublayers.1.body.pattern"),
    ("decoder: after cross-attention", "target.stack.blocks.0.sublayers.1"),
    ("decoder: after the feed-forward layer", "target.stack.blocks.0"),
)


def shape_of(x: Tensor) -> str:
    """Without the batch."""
    return " × ".join(map(str, x.shape[1:]))


def trace(source: int, target: int, width: int, heads: int) -> list[Panel]:
    model = transformer_2017(64, width, heads, 4 * width, layers=1, dropout=0.0).build(seed=0).eval()
    ids = [torch.arange(n).unsqueeze(0) + 1 for n in (source, target)]
    with torch.no_grad(), record(model, [name for _, name in STAGES]) as recorded:
        logits = model(*ids)
    values = [*((label, recorded[name]) for label, name in STAGES), ("logits", logits)]
    rows = [(label, shape_of(x), x.float().square().mean().sqrt().item()) for label, x in values]
    return [
        table("every stage", ("stage", "shape", "root mean square"), rows),
        bars("size of the vectors", [(label, rms) for label, _, rms in rows]),
        numbers(
            {
                "shape into an encoder layer": shape_of(recorded["source.stack.input"]),
                "shape out of it": shape_of(recorded["source.stack.blocks.0"]),
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "encoder-decoder", "The encoder-decoder of 2017",
        "The encoder takes the source at once; the decoder writes token by token and attends to the encoder's output.",
        r"\text{encoder: } x \to (\text{self}, \text{ffn})^N, \qquad \text{decoder: } y \to (\text{masked "
        r"self}, \text{cross}, \text{ffn})^N",
        (
            Slider("layers", "layers N", 1, 12, 6),
            Slider("width", "width d", 64, 1024, 512, 64),
            Slider("part", "part", 1, PARTS, 8),
        ),
        Quiz(
            "Which part of the base model has the most weights after the embedding?",
            "The feed-forward layers: 12.6 million on each side, twice as many as one attention.",
            {"layers": 6, "width": 512, "part": 4},
        ),
        encoder_decoder, ("models/presets.py", "planning/parameters.py"), equations=EQUATIONS,
    ),
    Instrument(
        "trace", "Shapes along a forward",
        "A layer has the same shape at its input and output, so that layers can be stacked.",
        r"(n, d) \to (h, n, d_k) \to (h, n, n) \to (n, d) \to (n, 4d) \to (n, d)",
        (
            Slider("source", "source tokens", 1, 32, 6),
            Slider("target", "target tokens", 1, 32, 4),
            Slider("width", "width d", 8, 128, 64, 8),
            Slider("heads", "heads", 1, 8, 4),
        ),
        Quiz(
            "What is the shape of the cross-attention weights of 4 heads for 6 source and 4 target tokens?",
            "4 × 4 × 6: for each head, target tokens down and source tokens across.",
            {"source": 6, "target": 4, "heads": 4},
        ),
        trace, ("models/presets.py", "lens/hooks.py"),
    ),
)  # fmt: skip
