"""Every mixer works with every position scheme in every store, or is refused as expected."""

import dataclasses

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from regard.kernels.attention.mask import Mask
from regard.kinds import KINDS
from regard.layout import Source, TokenLayout
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.heads import Head
from regard.parts.body import Body
from regard.parts.input import Input
from regard.parts.norm import Norm
from regard.parts.position.base import Position, PositionModule
from regard.parts.position.rope_scaling import Scaling
from regard.parts.state import STATELESS
from regard.spec import class_of
from regard.verification.trial import randomize_weights
from tests.laws import WIDTH, build, random_ids
from tests.matrix import COLUMNS, fits, mixers, model_of, parts_of_type, positions, row, takes_position

DRAFTERS = {"medusa", "eagle"}  # of another model: tests/test_draft_training.py
GENERATIVE = {"autoencoder", "vae", "gan"}  # not of sequences: tests/models/test_models.py
MUST_BE_LISTED = (Body, Position, Scaling, Mask, Norm, Head, Input, Model, Decoder)


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if issubclass(class_of(k, ""), MUST_BE_LISTED) and k not in DRAFTERS | GENERATIVE]
)
def test_every_part_is_in_a_model_of_the_table(kind: str) -> None:
    cls = class_of(kind, "")
    assert any(type(part) is cls for part in parts_of_type(cls)), f"add a model with {kind} to tests/laws.py"


BODIES = list(dict.fromkeys(parts_of_type(Body)))  # the distinct bodies of all models


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)
def test_every_body_keeps_the_shape_and_passes_gradcheck(body: Body) -> None:
    """Gradients of the input and of every weight equal finite differences, with padding in the row."""
    module = body.build(WIDTH).double().eval()
    randomize_weights(module)
    weights = dict(module.named_parameters())
    layout = TokenLayout(torch.tensor([[0, 0, 1, 2, 3]]), valid=torch.tensor([[False, True, True, True, True]]))
    x, source = torch.randn(2, 1, 5, WIDTH, dtype=torch.float64).unbind()
    layout = layout.with_source(Source(source, TokenLayout.whole(1, 5)))

    def forward(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return functional_call(module, dict(zip(weights, values, strict=True)), (x, layout, STATELESS))[:, 1:]

    assert forward(x, *weights.values()).shape == (1, 4, WIDTH)
    gradcheck(forward, (x.requires_grad_(), *weights.values()), fast_mode=True)


@pytest.mark.parametrize("name", [name for name in positions() if name != "no_position"])
def test_a_position_scheme_has_an_effect(name: str) -> None:
    """The output changes if the distances between the tokens change."""
    model = build(model_of(mixers()["attention"], positions()[name]))
    tokens = random_ids(1, 4)
    consecutive, spaced = (
        model(tokens, TokenLayout(torch.tensor([indices]))) for indices in ([0, 1, 2, 3], [0, 2, 4, 7])
    )
    assert (consecutive - spaced).abs().max() > 1e-3


@pytest.mark.parametrize("name", positions())
def test_a_scheme_replaces_the_bias_of_the_stack_if_it_has_a_bias(name: str) -> None:
    position = positions()[name]
    modules = [m for m in build(model_of(mixers()["attention"], position)).modules() if isinstance(m, PositionModule)]
    has_bias = any(type(module).bias is not PositionModule.bias for module in modules)
    assert position.replaces_bias == has_bias


def test_common_mixers_and_positions_are_listed() -> None:
    assert {"attention", "cross_attention", "linear_attention", "short_convolution"} <= mixers().keys()
    assert {"no_position", "rope", "rope, yarn", "learned", "alibi", "t5_buckets"} <= positions().keys()
    assert all(dataclasses.is_dataclass(part) for part in (*mixers().values(), *positions().values()))


SLOW = [name for name in mixers() if "," in name or name == "native_sparse"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in mixers()]
)
def test_a_mixer_works_with_every_position_in_every_store_or_is_refused(name: str) -> None:
    body = mixers()[name]
    for scheme, position in positions().items():
        found = row(body, position)
        refused = not takes_position(body) and not fits(position, "stack")
        refused = refused or scheme == "t5_buckets of the stack" and body.bias_heads is None
        for store, law in COLUMNS:
            expected = "pass"
            if refused:
                expected = "SpecError"
            elif store != "fresh" and law == "packed":
                expected = "ValueError"
            assert found[store, law] == expected, (name, scheme, store, law)
