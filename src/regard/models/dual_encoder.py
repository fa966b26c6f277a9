"""The dual encoder: embeddings of images and texts in one space, similar for matching pairs.

    logits_ij = image_i · text_j / τ (+ b)          Radford et al. 2021 (CLIP); with a bias Zhai et al. 2023 (SigLIP)

Both encoders have a `Pooled` head of the same dimension. The temperature is learned, as the logarithm of 1/τ.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.base import Model, Scheme
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import Pooled
from regard.models.outputs import Outputs
from regard.parts.block import sum_losses
from regard.spec import SpecError, require


@dataclass(frozen=True)
class DualEncoder(Model["DualEncoderModule"]):
    image: Encoder
    text: Encoder
    temperature: float = 0.07  # initial value
    bias: float | None = None  # initial value; None: no bias
    end: int | None = None  # the token that ends a text; tokens after the first one are padding

    def check(self) -> None:
        require(self.temperature > 0, f"dual_encoder: temperature={self.temperature} must be positive")
        require(self.end is None or self.end >= 0, f"dual_encoder: end={self.end} must not be negative")
        dims = {name: embedding_dim(name, getattr(self, name)) for name in ("image", "text")}
        require(
            dims["image"] == dims["text"],
            f"dual_encoder: image embeddings have {dims['image']} dimensions and text embeddings {dims['text']}; set "
            "the same dim in both heads",
        )

    def canonical(self, width: int) -> Self:
        return replace(self, temperature=1.0, bias=None if self.bias is None else 0.0)  # initial values of parameters

    def module(self, scheme: Scheme) -> "DualEncoderModule":
        return DualEncoderModule(self, scheme)


def embedding_dim(name: str, encoder: Encoder) -> int:
    if not (isinstance(encoder.head, Pooled) and encoder.head.normalize):
        raise SpecError(f"dual_encoder: the {name} encoder needs a head with normalized embeddings; use Pooled()")
    return encoder.head.dim or encoder.head.pooled_dim(encoder.width)


class DualEncoderModule(nn.Module):
    def __init__(self, spec: DualEncoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.image = EncoderModule(spec.image, scheme)
        self.text = EncoderModule(spec.text, scheme)
        self.scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))
        self.bias = None if spec.bias is None else nn.Parameter(torch.tensor(spec.bias))

    def forward(
        self, images: Tensor, tokens: Tensor, layout: TokenLayout | None = None, outputs: bool = False
    ) -> Tensor | Outputs:
        """n images and m texts -> (n, m) logits of each pair; or all `outputs` that an objective needs."""
        image, text = self.image(images, outputs=True), self.text(tokens, self.until_end(tokens, layout), outputs=True)
        logits = self.scale.exp() * image.logits @ text.logits.T  # (n, m)
        logits = logits if self.bias is None else logits + self.bias
        return Outputs(logits, (), sum_losses(image.losses, text.losses)) if outputs else logits

    def until_end(self, tokens: Tensor, layout: TokenLayout | None) -> TokenLayout | None:
        """The layout with tokens after the first end token invalid; CLIP pads its texts with end tokens."""
        if self.spec.end is None:
            return layout
        layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
        valid = torch.ones_like(tokens, dtype=torch.bool) if layout.valid is None else layout.valid
        ends = ((tokens == self.spec.end) & valid).long()
        return replace(layout, valid=valid & (ends.cumsum(-1) == ends), ordered=False)  # up to the first end
