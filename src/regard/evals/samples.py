"""How good the samples of a generative model are, and how unusual examples look to an autoencoder.

recognized       the share of images to which a classifier gives a label with enough confidence, and those labels
covered_modes    the modes of a density with known centers that have samples near them, and the share near any
share_near       the share of samples that are as near to a known image as most real images are
sharpness        the mean absolute Laplacian of images: an average of shifted images has less of it
unexplained      Σ ‖x - x̂‖² as a share of the variance of the images: 1 for the mean image
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
REAL_NEAR = 0.95  # share of real images that are near a known one


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


def nearest_distance(images: Tensor, known: Tensor) -> Tensor:
    """The Euclidean distance of each image to the nearest known one (N,)."""
    return torch.cdist(images.flatten(1), known.flatten(1)).min(1).values


def near_distance(known: Tensor, others: Tensor | None = None) -> float:
    """The distance within which 95 % of other real images have a known one; by default, each known one another."""
    if others is None:
        flat = known.flatten(1)
        nearest = torch.cdist(flat, flat).fill_diagonal_(float("inf")).min(1).values
    else:
        nearest = nearest_distance(others, known)
    return float(nearest.quantile(REAL_NEAR))


def share_near(samples: Tensor, known: Tensor, others: Tensor | None = None) -> float:
    """The share of samples that have a known image within `near_distance`."""
    return float((nearest_distance(samples, known) <= near_distance(known, others)).float().mean())


def sharpness(images: Tensor) -> float:
    """images: (B, 1, height, width)"""
    kernel = images.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
    return float(F.conv2d(images, kernel[None, None]).abs().mean())


def unexplained(reconstructed: Tensor, images: Tensor) -> float:
    """Squared error as a share of the variance of the images: 1 for the mean image."""
    return float((reconstructed - images).square().sum() / (images - images.mean(0)).square().sum())


@torch.no_grad()
def anomaly_scores(model: AutoencoderModule | VAEModule, examples: Tensor) -> Tensor:
    return (reconstruct(model, examples) - examples).flatten(1).square().sum(1)  # (B,)


@torch.no_grad()
def reconstruct(model: AutoencoderModule | VAEModule, examples: Tensor) -> Tensor:
    """The decoded code; of a variational autoencoder, that of the mean of its codes."""
    return model.decode(model.encode(examples))
