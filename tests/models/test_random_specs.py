"""Random combinations of parts: they build, train a step, decode, are saved and loaded, and obey every law."""

from collections.abc import Collection

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from regard.kernels.attention.mask import Mask
from regard.kinds import KINDS
from regard.models.decoder import Decoder, DecoderModule
from regard.models.outputs import materialize
from regard.parts.body import Body
from regard.parts.norm import Norm
from regard.parts.position.base import Position
from regard.parts.position.rope_scaling import Scaling
from regard.parts.position.t5 import T5Buckets
from regard.spec import class_of
from regard.verification.laws import LAWS
from regard.verification.report import verify
from regard.verification.trial import randomize_weights
from tests import random_specs
from tests.laws import broken_laws

LENGTH = 7
TABLES = {
    Body: random_specs.mixers(1).keys() | random_specs.FEEDFORWARDS.keys(),
    Position: random_specs.POSITIONS.keys() | random_specs.stack_positions(1).keys(),
    Scaling: random_specs.SCALINGS.keys(),
    Mask: random_specs.MASKS.keys(),
    Norm: random_specs.NORMS.keys(),
}
NOT_IN_A_DECODER = {
    "cross_attention": "reads a source, and a decoder has none",
    "attentive_recurrence": "reads a source, and a decoder has none",
    "linformer": "would let a decoder attend to later tokens",
    "big_bird_attention": "would let a decoder attend to later tokens",
    "global_attention": "would let a decoder attend to later tokens",
    "bidirectional": "would let a decoder attend to later tokens",
    "full": "would let a decoder attend to later tokens",
    "prefix_lm": "would let a decoder attend to later tokens",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_can_be_drawn(kind: str) -> None:
    for base, table in TABLES.items():
        if issubclass(class_of(kind, ""), base):
            assert (kind in table) != (kind in NOT_IN_A_DECODER), (
                f"list {kind} in a decoder of tests/laws.py, or the reason in NOT_IN_A_DECODER"
            )


# By the hypothesis profile: 30 specs and 10 hybrids, or 150 and 60; a spec takes seconds.
EXAMPLES, HYBRIDS = (10, 5) if settings.default.max_examples < 100 else (50, 30)
NO_SHRINKING = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # shrinking takes minutes
MIXED = [law for law in LAWS if LAWS[law].needs in ("memory", "engine", "padding", "packing")]


@pytest.mark.timeout(1200)  # the thorough profile has ten times the examples
@pytest.mark.parametrize("part", range(3))  # so that parallel processes can share the work
@settings(NO_SHRINKING, max_examples=EXAMPLES)
@given(random_specs.decoders(), st.integers(0, 99))
def test_laws_hold_for_random_specs(part: int, spec: Decoder, seed: int) -> None:
    """A third of them have all laws in float64 and float32, the others half of the laws each in float64."""
    assert Decoder.from_json(spec.to_json()) == spec == Decoder.from_toml(spec.to_toml())
    train_a_step(spec, seed)
    if part > 0:
        return keeps_laws(spec, seed, laws=list(LAWS)[part - 1 :: 2])
    broken = verify(built(spec, seed), LENGTH, seed).failed
    assert not broken, broken


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(2))
@settings(NO_SHRINKING, max_examples=HYBRIDS)
@given(random_specs.hybrids(), st.integers(0, 999))
def test_hybrids(part: int, spec: Decoder, seed: int) -> None:
    keeps_laws(spec, seed, 10, MIXED)


def keeps_laws(spec: Decoder, seed: int, length: int = LENGTH, laws: Collection[str] = LAWS) -> None:
    broken = broken_laws(built(spec, seed), length, seed, laws)
    assert not broken, broken


def built(spec: Decoder, seed: int) -> DecoderModule:
    model = spec.build(seed).eval().requires_grad_(False)
    randomize_weights(model, seed)
    return model


def train_a_step(spec: Decoder, seed: int) -> None:
    model = spec.build(seed).train()
    torch.manual_seed(seed)
    tokens = torch.randint(random_specs.VOCAB, (2, LENGTH + 1))
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
    """Whether this is a table of biases that no attention of the stack uses."""
    return isinstance(spec.position, T5Buckets) and name == "position.table.weight"
