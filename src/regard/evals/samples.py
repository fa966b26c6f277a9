"""How good the samples of a generative model are, and how unusual examples look to an autoencoder.

recognized       the share of images to which a classifier gives a label with enough confidence, and those labels
covered_modes    the modes of a density with known centers that have samples near them, and the share near any
sharpness        the mean absolute Laplacian of images: an average of shifted images has less of it
anomaly_scores   ‖x - x̂‖² of every example: what differs from the training data is reconstructed badly
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.generative.autoencoder import AutoencoderModule
from regard.models.generative.vae import VAEModule

CONFIDENCE = 0.9  # of a recognized image
RADIUS = 0.3  # of a mode


class Recognition(NamedTuple):
    share: float  # of the images that are recognized
    labels: dict[int, int]  # recognized images per label


@torch.no_grad()
def recognized(classifier: nn.Module, images: Tensor, confidence: float = CONFIDENCE) -> Recognition:
    """An image is recognized if its most probable label has at least this probability."""
    best, labels = classifier.eval()(images).softmax(-1).max(-1)
    found = labels[best >= confidence].tolist()
    return Recognition(len(found) / len(images), {label: found.count(label) for label in sorted(set(found))})


class Coverage(NamedTuple):
    modes: int  # that have at least a tenth of their equal share of the points
    share: float  # of the points that are near a center


def covered_modes(points: Tensor, centers: Tensor, radius: float = RADIUS) -> Coverage:
    distances, nearest = torch.cdist(points, centers).min(1)
    near = nearest[distances <= radius]
    counts = near.bincount(minlength=len(centers))
    return Coverage(int((counts >= len(points) / len(centers) / 10).sum()), len(near) / len(points))


def sharpness(images: Tensor) -> float:
    """images: (B, 1, height, width)"""
    kernel = images.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
    return float(F.conv2d(images, kernel[None, None]).abs().mean())


@torch.no_grad()
def anomaly_scores(model: AutoencoderModule | VAEModule, examples: Tensor) -> Tensor:
    return (reconstruct(model, examples) - examples).flatten(1).square().sum(1)  # (B,)


@torch.no_grad()
def reconstruct(model: AutoencoderModule | VAEModule, examples: Tensor) -> Tensor:
    """The decoded code; of a variational autoencoder, that of the mean of its codes."""
    return model.decode(model.encode(examples))
