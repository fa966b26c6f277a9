"""Scaled rotary frequencies equal their formulas in float64 and transformers in float32; limits of caching."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope, rotations
from regard.parts.position.rope_scaling import (
    NTK,
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRope,
    Scaling,
    Yarn,
    document_lengths,
)
from tests.laws import block, build, decoder, error, layout_with_padding, random_ids

LENGTH = 256  # the trained length
SHORT, LONG = tuple(1 + i / 10 for i in range(16)), tuple(2.0 + i for i in range(16))


def whole_layout(length: int) -> TokenLayout:
    return TokenLayout.whole(1, length)


def theta(base: float, dim: int) -> list[float]:
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def yarn(base: float, dim: int, spec: Yarn) -> list[float]:
    def pair_with(rotations: float) -> float:
        return dim * math.log(spec.length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    return [t * (1 - r) + t / spec.factor * r for t, r in zip(theta(base, dim), ramp, strict=True)]


def llama3(base: float, dim: int, spec: Llama3) -> list[float]:
    found = []
    for t in theta(base, dim):
        wavelength = 2 * math.pi / t
        if wavelength < spec.length / spec.high_freq_factor:
            found.append(t)
        elif wavelength > spec.length / spec.low_freq_factor:
            found.append(t / spec.factor)
        else:
            smooth = (spec.length / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
            found.append((1 - smooth) * t / spec.factor + smooth * t)
    return found


def formula(spec: Scaling, base: float, dim: int, length: int) -> list[float]:
    """The frequencies in Python's floats, one pair at a time."""
    match spec:
        case LinearScaling():
            return [t / spec.factor for t in theta(base, dim)]
        case NTK():
            return theta(base * spec.factor ** (dim / (dim - 2)), dim)
        case DynamicNTK():
            ratio = spec.factor * max(length, spec.length) / spec.length - (spec.factor - 1)
            return theta(base * ratio ** (dim / (dim - 2)), dim)
        case Yarn():
            return yarn(base, dim, spec)
        case Llama3():
            return llama3(base, dim, spec)
        case LongRope():
            divisors = spec.long if length > spec.length else spec.short
            return [t / d for t, d in zip(theta(base, dim), divisors, strict=True)]
    raise AssertionError(spec)


SCALINGS: dict[str, tuple[Scaling, dict | None]] = {  # with the parameters of transformers
    "linear": (LinearScaling(8.0), {"rope_type": "linear", "factor": 8.0}),
    "ntk": (NTK(8.0), None),
    "dynamic": (DynamicNTK(4.0, LENGTH), {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": (Yarn(8.0, LENGTH), {"rope_type": "yarn", "factor": 8.0}),
    "yarn, other betas": (
        Yarn(40.0, LENGTH, beta_fast=16.0, beta_slow=2.0),
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "yarn, no fast pairs": (
        Yarn(8.0, LENGTH, beta_fast=64.0),
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 64.0},
    ),
    "yarn, not truncated": (
        Yarn(32.0, LENGTH, truncate=False),
        {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    ),
    "yarn, attention factor": (
        Yarn(4.0, LENGTH, attention_factor=0.8),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8},
    ),
    "yarn, two scales": (
        Yarn(40.0, LENGTH, mscale=0.707, mscale_all_dim=1.3),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    ),
    "llama3": (
        Llama3(8.0, LENGTH, 1.0, 4.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "longrope": (
        LongRope(SHORT, LONG, 8.0, LENGTH),
        {"rope_type": "longrope", "factor": 8.0, "short_factor": list(SHORT), "long_factor": list(LONG)},
    ),
}


def config(parameters: dict, base: float) -> LlamaConfig:
    dynamic = parameters["rope_type"] == "dynamic"
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=LENGTH if dynamic else 8 * LENGTH,
        rope_parameters=parameters | {"rope_theta": base, "original_max_position_embeddings": LENGTH},
    )


@pytest.mark.ledger("pos.rope.pi", "pos.rope.ntk", "pos.rope.dynamic", "pos.rope.yarn")
@pytest.mark.parametrize("base", [5.0, 10000.0, 500000.0])  # at 5, YaRN's ramp would end after the last coordinate
@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH, LENGTH + 1, 5 * LENGTH])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_their_formula(name: str, length: int, base: float) -> None:
    spec, expected = SCALINGS[name][0], formula(SCALINGS[name][0], base, 32, length)
    found = spec.frequencies(base, 32, whole_layout(length))
    assert found.dtype == torch.float64
    for row in found.reshape(-1, 16)[[0, -1]].tolist():
        assert row == pytest.approx(expected, rel=1e-14)


@pytest.mark.ledger("pos.rope.pi", "pos.rope.dynamic", "pos.rope.yarn")
@pytest.mark.parametrize("base", [5.0, 10000.0, 500000.0])  # at 5, YaRN's ramp would end after the last coordinate
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1, 5 * LENGTH])
@pytest.mark.parametrize("name", [name for name, (_, theirs) in SCALINGS.items() if theirs])
def test_frequencies_equal_transformers(name: str, length: int, base: float) -> None:
    """Theirs are computed in float32, so the tolerance is a few units in the last place."""
    spec, parameters = SCALINGS[name]
    theirs, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config(parameters, base), "cpu", seq_len=length)
    found = spec.frequencies(base, 32, whole_layout(length)).reshape(-1, 16)[-1]
    assert ((found - theirs).abs() / found).max() < 12 * torch.finfo(torch.float32).eps
    assert spec.amplitude == pytest.approx(amplitude, rel=1e-15)


