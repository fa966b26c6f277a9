"""Whole models drawn from their specs: the encoder-decoder of 2017, shapes along a forward, and a vision encoder."""

from functools import cache

import torch
from torch import Tensor

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.panels import bars, diagram, heatmap, numbers, table
from regard.lens.hooks import record
from regard.lens.maps import attention_maps
from regard.models.encoder import EncoderModule
from regard.models.presets import transformer_2017, vit
from regard.planning.groups import format_number
from regard.planning.parameters import Parameters, count_parameters

# label, position, part of the count, formula
PARTS = (
    ("input embedding", 0.2, 1.0, "embedding", "x = E[ids] √d + positions"),
    ("self-attention", 0.2, 0.72, "source attention", "softmax(QKᵀ/√d_k) V, all tokens"),
    ("feed-forward", 0.2, 0.44, "source feedforward", "W₂ relu(W₁ x)"),
    ("output embedding", 0.8, 1.0, "embedding", "the same table"),
    ("masked self-attention", 0.8, 0.79, "target attention", "softmax(QKᵀ/√d_k + causal mask) V"),
    ("cross-attention", 0.8, 0.58, "target cross_attention", "Q from the decoder, K and V from the encoder"),
    ("feed-forward of decoder", 0.8, 0.37, "target feedforward", "W₂ relu(W₁ x)"),
    ("head", 0.8, 0.0, "embedding", "softmax(E x), the same table"),
)
EDGES = ((0, 1), (1, 2), (3, 4), (4, 5), (5, 6), (6, 7), (2, 5))


@cache
def counted(layers: int, width: int) -> Parameters:
    return count_parameters(transformer_2017(width=width, heads=8, hidden=4 * width, layers=layers))


def encoder_decoder(layers: int, width: int, part: int) -> list[Panel]:
    counts, chosen = counted(layers, width), PARTS[part - 1]
    nodes = [{"id": str(i), "label": label, "x": x, "y": y} for i, (label, x, y, _, _) in enumerate(PARTS)]
    edges = [(str(a), str(b), 2.0 if (a, b) == (2, 5) else 1.0) for a, b in EDGES]
    return [
        diagram(f"{layers} layers on each side; K and V cross over", nodes, edges, "part", part - 1),
        bars("weights by part", counts.parts),
        numbers(
            {
                "part": chosen[0],
                "computes": chosen[4],
                "its weights in all layers": counts.parts[chosen[3]],
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


def trace(source: int, target: int, width: int, heads: int) -> list[Panel]:
    model = transformer_2017(64, width, heads, 4 * width, layers=1, dropout=0.0).build(seed=0).eval()
    ids = [torch.arange(n).unsqueeze(0) + 1 for n in (source, target)]
    with torch.no_grad(), record(model, [name for _, name in STAGES]) as recorded:
        logits = model(*ids)
    values = [*((label, recorded[name]) for label, name in STAGES), ("logits", logits)]
    rows = [(label, " × ".join(map(str, x.shape[1:])), x.float().square().mean().sqrt().item()) for label, x in values]
    return [
        table("every stage", ("stage", "shape", "root mean square"), rows),
        bars("size of the vectors", [(label, rms) for label, _, rms in rows]),
        numbers({"shape into a layer": f"{source} × {width}", "shape out of it": f"{source} × {width}"}),
    ]


SIDE = 24


def image_of(kind: str) -> Tensor:
    """(1, 3, SIDE, SIDE), values from 0 to 1"""
    axis = torch.linspace(-1, 1, SIDE)
    y, x = axis[:, None], axis[None]
    pictures = {
        "disc": ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.35).float(),
        "stripes": (torch.sin(9 * (x + 0.6 * y)) > 0).float(),
        "gradient": (x + y) / 4 + 0.5,
        "corner": ((x < -0.1) & (y < -0.1)).float(),
    }
    return pictures[kind].expand(1, 3, SIDE, SIDE)


@cache
def vision_encoder(patch: int) -> EncoderModule:
    return vit(SIDE, patch, 32, 2, 64, 2, 4).build(seed=0).eval()


def patches(picture: str, patch: str, layer: int) -> list[Panel]:
    size = int(patch)
    model = vision_encoder(size)
    image, grid = image_of(picture), SIDE // size
    weights = attention_maps(model, image[0])[layer - 1]
    assert weights is not None
    on_patches = weights[:, 0, 1:].mean(0).view(grid, grid)  # of [CLS]
    with torch.no_grad():
        x, _ = model.embed(image)
        out = model(image)[0].softmax(-1)
    side, places = [str(i + 1) for i in range(SIDE)], [str(i + 1) for i in range(grid)]
    return [
        heatmap("image", image[0, 0], side, side, "unit", shows_numbers=False),
        heatmap(
            "mean of each patch",
            image[0, 0].unfold(0, size, size).unfold(1, size, size).mean((-1, -2)),
            places,
            places,
            shows_numbers=grid <= 6,
        ),
        heatmap(
            "attention of [CLS] to the patches; the encoder is not trained",
            on_patches,
            places,
            places,
            "positive",
            shows_numbers=grid <= 6,
        ),
        bars("classes, from the output of [CLS]", [(f"class {i + 1}", p) for i, p in enumerate(out.tolist())]),
        numbers(
            {
                "patches": grid * grid,
                "tokens with [CLS]": x.shape[1],
                "numbers per patch": 3 * size * size,
                "tokens of ViT-B/16 at 224 pixels": vit().input.length or 0,
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "encoder-decoder", "The encoder-decoder of 2017",
        "The encoder reads the source at once; the decoder writes token by token and attends to the encoder's output.",
        r"\text{encoder: } x \to (\text{self}, \text{ffn})^N, \qquad \text{decoder: } y \to (\text{masked "
        r"self}, \text{cross}, \text{ffn})^N",
        (
            Slider("layers", "layers N", 1, 12, 6),
            Slider("width", "width d", 64, 1024, 512, 64),
            Slider("part", "part", 1, len(PARTS), 6),
        ),
        Quiz(
            "Which part of the base model has the most weights after the embedding?",
            "The feed-forward layers: 12.6 million on each side, twice as many as one attention.",
            {"part": 3},
        ),
        encoder_decoder, ("models/presets.py", "planning/parameters.py"),
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
    Instrument(
        "patches", "An image as tokens",
        "The image is cut into patches; each is projected to a vector, and an encoder treats them like words.",
        r"x_p = W\,\mathrm{flatten}(\text{patch}_p) + b, \qquad n = "
        r"\left(\tfrac{\text{side}}{\text{patch}}\right)^2 + 1",
        (
            Selection("picture", "image", ("disc", "stripes", "gradient", "corner"), "disc"),
            Selection("patch", "side of a patch", ("2", "4", "6", "8", "12"), "4"),
            Slider("layer", "layer", 1, 2, 1),
        ),
        Quiz(
            "How many tokens has an image of 24 pixels with patches of 4?",
            "37: 6 × 6 patches and [CLS]. Halving the patch makes it 145.",
            {"patch": "2"},
        ),
        patches, ("parts/patches.py", "models/presets.py"),
    ),
)  # fmt: skip
