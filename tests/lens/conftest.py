"""Small models with every kind of attention, and token ids for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.rope import Rope
from tests.lens.their_hooks import CASES

POSITIONS = {"none": NoPosition(), "rope": Rope(), "alibi": Alibi()}


def attention_block(kv_heads: int, position: Position) -> Block:
    return Block((Sublayer(Attention(heads=4, kv_heads=kv_heads, position=position)), Sublayer(SwiGLU(24))))


@pytest.fixture
def make_model() -> Callable[..., DecoderModule]:
    def make_model(kv_heads: int = 2, position: str = "rope", backend: str = "auto") -> DecoderModule:
        """Attention, no mixer, attention: float64, with weights large enough that attention is not uniform."""
        without = Block((Sublayer(SwiGLU(24)),))
        attention = attention_block(kv_heads, POSITIONS[position])
        model = Decoder(vocab=31, width=16, layers=(Repeat((attention, without, attention)),)).build(seed=1).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(12 if parameter.dim() > 1 else 1)
        use_backend(model, backend)
        return model

    return make_model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 31, (1, 12), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of `transformers` and ours with the same weights."""
    from tests.families.pairs import make_pair  # imports transformers, which takes seconds

    pair = make_pair(CASES[request.param], tmp_path_factory.mktemp("theirs"))
    pair.theirs.set_attn_implementation("eager")
    return pair
