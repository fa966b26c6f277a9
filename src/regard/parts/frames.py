"""Frames: convolutions along time that embed a signal of several channels, such as a spectrogram.

    x = σ(conv_n(… σ(conv_1(signal))))          Radford et al. 2022 (Whisper): kernels of 3, the second with stride 2

One token covers as many frames as the product of the strides, plus the margins of the kernels.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.input import Input
from regard.spec import require


@dataclass(frozen=True)
class Frames(Input):
    channels: int = 80
    strides: tuple[int, ...] = (1, 2)  # one per convolution
    kernel: int = 3
    activation: Activation = "gelu"

    def check(self) -> None:
        require(self.channels > 0, f"frames: channels={self.channels} must be positive")
        require(self.kernel > 0 and self.kernel % 2 == 1, f"frames: kernel={self.kernel} must be odd: 1, 3, 5 …")
        require(
            len(self.strides) > 0 and all(stride > 0 for stride in self.strides),
            f"frames: strides={self.strides} must be positive, one per convolution",
        )

    def build(self, width: int) -> nn.Module:
        return FramesModule(width, self)


class FramesModule(nn.Module):
    def __init__(self, width: int, spec: Frames):
        super().__init__()
        self.spec = spec
        inputs = (spec.channels, *[width] * (len(spec.strides) - 1))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels, width, spec.kernel, stride, padding=spec.kernel // 2)
            for channels, stride in zip(inputs, spec.strides, strict=True)
        )
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, signal: Tensor, types: Tensor | None = None) -> Tensor:
        """signal (B, C, frames) -> (B, L, D)"""
        if types is not None:
            raise ValueError("types were given, but frames have no type embeddings; leave them out")
        if signal.dim() != 3 or signal.shape[1] != self.spec.channels:
            found, expected = tuple(signal.shape[1:]), f"({self.spec.channels}, frames)"
            raise ValueError(f"a signal of shape {found} was given; this model takes {expected}")
        for convolution in self.convolutions:
            signal = self.activation(convolution(signal))  # (B, D, L)
        return signal.mT  # (B, L, D)
