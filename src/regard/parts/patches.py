"""Patches: an image is cut into a grid of patches; each is flattened and projected by one linear layer.

    x_p = W flatten(patch_p) + b          a convolution with the patch as kernel and `stride` as stride

Learned vectors may precede the patches: [CLS], which represents the image (Dosovitskiy et al. 2020), and registers,
whose outputs are unused (Darcet et al. 2023) or read by a second head (Touvron et al. 2020). A spectrogram is an image
with one channel, with overlapping patches in Gong et al. 2021; a video has three dimensions (frames, height, width), a
signal one. For images of another size the learned positions can be interpolated (`any_size`; Oquab et al. 2023).
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.parts.input import Input
from regard.spec import require


@dataclass(frozen=True)
class Patches(Input):
    size: tuple[int, ...]  # of a patch
    image: tuple[int, ...]  # (height, width)
    channels: int = 3
    stride: tuple[int, ...] = ()  # (): the size. With a stride, incomplete patches at the edges are ignored
    cls: bool = True
    registers: int = 0
    bias: bool = True
    any_size: bool = False  # images may have another size; the learned positions are then interpolated

    def check(self) -> None:
        require(
            len(self.size) == 2 or not self.any_size,
            f"patches: any_size=True needs images with a height and a width, but size={self.size}; set any_size=False",
        )
        require(
            len(self.image) == len(self.size) > 0 and len(self.stride) in (0, len(self.size)),
            f"patches: size={self.size}, image={self.image} and stride={self.stride} need one number per dimension",
        )
        for name in ("size", "image", "stride"):
            require(all(n > 0 for n in getattr(self, name)), f"patches: {name}={getattr(self, name)} must be positive")
        require(self.channels > 0, f"patches: channels={self.channels} must be positive")
        require(self.registers >= 0, f"patches: registers={self.registers} must not be negative")
        for side, patch in zip(self.image, self.size, strict=True):
            require(
                side >= patch,
                f"patches: an image side of {side} is shorter than a patch side of {patch}; use smaller patches",
            )
            multiples = f"{side - side % patch} or {side - side % patch + patch}"
            require(
                bool(self.stride) or side % patch == 0,
                f"patches: an image side of {side} is not divisible by {patch}; resize or crop to {multiples}",
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of patches along each dimension."""
        return self.grid_of(self.image)

    def grid_of(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Number of patches along each dimension of an image of this size."""
        steps = self.stride or self.size
        return tuple((a - b) // c + 1 for a, b, c in zip(image, self.size, steps, strict=True))

    @property
    def first(self) -> int:
        """Number of tokens before the patches."""
        return int(self.cls) + self.registers

    @property
    def length(self) -> int:
        return self.first + prod(self.grid)

    def build(self, width: int) -> nn.Module:
        return PatchesModule(width, self)


class PatchesModule(nn.Module):
    no_muon = ("proj",)

    def __init__(self, width: int, spec: Patches):
        super().__init__()
        self.spec = spec
        self.proj = nn.Linear(spec.channels * prod(spec.size), width, bias=spec.bias)
        self.cls, self.registers = learned_tokens(int(spec.cls), width), learned_tokens(spec.registers, width)

    def forward(self, images: Tensor, types: Tensor | None = None) -> Tensor:
        """images (B, C, height, width) -> (B, L, D)"""
        if types is not None:
            raise ValueError("types were given, but patches have no type embeddings; leave them out")
        x = self.proj(self.cut_patches(images))  # (B, P, D)
        first = [tokens.expand(len(x), -1, -1) for tokens in (self.cls, self.registers) if tokens is not None]
        return torch.cat([*first, x], 1)  # (B, L, D)

    def cut_patches(self, images: Tensor) -> Tensor:
        """The values of each patch (B, P, C·size), channel by channel."""
        expected, sides = (self.spec.channels, *self.spec.image), len(self.spec.size)
        if images.shape[1:] != expected and not self.accepts(images):
            raise ValueError(f"an image of shape {tuple(images.shape[1:])} was given; this model takes {expected}")
        x = images
        for side, (size, step) in enumerate(zip(self.spec.size, self.spec.stride or self.spec.size, strict=True)):
            x = x.unfold(2 + side, size, step)  # after the last: (B, C, *grid, *size)
        return x.movedim(1, 1 + sides).flatten(1, sides).flatten(2)  # (B, P, C·size)

    def accepts(self, images: Tensor) -> bool:
        """Whether images of another size than `spec.image` are supported."""
        if not self.spec.any_size or images.dim() != 4 or images.shape[1] != self.spec.channels:
            return False
        return all(side >= patch for side, patch in zip(images.shape[2:], self.spec.size, strict=True))


def learned_tokens(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(nn.init.normal_(torch.empty(count, width), std=width**-0.5)) if count else None


def resize_grid(table: Tensor, old: tuple[int, ...], new: tuple[int, ...], first: int = 1) -> Tensor:
    """Learned positions (first + rows · columns, D), interpolated to the new grid; the `first` rows are unchanged."""
    grid = table[first:].T.unflatten(-1, old).unsqueeze(0)  # (1, D, rows, columns)
    wide = grid.to(torch.promote_types(grid.dtype, torch.float32))
    grid = F.interpolate(wide, size=new, mode="bicubic", align_corners=False).to(table.dtype)
    return torch.cat([table[:first], grid[0].flatten(1).T])