@pytest.mark.ledger("pos.rope.dynamic", "pos.rope.yarn", "pos.rope.pi")
@pytest.mark.parametrize("name", [name for name, (_, theirs) in SCALINGS.items() if theirs])
def test_cosines_and_sines_equal_transformers(name: str) -> None:
    """The whole module at three times the trained length, with its attention temperature."""
    spec, parameters = SCALINGS[name]
    layout = whole_layout(3 * LENGTH)
    expected = LlamaRotaryEmbedding(config(parameters, 10000.0))(torch.zeros(1), layout.positions)
    cos_sin = rotations(layout, Rope(scaling=spec), 32, torch.float32)
    for found, theirs in zip(cos_sin, expected, strict=True):
        assert (found[:, 0] - theirs[..., :16]).abs().max() < 768 * 12 * torch.finfo(torch.float32).eps


@pytest.mark.ledger("pos.rope.pi")
def test_interpolated_angles_stay_within_the_trained_ones() -> None:
    trained = (LENGTH - 1) * Rope().frequencies(32, whole_layout(1))
    stretched = (8 * (LENGTH - 1)) * Rope(scaling=LinearScaling(8.0)).frequencies(32, whole_layout(1))
    assert (stretched <= trained * (1 + 1e-15)).all()
    assert ((8 * (LENGTH - 1)) * Rope().frequencies(32, whole_layout(1)) > trained).all()


@pytest.mark.ledger("pos.rope.ntk")
@pytest.mark.parametrize("dim", [4, 32, 128])
def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor(dim: int) -> None:
    ratio = Rope().frequencies(dim, whole_layout(1)) / Rope(scaling=NTK(8.0)).frequencies(dim, whole_layout(1))
    assert ratio[0] == 1
    assert ratio[-1].item() == pytest.approx(8.0, rel=1e-13)
    assert (ratio.diff() > 0).all()


@pytest.mark.ledger("pos.rope.yarn")
def test_yarn_keeps_fast_pairs_interpolates_slow_ones_and_sharpens_attention() -> None:
    spec = Yarn(16.0, 4096)
    ratio = Rope().frequencies(128, whole_layout(1)) / Rope(scaling=spec).frequencies(128, whole_layout(1))
    rotations = 4096 * Rope().frequencies(128, whole_layout(1)) / (2 * math.pi)  # in the trained length
    assert (ratio[rotations > 40] == 1).all()
    assert torch.allclose(ratio[rotations < 0.8], torch.tensor(16.0).double())
    assert spec.amplitude == pytest.approx(0.1 * math.log(16) + 1)
    q = torch.randn(1, 1, 1, 128, generator=torch.Generator().manual_seed(0)).double()
    rotated = Rope(scaling=spec).build(128, 1).rotate(q, q, whole_layout(1))
    assert ((rotated[0] * rotated[1]).sum() / (q * q).sum()).item() == pytest.approx(spec.amplitude**2, rel=1e-12)


def test_only_rotated_coordinates_are_scaled() -> None:
    q = torch.ones(1, 1, 3, 16).double()
    rotated, _ = Rope(share=0.5, scaling=Yarn(8.0, LENGTH)).build(16, 1).rotate(q, q, whole_layout(3))
    assert torch.equal(rotated[..., 8:], q[..., 8:])
    assert (rotated[:, :, 0, :8] == Yarn(8.0, LENGTH).amplitude).all()


