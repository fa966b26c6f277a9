"""Images, spectrograms and videos as tokens: patches against a loop and a convolution, and ViT."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention.mask import Full
from regard.models.base import build_on_meta
from regard.models.encoder import Encoder
from regard.models.heads import Distilled
from regard.models.presets import vit
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.patches import Patches, resize_grid
from regard.parts.position.learned import Learned
from regard.parts.position.rope2d import Rope2D
from regard.spec import SpecError
from tests.laws import error
from tests.models.reference_weights import PROJECTIONS, fill, randomized, renamed

SMALL = {"image": 8, "patch": 4, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "labels": 3}
PATCHES = {
    "image": Patches((4, 4), (8, 12)),
    "rectangular patches": Patches((2, 6), (8, 12), channels=2, registers=2),
    "spectrogram, overlapping": Patches((16, 16), (64, 50), channels=1, stride=(10, 10), registers=1),
    "video": Patches((2, 4, 4), (6, 8, 12)),
    "signal": Patches((5,), (40,), channels=1, stride=(2,), cls=False, bias=False),
}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def random_images(spec: Patches, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, spec.channels, *spec.image, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.ledger("vit.patch")
def test_patches_equal_a_loop(name: str) -> None:
    """The loop computes one patch at a time in row-major order, after [CLS] and the registers."""
    spec = PATCHES[name]
    module, data = spec.build(7).double(), random_images(spec)
    found = module(data)
    assert found.shape == (2, spec.length, 7)
    prefix, prefix_tokens = spec.first, [p for p in (module.cls, module.registers) if p is not None]
    assert sum(map(len, prefix_tokens)) == prefix
    assert not prefix_tokens or torch.equal(found[:, :prefix], torch.cat(prefix_tokens).expand(2, -1, -1))
    steps = spec.stride or spec.size
    for index, cell in enumerate(product(*map(range, spec.grid))):
        spans = [slice(p * step, p * step + size) for p, step, size in zip(cell, steps, spec.size, strict=True)]
        patch = data[(slice(None), slice(None), *spans)].flatten(1)
        assert error(found[:, prefix + index], module.proj(patch)) <= 1e-12


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.ledger("vit.patch")
def test_a_patch_embedding_equals_a_convolution(name: str) -> None:
    spec = PATCHES[name]
    module, data = spec.build(7).double(), random_images(spec)
    kernel = module.proj.weight.unflatten(1, (spec.channels, *spec.size))
    grid = CONVOLUTIONS[len(spec.size)](data, kernel, module.proj.bias, stride=spec.stride or spec.size)
    assert grid.shape[2:] == spec.grid
    assert error(module(data)[:, spec.first :], grid.flatten(2).mT) <= 1e-12


def test_gradients_pass_gradcheck() -> None:
    module = Patches((2, 2), (4, 3), channels=1, stride=(2, 1)).build(3).double()
    x = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()), fast_mode=True)


@pytest.mark.ledger("vit.196")
def test_an_image_of_224_has_196_patches_and_a_cls_token() -> None:
    patches = vit().input
    assert patches.grid == (14, 14)
    assert patches.length == 197
    with torch.device("meta"):
        module = patches.build(768)
        cut = module.cut_patches(torch.empty(2, 3, 224, 224))
    assert cut.shape == (2, 196, 768)
    with pytest.raises(SpecError, match="an image side of 225 is not divisible by 16; resize or crop to 224 or 240"):
        Patches((16, 16), (225, 224))
    with pytest.raises(ValueError, match=r"an image of shape \(3, 8, 12\) was given; this model takes \(3, 8, 8\)"):
        vit(**SMALL).build(0)(torch.zeros(1, 3, 8, 12))


@pytest.mark.ledger("vit.b16")
def test_vit_base_has_its_published_size() -> None:
    assert sum(p.numel() for p in build_on_meta(vit()).parameters()) == 86_567_656


VIT = {
    r"^vit\.": "",
    r"embeddings\.cls_token": "input.cls",
    r"embeddings\.position_embeddings": "position.table.weight",
    r"embeddings\.patch_embeddings\.projection\.": "input.proj.",
    r"^layers\.": "stack.blocks.",
    r"^layernorm\.": "norm.",
    r"classifier\.": "head.labels.",
    **PROJECTIONS,
}


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    theirs = randomized(transformers.ViTForImageClassification(config))
    return theirs, fill(vit(**SMALL).build(), renamed(dict(theirs.named_parameters()), VIT))


@pytest.mark.ledger("vit.patch")
def test_vit_equals_transformers(pair: tuple[nn.Module, nn.Module]) -> None:
    theirs, ours = pair
    data = random_images(ours.spec.input)
    found, expected = ours(data), theirs(data).logits
    assert error(ours.encode(data)[0].x, theirs.vit(data).last_hidden_state) <= 1e-12
    assert error(found, expected) <= 1e-12
    for value in (found, expected):
        value.sin().sum().backward()
    expected_gradients = renamed({name: p.grad for name, p in theirs.named_parameters()}, VIT)
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, expected_gradients[name].reshape(parameter.shape)) <= 1e-9, name


@pytest.mark.ledger("vit.patch")
def test_a_larger_image_needs_only_resized_positions(pair: tuple[nn.Module, nn.Module]) -> None:
    theirs, ours = pair
    large = vit(**SMALL | {"image": 16}).build()
    tensors = dict(ours.named_parameters())
    table = resize_grid(tensors["position.table.weight"], (2, 2), (4, 4))
    fill(large, tensors | {"position.table.weight": table})
    data = random_images(large.spec.input)
    assert error(large(data), theirs(data, interpolate_pos_encoding=True).logits) <= 1e-12


def test_a_distilled_head_is_the_mean_of_two_heads() -> None:
    spec = replace(vit(**SMALL), input=Patches((4, 4), (8, 8), registers=1), position=Learned(6), head=Distilled(3))
    model = randomized(spec.build(0))
    data = random_images(spec.input)
    x = model.encode(data)[0].x
    expected = (model.head.labels(x[:, 0]) + model.head.teacher(x[:, 1])) / 2
    assert error(model(data), expected) <= 1e-12
    with pytest.raises(SpecError, match="use Patches with cls=True and registers=1"):
        replace(vit(**SMALL), head=Distilled(3))
    with pytest.raises(SpecError, match="distilled: labels=0 must be positive"):
        Distilled(0)


def test_rotations_by_row_and_column_distinguish_permuted_patches() -> None:
    """Without positions, permuting the patches permutes the outputs; with 2D rotations it changes them."""
    patches = Patches((2, 2), (8, 8), channels=1)
    attention = Attention(2, mask=Full(), position=Rope2D(columns=4, prefix=patches.first))
    spec = Encoder(patches, 16, (Repeat((Block((Sublayer(attention),)),)),))
    model = randomized(spec.build(0))
    data = random_images(patches)
    assert model(data).shape == (2, 17, 16)
    layers = (Repeat((Block((Sublayer(Attention(2, mask=Full())),)),)),)
    without_positions = randomized(replace(spec, layers=layers).build(0))
    order = [0, *(1 + torch.randperm(16)).tolist()]
    patches_in_order = without_positions.input.cut_patches(data)[:, [i - 1 for i in order[1:]]]
    permuted = F.fold(patches_in_order.mT, (8, 8), (2, 2), stride=(2, 2))
    assert error(without_positions(permuted), without_positions(data)[:, order]) <= 1e-9
    assert not torch.allclose(model(permuted), model(data)[:, order])


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("need one number per dimension", {"size": (4,), "image": (8, 8)}),
        ("must be positive", {"size": (4, 0), "image": (8, 8)}),
        ("shorter than a patch", {"size": (4, 4), "image": (8, 2)}),
        ("channels=0", {"size": (4, 4), "image": (8, 8), "channels": 0}),
    ],
)
def test_wrong_specs_are_refused(message: str, values: dict) -> None:
    with pytest.raises(SpecError, match=message):
        Patches(**values)
