"""An image as a sequence: patches, their tokens, an encoder, and the class that is read from [CLS]."""

from functools import cache

import torch

from regard.instruments.examples import MARGIN, PATCH, SHAPES, SIDE, picture, trained, vision_encoder
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.panels import bars, heatmap, numbers
from regard.lens.maps import attention_maps
from regard.models.encoder import EncoderModule
from regard.models.presets import vit


@cache
def encoder(patch: int) -> EncoderModule:
    """The trained example; for patches of another size the same layers with random weights."""
    module = trained("vision") if patch == PATCH else vision_encoder(patch).build(seed=0).eval()
    assert isinstance(module, EncoderModule)
    return module


def patches(shape: str, x: int, y: int, patch: str, layer: int) -> list[Panel]:
    size = int(patch)
    model, image, grid = encoder(size), picture(shape, x, y), SIDE // size
    weights = attention_maps(model, image)[layer]
    assert weights is not None
    on_patches = weights[:, 0, 1:].mean(0).view(grid, grid)  # of [CLS]
    with torch.no_grad():
        tokens, _ = model.embed(image[None])
        probabilities = model(image[None])[0].softmax(-1)
    side, places = [str(i + 1) for i in range(SIDE)], [str(i + 1) for i in range(grid)]
    kind = "trained to name the shape" if size == PATCH else f"random weights: only patches of {PATCH} are trained"
    means = image[0].unfold(0, size, size).unfold(1, size, size).mean((-1, -2))
    few = grid <= 6
    return [
        heatmap("image of 24 × 24 pixels", image[0], side, side, "unit", shows_numbers=False),
        heatmap("patches, by the mean of their pixels", means, places, places, shows_numbers=few),
        heatmap(
            f"attention of [CLS] to the patches, mean of two heads; {kind}",
            on_patches,
            places,
            places,
            "positive",
            shows_numbers=few,
        ),
        bars(f"class read from [CLS]; {kind}", list(zip(SHAPES, probabilities.tolist(), strict=True))),
        numbers(
            {
                "patches": grid * grid,
                "tokens with [CLS]": tokens.shape[1],
                "numbers per patch": 3 * size * size,
                "tokens of ViT-B/16 at 224 pixels": vit().input.length or 0,
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "patches", "An image as tokens",
        "The image is cut into patches; each is projected to a vector, and an encoder takes them like words.",
        r"x_p = W\,\mathrm{flatten}(\text{patch}_p) + b, \qquad n = "
        r"\left(\tfrac{\text{side}}{\text{patch}}\right)^2 + 1",
        (
            Selection("shape", "shape", SHAPES, "disc"),
            Slider("x", "its place from the left", MARGIN, SIDE - MARGIN, 8),
            Slider("y", "its place from the top", MARGIN, SIDE - MARGIN, 15),
            Selection("patch", "side of a patch", ("2", "4", "6", "8", "12"), "4"),
            Slider("layer", "layer", 0, 1, 1),
        ),
        Quiz(
            "How many tokens has an image of 24 pixels with patches of 4?",
            "37: 6 × 6 patches and [CLS]. Halving the patch makes it 145.",
            {"patch": "4"},
        ),
        patches, ("parts/patches.py", "models/presets.py"),
    ),
)  # fmt: skip