def test_document_lengths_are_per_token() -> None:
    segments = torch.tensor([[7, 7, 7, 2, 2, 5, 5, 5, 5, 0], [1, 1, 1, 1, 1, 1, 1, 1, 3, 3]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 40], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])
    valid = torch.ones_like(segments, dtype=torch.bool)
    valid[0, -1] = False
    found = document_lengths(TokenLayout(positions, segments, valid))
    assert found.tolist() == [[3, 3, 3, 2, 2, 4, 4, 4, 4, 1], [8] * 8 + [2] * 2]
    assert document_lengths(layout_with_padding([3, 5], 6, left=True)).tolist() == [[3] * 6, [5] * 6]
    assert document_lengths(TokenLayout(torch.tensor([[9], [4]]))).tolist() == [[10], [5]]


DYNAMIC = {"dynamic ntk": DynamicNTK(4.0, 8), "longrope": LongRope((1, 2, 3), (2, 4, 8), 4.0, 8)}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_long_rows_of_a_batch_do_not_change_short_ones(name: str, left: bool) -> None:
    """One base per batch, as in other libraries, would rotate short rows by the frequencies of the longest."""
    model = build(decoder(block(Attention(4, position=Rope(scaling=DYNAMIC[name])))))
    tokens, layout = random_ids(3, 20), layout_with_padding([5, 12, 20], 20, left)
    logits = model(tokens, layout)
    for row, valid in enumerate(layout.valid):
        assert error(logits[row, valid], model(tokens[row, valid].unsqueeze(0))[0]) < 1e-9


@pytest.mark.parametrize("name", DYNAMIC)
def test_long_documents_of_a_packed_row_do_not_change_short_ones(name: str) -> None:
    model, lengths = build(decoder(block(Attention(4, position=Rope(scaling=DYNAMIC[name]))))), [5, 20, 3, 12]
    documents = [random_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    segments = torch.repeat_interleave(torch.tensor([4, 0, 9, 2]), torch.tensor(lengths)).unsqueeze(0)
    packed = model(torch.cat(documents, 1), TokenLayout(positions, segments))
    assert error(packed, torch.cat([model(document) for document in documents], 1)) < 1e-9


@pytest.mark.ledger("pos.rope.dynamic")
@pytest.mark.parametrize("name", DYNAMIC)
def test_no_cache_is_exact_past_the_trained_length(name: str) -> None:
    """Up to that length cached = whole. Beyond it the frequencies change, and cached keys have the old angles.

    The scheme declares the length up to which cached keys are exact, and a store of the model rejects more tokens.
    """
    position = Rope(scaling=DYNAMIC[name])
    model, tokens = build(decoder(block(Attention(4, position=position)))), random_ids(1, 9)

    def step(store: Contiguous, t: int) -> Tensor:
        layout = TokenLayout(torch.tensor([[t]]))
        return model(tokens[:, t : t + 1], layout, store.begin_forward(layout))

    without_limit = tuple(tuple(s.body.memory(model.spec.width) for s in b.sublayers) for b in model.spec.blocks)
    unlimited, limited = (Contiguous(memory, 1, 16, torch.float64) for memory in (without_limit, model.spec.memory()))
    assert unlimited.reserve(0, 9)
    steps = [step(unlimited, t) for t in range(9)]
    assert position.max_exact_cache == 8
    assert error(torch.cat(steps[:8], 1), model(tokens[:, :8])) < 1e-9
    assert error(steps[8], model(tokens)[:, 8:]) > 1e-4
    assert all(torch.equal(step(limited, t), steps[t]) for t in range(8))
    with pytest.raises(ValueError, match="cached exactly up to 8 tokens"):
        step(limited, 8)


@pytest.mark.ledger("pos.rope.dynamic")
def test_rotating_cached_keys_again_would_not_be_exact() -> None:
    """A longer document changes the input of the second layer, not only the angles of its keys."""
    model = build(decoder(block(Attention(4, position=Rope(scaling=DYNAMIC["dynamic ntk"])))))
    layer_inputs: list[Tensor] = []
    second_block = model.stack.blocks[1]
    handle = second_block.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0]))
    tokens = random_ids(1, 9)
    model(tokens[:, :8])
    model(tokens)
    handle.remove()
    assert (layer_inputs[0] - layer_inputs[1][:, :8]).abs().max() > 1e-4
