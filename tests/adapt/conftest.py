"""Small models with every kind of adapted layer, token ids, and random adapter weights."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope


@pytest.fixture
def make_model() -> Callable[..., DecoderModule]:
    def make_model(tied: bool = True, seed: int = 1) -> DecoderModule:
        """One layer of each mixer, in float64."""
        blocks = tuple(
            Block((Sublayer(mixer), Sublayer(SwiGLU(24))))
            for mixer in (Attention(heads=4, kv_heads=2, position=Rope(), bias=True), LinearAttention(heads=4))
        )
        return Decoder(vocab=31, width=16, layers=(Repeat(blocks),), tied=tied).build(seed).double()

    return make_model


@pytest.fixture
def make_stacked() -> Callable[..., DecoderModule]:
    def make_stacked(seed: int = 1) -> DecoderModule:
        """Experts, latent attention with stacked projections per head, and a layer without stacked weights."""
        routed = Experts(count=4, top_k=2, expert=SwiGLU(24), shared=SwiGLU(8))
        blocks = (
            Block((Sublayer(LatentAttention(3, 8, 6, 4)), Sublayer(routed))),
            Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24)))),
        )
        return Decoder(vocab=31, width=16, layers=(Repeat(blocks),)).build(seed).double().eval()

    return make_stacked


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def assert_equal_base_weights() -> Callable[[nn.Module, nn.Module], None]:
    """Asserts that the weights of a model without its adapters equal those of a model without any, bit for bit."""

    def assert_equal_base_weights(adapted_model: nn.Module, base_model: nn.Module) -> None:
        found = {
            re.sub(r"parametrizations\.(\w+)\.original", r"\1", name.replace(".base.", ".")): tensor
            for name, tensor in adapted_model.state_dict().items()
            if "lora_" not in name
        }
        expected = base_model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

    return assert_equal_base_weights


@pytest.fixture
def randomize_adapter() -> Callable[[nn.Module], None]:
    """Draws random B matrices for the active adapter; a new adapter has zeros."""

    def randomize_adapter(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name and parameter.requires_grad:
                nn.init.normal_(parameter)

    return randomize_adapter
