"""Sparse autoencoders recover the directions that activations were made of."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from regard.lens import SparseAutoencoder, patch


@pytest.fixture(scope="module")
def planted() -> tuple[Tensor, Tensor]:
    """32 directions in 24 dimensions, and activations that are sums of two of them."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(32, 24, generator=generator), dim=1)
    pairs = torch.rand(4000, 32, generator=generator).topk(2).indices
    weights = torch.zeros(4000, 32).scatter(1, pairs, 1 + torch.rand(4000, 2, generator=generator))
    return directions, 5 * weights @ directions + 3


@pytest.mark.parametrize("kind", ["topk", "l1"])
def test_planted_directions_are_found(planted: tuple[Tensor, Tensor], kind: str, tmp_path: Path) -> None:
    directions, x = planted
    sae = SparseAutoencoder(24, 48, kind=kind, k=2, l1=0.3)
    before = sae.quality(x)
    losses = sae.fit(x, steps=800, batch=256, lr=5e-3)
    assert len(losses) == 800 and losses[-1] < 0.2 * losses[0]
    nearest = (F.normalize(directions, dim=1) @ sae.directions.T).max(1).values
    assert nearest.min() > 0.9
    found = sae.quality(x)
    assert found.explained > max(0.9, before.explained) and found.active < 6
    assert torch.allclose(sae.directions.norm(dim=1), torch.ones(48), atol=1e-5)
    sae.save(tmp_path / "sae.safetensors")
    loaded = SparseAutoencoder.load(tmp_path / "sae.safetensors")
    assert torch.equal(loaded(x), sae(x)) and (loaded.kind, loaded.k) == (kind, 2)


def test_at_most_k_features_are_active() -> None:
    x = torch.randn(50, 8)
    assert ((SparseAutoencoder(8, 20, k=3).encode(x) > 0).sum(-1) <= 3).all()


def test_a_reconstruction_can_be_patched_into_the_model(make_model, ids) -> None:
    model, sae = make_model(), SparseAutoencoder(16, 40)
    with torch.no_grad(), patch(model, {"stack.blocks.0": sae}):
        assert model(ids).dtype == torch.float64


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k=9 from 1 to 8"):
        SparseAutoencoder(4, 8, k=9)
    with pytest.raises(ValueError, match=r"must be \(N, 4\)"):
        SparseAutoencoder(4, 8, k=2).fit(torch.zeros(3, 5))
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no sparse autoencoder"):
        SparseAutoencoder.load(tmp_path / "other.safetensors")
