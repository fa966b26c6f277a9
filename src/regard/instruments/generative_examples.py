"""Small generative models of handwritten digits for instruments, and the digits that they are shown.

    code-N       autoencoders with N numbers in the code, trained on all digits
    dots         an autoencoder with two numbers in the code, trained on the digits 0 to 4
    clouds-β     variational autoencoders with two numbers in the code and this weight of the KL, trained on the same
    ae, vae, gan three families with equal networks, trained on all digits

The digits are the held-out tenth of scikit-learn's (Alpaydin & Kaynak 1998), so no model was trained on them. Weights
are stored in float16 beside this file. `python -m regard.instruments.train_generative` trains them again.
"""

from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.data.sources.images import LabelledImages
from regard.instruments.examples import WEIGHTS
from regard.instruments.measurements import FOLDER as MEASURED
from regard.models.generative.autoencoder import Autoencoder, AutoencoderModule
from regard.models.generative.base import MLP, Generative
from regard.models.generative.gan import GAN, GANModule
from regard.models.generative.vae import VAE, VAEModule

CODE_SIZES = (1, 2, 4, 8, 16, 32, 64)
BETAS = (0.0, 0.1, 0.4, 1.0, 3.0, 10.0)
FEW_DIGITS = 5  # of the models with codes of two numbers: 0 to 4
DIGITS_FILE, MODELS_FILE = WEIGHTS / "digits.safetensors", WEIGHTS / "generative.safetensors"
COURSES_FILE = MEASURED / "generative-training.json"
FAMILIES = ("ae", "vae", "gan")
LEVELS = 16  # of a stored pixel, from 0 to this
NARROW, WIDE = MLP((64,)), MLP((64, 64))


def specs() -> dict[str, Generative]:
    codes = {f"code-{n}": Autoencoder((1, 8, 8), n, "tanh", NARROW, NARROW) for n in CODE_SIZES}
    clouds = {f"clouds-{beta:g}": VAE((1, 8, 8), 2, "tanh", WIDE, WIDE) for beta in BETAS}
    return {
        **codes,
        "dots": Autoencoder((1, 8, 8), 2, "tanh", WIDE, WIDE),
        **clouds,
        "ae": Autoencoder((1, 8, 8), 8, "tanh", WIDE, WIDE),
        "vae": VAE((1, 8, 8), 8, "tanh", WIDE, WIDE),
        "gan": GAN((1, 8, 8), 16, "tanh", WIDE, WIDE),
    }


@cache
def stored() -> dict[str, Tensor]:
    return load_file(MODELS_FILE)


@cache
def generative_model(name: str) -> Any:
    module = specs()[name].build(seed=0)
    prefix = f"{name}/"
    weights = {key.removeprefix(prefix): value.float() for key, value in stored().items() if key.startswith(prefix)}
    missing, unexpected = module.load_state_dict(weights, strict=False)  # no discriminator is stored
    assert not unexpected and all(key.startswith("discriminator.") for key in missing), (missing, unexpected)
    return module.eval().requires_grad_(False)


def autoencoder(name: str) -> AutoencoderModule:
    return generative_model(name)


def adversarial(name: str) -> GANModule:
    return generative_model(name)


def variational(name: str) -> VAEModule:
    return generative_model(name)


@cache
def digit_images(few: bool = False) -> LabelledImages:
    """Images (N, 1, 8, 8) from -1 to 1. few: those of FEW_DIGITS only."""
    tensors = load_file(DIGITS_FILE)
    images, labels = tensors["images"].float() / (LEVELS / 2) - 1, tensors["labels"].long()
    chosen = labels < (FEW_DIGITS if few else 10)
    return LabelledImages(images[chosen, None], labels[chosen])


def gray(images: Tensor) -> Tensor:
    """Images (N, 1, 8, 8) from -1 to 1 as the page draws them, (N, 8, 8) from 0 to 1."""
    return (images.squeeze(1) + 1) / 2


@torch.no_grad()
def draw(model: AutoencoderModule | VAEModule | GANModule, images: Tensor, count: int, seed: int) -> Tensor:
    """Samples (count, 1, 8, 8). Random codes of an autoencoder have the mean and deviation of those of the images."""
    noise = torch.randn(count, model.spec.latent, generator=torch.Generator().manual_seed(seed))
    if isinstance(model, AutoencoderModule):
        codes = model.encode(images)
        noise = codes.mean(0) + codes.std(0) * noise
    return model.decode(noise)
