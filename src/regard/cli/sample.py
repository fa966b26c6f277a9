"""`regard sample`: pictures of what a generative model draws, and of the examples that it reconstructs badly."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import DeviceOption, ModelArgument
from regard.find_model import find_model

if TYPE_CHECKING:
    from torch import Tensor

LIMIT, SIDE = 2.5, 15  # of the map of codes: its largest number, and images per side
STEPS = 9  # of an interpolation


def sample(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("samples.png"),
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Samples, interpolations or anomalies.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random codes.")] = 0,
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="Rows of samples whose codes go from one random code to another.")
    ] = False,
    latent_map: Annotated[
        bool, typer.Option("--map", help="What the codes of two numbers decode to, and where held-out examples are.")
    ] = False,
    anomalies: Annotated[
        bool, typer.Option("--anomalies", help="The held-out examples with the largest reconstruction error.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="A folder of images instead of the held-out examples of the run.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Draw samples of a variational autoencoder or a GAN, and write them as a picture.

    An autoencoder has no distribution of codes to draw from; it shows a map of its codes, and anomalies. With
    --anomalies the picture has each example beside its reconstruction, with the error.

    \b
    Examples:
      regard sample runs/vae --out digits.png
      regard sample runs/gan/ema --count 100
      regard sample runs/vae --interpolate --count 8
      regard sample runs/autoencoder --anomalies --count 10
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    if interpolate + latent_map + anomalies > 1:
        raise typer.BadParameter("--interpolate, --map and --anomalies are three pictures; give one of them")
    if data is not None and not (latent_map or anomalies):
        raise typer.BadParameter("--data has the examples of --map and --anomalies; add one of them, or leave it out")
    if out.suffix.lower() != ".png":
        raise typer.BadParameter(f"--out {out} is not a .png file")
    import torch

    from regard.load_model import load
    from regard.models.generative.autoencoder import Autoencoder
    from regard.models.generative.base import Generative
    from regard.report import sample_plots

    network = load(model, device).model
    spec, weights = network.spec, next(network.parameters())
    if not isinstance(spec, Generative):
        raise ValueError(f"{model} is a {spec.kind}, and sample draws from a vae or a gan; use generate, or predict")
    if anomalies:
        return show_anomalies(network, held_out(model, data, spec.shape), count, out)
    if isinstance(spec, Autoencoder) and not latent_map:
        instead = "--map or --anomalies" if has_map(spec) else "--anomalies"
        raise ValueError(
            f"{model} is an autoencoder: it has no distribution of codes to draw from, and decodes random codes to "
            f"nothing in particular; train a vae or a gan, or give {instead}"
        )
    if latent_map:
        return show_map(network, model, data, out)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(2 * count if interpolate else count, spec.latent, generator=generator)
    if interpolate:
        places = torch.linspace(0, 1, STEPS).view(1, -1, 1)
        codes = ((1 - places) * codes[:count, None] + places * codes[count:, None]).flatten(0, 1)
    with torch.no_grad():
        samples = network.decode(codes.to(weights)).cpu()
    if spec.shape == (2,):
        examples = held_out(model, None, (2,))[0] if (Path(model) / "checkpoints").is_dir() else None
        sample_plots.point_plot(samples, examples, out)
    elif len(spec.shape) == 3 and spec.shape[0] in (1, 3):
        columns = STEPS if interpolate else min(count, 2 * round(count**0.5 / 2) or 1)
        sample_plots.image_grid(samples, out, columns)
    else:
        raise ValueError(f"{model} draws values of the shape {spec.shape}, which are neither images nor points")
    print(f"{count} {'interpolations' if interpolate else 'samples'}: {out}")


def show_anomalies(network: Any, examples: "tuple[Tensor, list[int | str]]", count: int, out: Path) -> None:
    """Print the examples with the largest errors, and draw them, each beside its reconstruction."""
    import torch

    from regard.evals.samples import anomaly_scores, reconstruct
    from regard.report.sample_plots import image_grid

    if not hasattr(network, "encode"):
        raise ValueError(f"a {network.spec.kind} has no encoder, so it reconstructs nothing; use an autoencoder or vae")
    values, names = examples
    values = values.to(next(network.parameters()))
    scores = anomaly_scores(network, values)
    chosen = scores.argsort(descending=True)[:count]
    print(f"reconstruction errors of {len(values)} examples: median {scores.median():.3f}, largest first")
    for index in chosen.tolist():
        print(f"{scores[index]:9.3f}  example {index}, label {names[index]}")
    if values.dim() == 4:
        pairs = torch.stack([values[chosen], reconstruct(network, values[chosen])], 1).flatten(0, 1).cpu()
        titles = [title for index in chosen.tolist() for title in (f"{names[index]}", f"{scores[index]:.1f}")]
        image_grid(pairs, out, min(10, len(pairs)), titles)
        print(f"examples with labels, beside their reconstructions with errors: {out}")
    else:
        print("no picture: these examples are no images")


def has_map(spec: Any) -> bool:
    """Codes of two numbers, for images."""
    return spec.latent == 2 and len(spec.shape) == 3


def show_map(network: Any, model: Path, data: Path | None, out: Path) -> None:
    import torch

    from regard.report.sample_plots import latent_map

    if not has_map(network.spec):
        raise ValueError(
            f"{model} has codes of {network.spec.latent} numbers for examples of the shape {network.spec.shape}; a map "
            "needs codes of two numbers for images (model.latent=2)"
        )
    codes, labels, limit = None, None, LIMIT
    with torch.no_grad():
        if hasattr(network, "encode"):
            values, names = held_out(model, data, network.spec.shape)
            codes = network.encode(values.to(next(network.parameters()))).cpu()
            labels = [name for name in names if isinstance(name, int)] or None
            limit = float(codes.abs().quantile(0.99))
        line = torch.linspace(-limit, limit, SIDE)
        second, first = torch.meshgrid(line.flip(0), line, indexing="ij")
        grid = torch.stack([first, second], -1).flatten(0, 1)
        decoded = network.decode(grid.to(next(network.parameters()))).cpu().unflatten(0, (SIDE, SIDE))
    latent_map(decoded, limit, out, codes, labels)
    print(f"map of codes: {out}")


def held_out(model: Path, data: Path | None, shape: tuple[int, ...]) -> "tuple[Tensor, list[int | str]]":
    """The examples of a folder of images, or the held-out ones of a run, and their labels."""
    import numpy as np
    import torch

    from regard.data.sources.base import first_epoch
    from regard.data.sources.images import ImageFolder
    from regard.objectives.generative import values_of
    from regard.training.recipe import Recipe
    from regard.training.run import Run

    if data is not None:
        examples = ImageFolder(path=str(data), size=shape[1:], gray=shape[0] == 1).read()  # ty: ignore[invalid-argument-type]
    elif (Path(model) / "checkpoints").is_dir():
        split = Recipe.from_dict(Run.open(Path(model)).config).data.open().held_out
        examples = [] if split is None else list(first_epoch(split, 1000))
    else:
        raise ValueError(f"{model} is not a run, so its held-out examples are not known; give images with --data")
    if not examples:
        raise ValueError(f"{model} has no held-out examples; give images with --data")
    values = torch.from_numpy(np.stack([values_of(example) for example in examples]))
    return values, [example.get("label", "none") for example in examples]
