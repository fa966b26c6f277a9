"""Initial weights have the standard deviations of their scheme; residual projections shrink with the depth."""

import pytest
import torch

from regard.layout import TokenLayout
from regard.models.base import build_on_meta
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import FeedForward
from regard.parts.rg_lru import RGLRU
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from tests.laws import MODELS, OTHERS

DEPTH, WIDTH = 8, 128


def initial_weights(scheme: str, **block) -> dict[str, torch.Tensor]:
    block = Block((Sublayer(Attention(4, bias=True)), Sublayer(FeedForward(512))), **block)
    return dict(Decoder(200, WIDTH, (Repeat((block,), DEPTH),)).build(0, scheme).named_parameters())


def deviation(weights: dict[str, torch.Tensor], leaf: str) -> float:
    return torch.cat([w.flatten() for name, w in weights.items() if name.endswith(leaf)]).std().item()


@pytest.mark.parametrize(
    ("scheme", "q", "o", "up", "down"),
    [
        ("fan_in", 128**-0.5, 2048**-0.5, 128**-0.5, 8192**-0.5),
        ("gpt2", 0.02, 0.02 / 4, 0.02, 0.02 / 4),
        ("xavier", (2 / 256) ** 0.5, (2 / 256) ** 0.5, (2 / 640) ** 0.5, (2 / 640) ** 0.5),
        ("deepnorm", (2 / 256) ** 0.5, 64**-0.25 * (2 / 256) ** 0.5, *[64**-0.25 * (2 / 640) ** 0.5] * 2),
    ],
)
def test_initial_weights_have_the_deviations_of_their_scheme(
    scheme: str, q: float, o: float, up: float, down: float
) -> None:
    weights = initial_weights(scheme)
    for leaf, expected in (("q_proj", q), ("o_proj", o), ("up_proj", up), ("down_proj", down)):
        assert deviation(weights, f"{leaf}.weight") == pytest.approx(expected, rel=0.02)
        assert not any(w.any() for name, w in weights.items() if name.endswith(f"{leaf}.bias"))


def test_the_residual_stream_does_not_grow_with_depth() -> None:
    """The variance after an untrained stack hardly depends on its depth if residual projections are scaled."""

    def variance(depth: int, scaled: bool) -> float:
        block = Block((Sublayer(Attention(4)), Sublayer(FeedForward(512))))
        model = Decoder(200, WIDTH, (Repeat((block,), depth),)).build(0)
        if not scaled:
            for name, w in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    w.data *= (2 * depth) ** 0.5
        tokens = torch.arange(64).unsqueeze(0)
        with torch.no_grad():
            embeddings = model.embedding(tokens)
            return float(model.stack(embeddings, TokenLayout.whole(1, 64))[0].var() / embeddings.var())

    assert variance(24, scaled=True) < 2 * variance(2, scaled=True)
    assert variance(24, scaled=False) > 5 * variance(24, scaled=True)


def test_deepnorm_bounds_the_initial_value_projections() -> None:
    """DeepNorm scales the residual stream by (2·depth)^¼ before each norm, and initial weights by (8·depth)^-¼."""
    weights = initial_weights("deepnorm", style="post", keep=(2 * DEPTH) ** 0.25)
    bound = (8 * DEPTH) ** -0.25 * (6 / (2 * WIDTH)) ** 0.5
    v = torch.cat([w.flatten() for name, w in weights.items() if name.endswith("v_proj.weight")])
    assert v.abs().max() <= bound
    assert v.abs().max() > 0.99 * bound


@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_building_on_the_meta_device_draws_no_random_numbers(name: str) -> None:
    """Checkpoints build models there: a draw would change the dropout of the steps after a save."""
    before = torch.random.get_rng_state()
    build_on_meta((MODELS | OTHERS)[name])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "body", [Mamba(1 << 40), Mamba(4, 1 << 40), Mamba2(4, 1, 1 << 40), RGLRU(1 << 20, 1 << 40)], ids=str
)
def test_building_on_the_meta_device_computes_no_values(body: Body) -> None:
    """A damaged config may claim any size."""
    model = build_on_meta(Decoder(5, 8, (Repeat((Block((Sublayer(body),)),)),)))
    assert sum(parameter.numel() for parameter in model.parameters()) > 1 << 40
