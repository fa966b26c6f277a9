"""Tiny models with each kind of state; large weights make their outputs depend clearly on the tokens."""

import pytest
import torch

from regard.engine.engine import Engine
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.parts.short_convolution import ShortConvolution

ATTENTION = Block((Sublayer(Attention(4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
LINEAR = Block((Sublayer(LinearAttention(4)), Sublayer(SwiGLU(48))))
WINDOW = Block((Sublayer(Attention(4, kv_heads=2, position=Rope(), mask=Window(6))), Sublayer(SwiGLU(48))))
CONVOLUTION = Block((Sublayer(ShortConvolution(3)), Sublayer(SwiGLU(48))))
PATTERNS = {
    "attention": (ATTENTION, ATTENTION),
    "linear": (LINEAR, LINEAR),
    "hybrid": (LINEAR, WINDOW, ATTENTION),
    "convolution": (CONVOLUTION, ATTENTION),
}


@pytest.fixture(autouse=True)
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's records are checked after every step of an engine."""
    step = Engine.step

    def step_and_check(engine: Engine):
        produced = step(engine)
        engine.store.check()
        return produced

    monkeypatch.setattr(Engine, "step", step_and_check)


@pytest.fixture(scope="session")
def tiny():
    """tiny(kind, dtype): a decoder of two or three layers with width=32, vocab=61 and context=128."""
    models = {}

    def make(kind: str = "attention", dtype: torch.dtype = torch.float64):
        if (kind, dtype) not in models:
            model = Decoder(vocab=61, width=32, layers=(Repeat(PATTERNS[kind]),), context=128).build(seed=1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 8 if parameter.dim() > 1 else 1
            models[kind, dtype] = model.to(dtype)
        return models[kind, dtype]

    return make
