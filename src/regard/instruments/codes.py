"""Codes of autoencoders and variational autoencoders: how many numbers they need, and where a decoder can be trusted.

    autoencoder    z = f(x), x̂ = g(z); saved: 1 - numbers(z) / numbers(x)
    VAE            z = μ + σ ε; loss: ‖x - x̂‖² + β KL(N(μ, σ²) ‖ N(0, I))

Hinton & Salakhutdinov 2006; Kingma & Welling 2014; Higgins et al. 2017. The models are those of generative_examples.py,
the digits are held out.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.evals.samples import near_distance, nearest_distance, reconstruct, share_near, unexplained
from regard.instruments.generative_examples import (
    BETAS,
    CODE_SIZES,
    autoencoder,
    digit_images,
    gray,
    variational,
)
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.measurements import percent
from regard.instruments.panels import bars, diagram, lines, numbers, pictures, scatter
from regard.models.generative.autoencoder import Autoencoder
from regard.objectives.reconstruction import gaussian_kl, squared_error

SHOWN, REACH = 40, 3.0  # digits to choose from; of a map of codes, from its centre
INPUTS = ("a digit", "a digit with noise", "shuffled pixels", "noise")
OTHER_PIXELS = 28 * 28  # of another common set of digits
BETA = 2  # the index of 0.4


def random_codes(count: int, seed: int, width: int = 2) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@cache
def inputs(kind: str) -> Tensor:
    """(N, 1, 8, 8), made from the held-out digits."""
    digits = digit_images().images
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(digits.shape, generator=rng)
    order = torch.rand(digits.flatten(1).shape, generator=rng).argsort(1)
    return {
        "a digit": digits,
        "a digit with noise": digits + 0.5 * noise,
        "shuffled pixels": digits.flatten(1).gather(1, order).view_as(digits),
        "noise": noise.clamp(-1, 1),
    }[kind]


@cache
def unexplained_curve(kind: str) -> list[tuple[float, float]]:
    """The squared error by the numbers in the code, as a share of the variance of the inputs."""
    images = inputs(kind)
    return [(n, unexplained(reconstruct(autoencoder(f"code-{n}"), images), images)) for n in CODE_SIZES]


def code_by_size(size: int, example: int, kind: str) -> list[Panel]:
    latent, digits = CODE_SIZES[size], digit_images()
    model, image = autoencoder(f"code-{latent}"), inputs(kind)[example - 1 : example]
    code, rebuilt = model.encode(image)[0], reconstruct(model, image)
    values, saved = image.numel(), model.spec.compression
    other = Autoencoder((1, 28, 28), latent).compression
    shown = [image, rebuilt]
    labels = [f"x: {values} numbers", f"x̂ from {latent}"]
    if kind == "a digit with noise":
        shown, labels = [*shown, digits.images[example - 1 : example]], [*labels, "x without noise"]
    error = float(squared_error(rebuilt, image))
    return [
        pictures(f"{kind}, and what the decoder makes of its code", gray(torch.cat(shown)), labels),
        bars("the code z = f(x)", [(f"z{i + 1}", value) for i, value in enumerate(code.tolist())]),
        lines(
            "variance of held-out images that is lost, by the numbers in the code",
            {name: unexplained_curve(name) for name in dict.fromkeys((INPUTS[0], INPUTS[2], kind))},
            "numbers in the code", "share", log_x=True, marks={"here": latent}, top=2.0,
        ),
        numbers(
            {
                "numbers in the input": values,
                "numbers in the code": latent,
                "saved: 1 − code / input": f"{100 * saved:.2f} %",
                f"saved if the input had {OTHER_PIXELS} pixels": f"{100 * other:.2f} %",
                "‖x − x̂‖² of this image": error,
                "variance of held-out digits lost": f"{100 * dict(unexplained_curve(INPUTS[0]))[latent]:.1f} %",
            }
        ),
    ]  # fmt: skip


class CodeMap(NamedTuple):
    """Codes of two numbers of the held-out digits, on a map whose unit is their standard deviation."""

    mean: Tensor  # (N, 2)
    width: Tensor  # (N, 2), σ of a variational autoencoder, or 0
    center: Tensor  # (2,), of the map
    unit: Tensor  # (2,)


@cache
def dots() -> CodeMap:
    codes = autoencoder("dots").encode(digit_images(few=True).images)
    center, unit = codes.mean(0), codes.std(0)
    return CodeMap((codes - center) / unit, torch.zeros_like(codes), center, unit)


@cache
def clouds(beta: float) -> CodeMap:
    mean, log_variance = variational(f"clouds-{beta:g}").posterior(digit_images(few=True).images)
    return CodeMap(mean, (log_variance / 2).exp(), torch.zeros(2), torch.ones(2))


def decode_map(name: str, places: Tensor) -> Tensor:
    """Images (N, 1, 8, 8) of places (N, 2) on the map of this model."""
    if name == "dots":
        return autoencoder(name).decode(dots().center + dots().unit * places)
    return variational(name).decode(places)


@cache
def random_places_near(name: str) -> float:
    """The share of 500 random places, N(0, I) on the map, that decode to an image near a held-out digit."""
    return share_near(decode_map(name, random_codes(500, 0)), digit_images(few=True).images)


def map_panel(
    title: str, codes: CodeMap, extra: dict[str, list[tuple[float, float]]], choosable: bool = False
) -> Panel:
    """Codes that are within the map, with clouds of two standard deviations, and groups of other places."""
    labels = digit_images(few=True).labels.tolist()
    inside = [i for i, mean in enumerate(codes.mean) if float(mean.abs().max()) <= REACH]
    inside.sort(key=lambda i: labels[i])
    points = [(*codes.mean[i].tolist(), "") for i in inside]
    groups = [f"digit {labels[i]}" for i in inside]
    widths = [tuple((2 * codes.width[i]).tolist()) if float(codes.width[i].max()) > 0 else None for i in inside]
    for name, places in extra.items():
        points += [(x, y, name) for x, y in places]
        groups += [name] * len(places)
        widths += [None] * len(places)
    outside = len(labels) - len(inside)
    title += f"; {outside} of {len(labels)} are outside" * (outside > 0)
    return scatter(title, points, groups, reach=REACH, widths=widths, place=("across", "up") if choosable else None)


def dots_and_clouds(across: float, up: float, beta: int) -> list[Panel]:
    names = ("dots", f"clouds-{BETAS[beta]:g}")
    place, known = torch.tensor([[across, up]]), digit_images(few=True).images
    decoded = [decode_map(name, place) for name in names]
    gaps = [float(nearest_distance(image, known)) for image in decoded]
    here = {"here": [(across, up)]}
    path = torch.stack([torch.linspace(-2, 2, 5), torch.full((5,), up)], 1)
    titles = ("autoencoder", f"VAE, β = {BETAS[beta]:g}")
    return [
        map_panel("autoencoder: a dot per digit; click to decode a place", dots(), here, True),
        map_panel(f"{titles[1]}: a cloud per digit; click to decode a place", clouds(BETAS[beta]), here, True),
        *(
            pictures(f"{title}: from left to right at this height", gray(decode_map(name, path)))
            for title, name in zip(titles, names, strict=True)
        ),
        pictures(f"decoded at ({across:.2f}, {up:.2f})", gray(torch.cat(decoded)), titles),
        numbers(
            {f"{title}: distance to the nearest digit": gap for title, gap in zip(titles, gaps, strict=True)}
            | {"a digit is near within": near_distance(known)}
            | {f"{title}: random places near a digit": percent(random_places_near(name))
               for title, name in zip(titles, names, strict=True)}
        ),
    ]  # fmt: skip


@cache
def pulls(beta: float) -> tuple[float, float]:
    """The variance of held-out digits that is lost, with sampled codes, and the mean of their KL."""
    model, images = variational(f"clouds-{beta:g}"), digit_images(few=True).images
    rebuilt, mean, log_variance = model(images, random_codes(len(images), 0))
    return unexplained(rebuilt, images), float(gaussian_kl(mean, log_variance).mean())


def two_pulls(beta: int, example: int, draw: int, generated: int) -> list[Panel]:
    weight, images = BETAS[beta], digit_images(few=True).images
    model, image = variational(f"clouds-{weight:g}"), images[example - 1 : example]
    mean, log_variance = model.posterior(image)
    width, noise = (log_variance / 2).exp(), random_codes(1, draw)
    z = mean + width * noise
    rebuilt, centre = model.decode(z), model.decode(mean)
    divergence, error = float(gaussian_kl(mean, log_variance)), float(squared_error(rebuilt, image))
    codes, samples = random_codes(10, 100 + generated), clouds(weight)
    parts = [
        (f"½ {part} of number {j + 1}", 0.5 * float(value))
        for j in range(2)
        for part, value in (("μ²", mean[0, j] ** 2), ("(σ² − log σ² − 1)", width[0, j] ** 2 - log_variance[0, j] - 1))
    ]
    curves = {beta: pulls(beta) for beta in BETAS}
    nodes = [
        {"id": "x", "label": "x", "x": 0.0, "y": 0.5},
        {"id": "mean", "label": "μ", "x": 0.3, "y": 0.15, "value": float(mean.norm())},
        {"id": "width", "label": "σ", "x": 0.3, "y": 0.85, "value": float(width.mean())},
        {"id": "noise", "label": "ε", "x": 0.5, "y": 1.0, "value": float(noise.norm())},
        {"id": "z", "label": "z", "x": 0.65, "y": 0.5, "value": float(z.norm())},
        {"id": "out", "label": "x̂", "x": 1.0, "y": 0.5, "value": error},
    ]
    edges = [("x", "mean"), ("x", "width"), ("mean", "z"), ("width", "z"), ("noise", "z"), ("z", "out")]
    position = {f"z of digit {int(digit_images(few=True).labels[example - 1])}": [(z[0, 0].item(), z[0, 1].item())]}
    inside = {name: [(x, y) for x, y in places if max(abs(x), abs(y)) <= REACH] for name, places in position.items()}
    return [
        map_panel(f"clouds of held-out digits, β = {weight:g}", samples, inside),
        diagram("lengths of μ, ε and z, mean of σ, and ‖x − x̂‖² at the output", nodes, [(a, b, 1.0) for a, b in edges]),
        pictures(
            "input; decoded from the center of its cloud, and from a point of it",
            gray(torch.cat([image, centre, rebuilt])), ["x", "from μ", "from z"],
        ),
        bars("the KL of this cloud, in parts", parts, "nats"),
        pictures("generated: random codes of N(0, I), without the encoder", gray(model.decode(codes))),
        lines(
            "the two pulls, by β",
            {
                "variance lost": [(beta or 0.03, lost) for beta, (lost, _) in curves.items()],
                "KL / 10, nats": [(beta or 0.03, d / 10) for beta, (_, d) in curves.items()],
            },
            "β (0 is drawn at 0.03)", "share, or nats", log_x=True, marks={"here": weight or 0.03},
        ),
        numbers(
            {
                "μ": f"({mean[0, 0]:.2f}, {mean[0, 1]:.2f})",
                "σ": f"({width[0, 0]:.3f}, {width[0, 1]:.3f})",
                "KL of this cloud, nats": divergence,
                "‖x − x̂‖²": error,
                "loss: error + β KL": error + weight * divergence,
                "variance explained, all digits": f"{100 * (1 - curves[weight][0]):.1f} %",
                "generated: near a held-out digit": percent(random_places_near(f"clouds-{weight:g}")),
            }
        ),
    ]  # fmt: skip


BETA_SLIDER = Slider("beta", "β, weight of the KL", 0, len(BETAS) - 1, BETA, names=tuple(f"{beta:g}" for beta in BETAS))
INSTRUMENTS = (
    Instrument(
        "code-size", "A code of few numbers",
        "An autoencoder squeezes an image through a few numbers and rebuilds it; what the numbers cannot hold is lost.",
        r"z = f(x), \qquad \hat{x} = g(z), \qquad \mathcal{L} = \lVert x - \hat{x} \rVert^2",
        (
            Slider("size", "numbers in the code", 0, len(CODE_SIZES) - 1, 2,
                   names=tuple(str(size) for size in CODE_SIZES)),
            Slider("example", "held-out image", 1, SHOWN, 4),
            Selection("kind", "input", INPUTS, INPUTS[0]),
        ),
        Quiz(
            "A code of 64 numbers has room for all 64 pixels. Does this autoencoder copy any image, such as shuffled "
            "pixels?",
            "No: most of their variance is lost, and of digits less than a tenth. It could copy, but it was trained on "
            "digits only. With a code of 4 the error is larger than that of the mean image.",
            {"size": len(CODE_SIZES) - 1, "kind": "shuffled pixels"},
        ),
        code_by_size, ("models/generative/autoencoder.py", "objectives/reconstruction.py", "evals/samples.py"),
    ),
    Instrument(
        "dots-and-clouds", "Dots and clouds",
        "An autoencoder puts an image at a dot and leaves gaps; a VAE puts it into a cloud, and clouds fill the plane.",
        r"z = f(x) \qquad \text{or} \qquad z \sim \mathcal{N}\bigl(\mu(x), \sigma(x)^2\bigr)",
        (
            Slider("across", "place, left to right", -REACH, REACH, 1.25, 0.05),
            Slider("up", "place, bottom to top", -REACH, REACH, 0.5, 0.05),
            BETA_SLIDER,
        ),
        Quiz(
            "Random places are decoded by both. Which one comes nearer to real digits?",
            "The VAE: 99 % of its random places decode to an image near a digit, and 84 % of the autoencoder's, which "
            "was never trained between its dots.",
            {"across": 1.25, "up": 0.5, "beta": BETA},
        ),
        dots_and_clouds,
        ("models/generative/autoencoder.py", "models/generative/vae.py", "objectives/reconstruction.py"),
    ),
    Instrument(
        "two-pulls", "The two pulls of a VAE",
        "The reconstruction wants small clouds far apart, the KL wants all of them to be N(0, I); β weighs the two.",
        r"\lVert x - \hat{x} \rVert^2 + \beta \cdot \tfrac{1}{2} \sum_j "
        r"\bigl(\mu_j^2 + \sigma_j^2 - \log \sigma_j^2 - 1\bigr)",
        (
            BETA_SLIDER,
            Slider("example", "held-out digit", 1, SHOWN, 4),
            Slider("draw", "draw of ε", 1, 20, 1),
            Slider("generated", "draw of generated digits", 1, 20, 1),
        ),
        Quiz(
            "Without the KL (β = 0), where are the clouds, and how wide are they?",
            "They shrink to dots, most of them far outside: the KL that nothing limits is the largest of all. Random "
            "codes of N(0, I) then fall between the dots.",
            {"beta": 0},
        ),
        two_pulls, ("models/generative/vae.py", "objectives/reconstruction.py"),
    ),
)  # fmt: skip
