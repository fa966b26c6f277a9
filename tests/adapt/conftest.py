from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope


@pytest.fixture
def make() -> Callable[..., DecoderModule]:
    def make(tied: bool = True, seed: int = 1) -> DecoderModule:
        """One layer of each mixer, in float64."""
        blocks = tuple(
            Block((Sublayer(mixer), Sublayer(SwiGLU(24))))
            for mixer in (Attention(heads=4, kv_heads=2, position=Rope(), bias=True), LinearAttention(heads=4))
        )
        return Decoder(vocab=31, width=16, layers=(Repeat(blocks),), tied=tied).build(seed).double()

    return make


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def stir() -> Callable[[nn.Module], None]:
    """Random B matrices, so that an adapter does something."""

    def stir(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)

    return stir
