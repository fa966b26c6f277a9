"""Any parts in any mix: they build, train a step, decode as they read, are saved and loaded, and keep every law."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from regard.kernels.attention.mask import Mask
from regard.models.decoder import Decoder
from regard.models.outputs import materialize
from regard.parts.body import Body
from regard.parts.norm import Norm
from regard.parts.position.base import Position
from regard.parts.position.rope_scaling import Scaling
from regard.parts.position.t5 import T5Buckets
from regard.spec import KINDS, class_of
from regard.verify.draw import draw_wide
from regard.verify.verdict import verify
from tests import random_specs as drawn

LENGTH = 7
TABLES = {
    Body: drawn.mixers(1).keys() | drawn.FEEDFORWARDS.keys(),
    Position: drawn.POSITIONS.keys() | drawn.of_stack(1).keys(),
    Scaling: drawn.SCALINGS.keys(),
    Mask: drawn.MASKS.keys(),
    Norm: drawn.NORMS.keys(),
}
ELSEWHERE = {
    "cross_attention": "reads a source, and a decoder has none",
    "attentive_recurrence": "reads a source, and a decoder has none",
    "linformer": "lets a decoder see later tokens",
    "big_bird_attention": "lets a decoder see later tokens",
    "global_attention": "lets a decoder see later tokens",
    "bidirectional": "lets a decoder see later tokens",
    "full": "lets a decoder see later tokens",
    "prefix_lm": "lets a decoder see later tokens",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_drawn(kind: str) -> None:
    for base, table in TABLES.items():
        if issubclass(class_of(kind, ""), base):
            assert (kind in table) != (kind in ELSEWHERE), f"{kind} needs a strategy in tests/random_specs.py"


UNSHRUNK = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # to shrink takes minutes


@pytest.mark.timeout(1500)
@UNSHRUNK
@given(drawn.decoders(), st.integers(0, 99))
def test_any_mix_of_parts(spec: Decoder, seed: int) -> None:
    assert Decoder.from_json(spec.to_json()) == spec == Decoder.from_toml(spec.to_toml())
    train_a_step(spec, seed)
    keeps_every_law(spec, seed)


@settings(UNSHRUNK, max_examples=4)
@given(drawn.hybrids(), st.integers(0, 99))
def test_hybrids(spec: Decoder, seed: int) -> None:
    keeps_every_law(spec, seed, 10)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@UNSHRUNK
@given(drawn.hybrids(), st.integers(100, 999))
def test_many_hybrids(spec: Decoder, seed: int) -> None:
    keeps_every_law(spec, seed, 10)


def keeps_every_law(spec: Decoder, seed: int, length: int = LENGTH) -> None:
    model = spec.build(seed).eval()
    draw_wide(model, seed)
    broken = [verdict for verdict in verify(model, length, seed) if verdict.result == "FAIL"]
    assert not broken, broken


def train_a_step(spec: Decoder, seed: int) -> None:
    model = spec.build(seed).train()
    torch.manual_seed(seed)
    tokens = torch.randint(drawn.VOCAB, (2, LENGTH + 1))
    out = model(tokens[:, :-1], outputs=True)
    losses = [
        F.cross_entropy(materialize(logits).flatten(0, 1), tokens[:, 1:].flatten())
        for logits in (out.logits, *out.ahead_logits)
    ]
    total = sum(losses) + sum(out.losses.values())
    assert total.isfinite()
    total.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not unused(name, spec):
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def unused(name: str, spec: Decoder) -> bool:
    """A table of biases for a stack in which nothing has scores."""
    return isinstance(spec.position, T5Buckets) and name == "position.table.weight"
