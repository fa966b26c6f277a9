"""All position schemes: effect of token order, invariance under a shift, limits of length, invalid specs."""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from regard.kernels.attention.mask import Causal, Full, Mask
from regard.layout import TokenLayout
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.feedforward import FeedForward
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.parts.position.rope2d import Rope2D
from regard.parts.position.rope_scaling import NTK, DynamicNTK, LinearScaling, Llama3, LongRope, Yarn
from regard.parts.position.sinusoidal import Sinusoidal
from regard.parts.position.t5 import T5Buckets
from regard.spec import Spec, SpecError
from tests.laws import MODELS, block, build, random_ids

WIDTH, HEADS, FULL = 16, 2, Full()
AT_STACK: dict[str, Position] = {
    "sinusoidal": Sinusoidal(),
    "sinusoidal, half": Sinusoidal(layout="half"),
    "learned": Learned(64),
    "t5 of the stack": T5Buckets(8, 16, heads=HEADS),
}
RELATIVE: dict[str, Position] = {
    "rope": Rope(),
    "rope, interleaved": Rope(layout="interleaved"),
    "rope, partial": Rope(share=0.5),
    "rope, linear": Rope(scaling=LinearScaling(4.0)),
    "rope, ntk": Rope(scaling=NTK(4.0)),
    "rope, yarn": Rope(scaling=Yarn(4.0, 256)),
    "rope, llama3": Rope(scaling=Llama3(4.0, 256)),
    "alibi": Alibi(),
    "t5": T5Buckets(),
    "t5, both directions": T5Buckets(bidirectional=True),
}
AT_ATTENTION = RELATIVE | {
    "rope, dynamic": Rope(scaling=DynamicNTK(4.0, 2)),
    "rope, longrope": Rope(scaling=LongRope((1, 2, 3, 4), (2, 4, 6, 8), 4.0, 2)),
    "rope2d": Rope2D(columns=2),
}
SCHEMES = AT_STACK | AT_ATTENTION


def layout_at(*positions: int) -> TokenLayout:
    return TokenLayout(torch.tensor([positions]))


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Draws weights with a large deviation, so that every part has an effect."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.requires_grad_(False)


def encode(position: Position, x: Tensor, mask: Mask = FULL) -> Tensor:
    """The output of two blocks with this scheme for x (B, L, D)."""
    in_stack = position in AT_STACK.values()
    attention = Attention(HEADS, position=NoPosition() if in_stack else position, mask=mask)
    stack = randomize(Stack((Repeat((block(attention, FeedForward(24)),), 2),), WIDTH))
    stack_position = randomize((position if in_stack else NoPosition()).build(WIDTH, 1))
    layout = TokenLayout.whole(*x.shape[:2])
    return stack(stack_position.embed(x, layout), stack_position.share_bias(layout))[0]


EMBEDDINGS = random(4, WIDTH)  # the, dog, bites, man
DOG_BITES_MAN, MAN_BITES_DOG = EMBEDDINGS[[0, 1, 2, 3]].unsqueeze(0), EMBEDDINGS[[0, 3, 2, 1]].unsqueeze(0)


@pytest.mark.ledger("pos.why")
def test_without_positions_the_order_has_no_effect() -> None:
    outputs, permuted = encode(NoPosition(), DOG_BITES_MAN), encode(NoPosition(), MAN_BITES_DOG)
    assert (outputs - permuted[:, [0, 3, 2, 1]]).abs().max() < 1e-12


@pytest.mark.ledger("pos.why")
@pytest.mark.parametrize("name", SCHEMES)
def test_with_positions_the_order_has_an_effect(name: str) -> None:
    outputs, permuted = encode(SCHEMES[name], DOG_BITES_MAN), encode(SCHEMES[name], MAN_BITES_DOG)
    assert (outputs - permuted[:, [0, 3, 2, 1]]).abs().amax(-1).min() > 1e-3  # for every token


def test_symmetric_distances_do_not_distinguish_a_sequence_from_its_reverse() -> None:
    """ALiBi in an encoder: |i - j| does not change if the sequence is reversed."""
    outputs, reversed_outputs = encode(Alibi(), DOG_BITES_MAN), encode(Alibi(), DOG_BITES_MAN.flip(1))
    assert (outputs - reversed_outputs.flip(1)).abs().max() < 1e-12


def test_a_causal_mask_encodes_order_without_positions() -> None:
    """Without positions the mask breaks the symmetry, so the last output depends on the order of earlier tokens."""
    outputs, permuted = encode(NoPosition(), DOG_BITES_MAN, Causal()), encode(NoPosition(), MAN_BITES_DOG, Causal())
    assert (outputs - permuted[:, [0, 3, 2, 1]]).abs().amax(-1)[0, 1:].min() > 1e-3


@pytest.mark.ledger("pos.add")
@pytest.mark.parametrize("position", [Sinusoidal(), Sinusoidal(layout="half"), Learned(8)], ids=str)
def test_absolute_positions_are_added_to_embeddings(position: Position) -> None:
    module, x = randomize(position.build(6, 1)), random(1, 3, 6)
    found = module.embed(x, layout_at(0, 1, 2))
    assert found.shape == x.shape
    assert torch.allclose(found - x, module.embed(torch.zeros_like(x), layout_at(0, 1, 2)), atol=1e-15)


def scores(position: Position, offset: int, dtype: torch.dtype) -> Tensor:
    """q kᵀ plus bias at positions offset … offset + 7, as computed by an attention with this scheme."""
    module, layout = randomize(position.build(8, HEADS)).to(dtype), layout_at(*range(offset, offset + 8))
    q, k = module.rotate(random(1, HEADS, 8, 8, dtype=dtype), random(1, HEADS, 8, 8, dtype=dtype, seed=1), layout)
    bias = module.bias(layout)
    return q @ k.transpose(-1, -2) + (0 if bias is None else bias.values(layout, dtype))


@pytest.mark.ledger("pos.shiftinv")
@pytest.mark.parametrize("offset", [1, 1000, 100_000])
@pytest.mark.parametrize("name", RELATIVE)
def test_a_shift_does_not_change_scores_of_relative_positions(name: str, offset: int) -> None:
    exact = scores(RELATIVE[name], 0, torch.float64)
    assert (scores(RELATIVE[name], offset, torch.float64) - exact).abs().max() < 1e-9
    assert (scores(RELATIVE[name], offset, torch.float32) - exact).abs().max() < 5e-6


@pytest.mark.ledger("pos.shiftinv")
@pytest.mark.parametrize("offset", [1, 1000, 100_000])
@pytest.mark.parametrize("position", [Sinusoidal(), Learned(100_008)], ids=["sinusoidal", "learned"])
def test_a_shift_changes_scores_of_absolute_positions(position: Position, offset: int) -> None:
    module, x = randomize(position.build(8, 1)), random(1, 8, 8)
    before, after = (module.embed(x, layout_at(*range(start, start + 8))) for start in (0, offset))
    assert (before @ before.mT - after @ after.mT).abs().max() > 1e-2


@pytest.mark.ledger("pos.learned")
def test_a_learned_position_adds_its_row_of_the_table() -> None:
    module, x = Learned(10).build(4, 1), torch.ones(1, 3, 4)
    assert torch.equal(module.embed(x, layout_at(7, 0, 9)), x + module.table.weight[[7, 0, 9]])


@pytest.mark.ledger("pos.learned")
@pytest.mark.parametrize("offset", [0, 2])
def test_positions_beyond_the_learned_table_are_refused(offset: int) -> None:
    module, x = Learned(2048, offset=offset).build(4, 1), torch.zeros(1, 1, 4)
    assert torch.equal(module.embed(x, layout_at(2047))[0, 0], module.table.weight[-1])
    with pytest.raises(ValueError, match="position 2048 is beyond the 2048 learned positions; shorten the sequence"):
        module.embed(x, layout_at(2048))


@pytest.mark.ledger("pos.learned")
def test_learned_positions_equal_bert() -> None:
    theirs = BertEmbeddings(BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=12))
    theirs.LayerNorm, ours, tokens = torch.nn.Identity(), Learned(12).build(8, 1), random_ids(2, 12) % 9
    ours.table.weight = theirs.position_embeddings.weight
    embeddings = theirs.word_embeddings(tokens) + theirs.token_type_embeddings.weight[0]
    assert torch.allclose(ours.embed(embeddings, TokenLayout.whole(2, 12)), theirs.eval()(tokens), atol=1e-7)


def test_learned_positions_with_an_offset_equal_opt() -> None:
    theirs, ours = OPTLearnedPositionalEmbedding(12, 8), Learned(12, offset=2).build(8, 1)
    ours.table.weight = theirs.weight
    attention_mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    layout = TokenLayout((attention_mask.cumsum(1) - 1).clamp_min(0), valid=attention_mask.bool())
    found, expected = ours.embed(torch.zeros(2, 5, 8), layout), theirs(attention_mask)
    assert torch.equal(found[layout.valid], expected[layout.valid])


def test_a_frozen_table_is_used_and_not_trained() -> None:
    module, x = Learned(5, frozen=True).build(3, 1).double(), random(1, 4, 3).requires_grad_()
    y = module.embed(x, layout_at(3, 0, 0, 4))
    y.sum().backward()
    assert torch.equal(y, x + module.table.weight[[3, 0, 0, 4]]) and x.grad is not None
    assert module.table.weight.grad is None


def test_gradients_of_a_learned_table_are_summed_per_position() -> None:
    module, x, layout = (
        Learned(5, offset=1).build(3, 1).double(),
        random(1, 4, 3).requires_grad_(),
        layout_at(3, 0, 0, 4),
    )
    module.embed(x, layout).sum().backward()
    assert module.table.weight.grad[:, 0].tolist() == [0, 2, 0, 0, 1, 1]


def test_no_position_changes_nothing() -> None:
    module, x, layout = NoPosition().build(4, 1), random(1, 1, 2, 4), layout_at(0, 1)
    assert module.embed(x, layout) is x
    assert module.share_bias(layout) is layout
    assert module.rotate(x, x, layout) == (x, x)
    assert module.bias(layout) is None


@pytest.mark.parametrize(
    ("position", "max_positions", "cached"),
    [
        (Learned(7, offset=2), 7, None),
        (Sinusoidal(), None, None),
        (Alibi(), None, None),
        (T5Buckets(), None, None),
        (Rope(), None, None),
        (Rope(scaling=Yarn(4.0, 64)), None, None),
        (Rope(scaling=DynamicNTK(4.0, 64)), None, 64),
        (Rope(scaling=LongRope((1,), (2,), 4.0, 64)), None, 64),
    ],
    ids=str,
)
def test_schemes_declare_their_limits_of_positions_and_caches(
    position: Position, max_positions: int | None, cached: int | None
) -> None:
    assert (position.max_positions, position.max_exact_cache) == (max_positions, cached)


@pytest.mark.parametrize("spec", SCHEMES.values(), ids=SCHEMES)
def test_schemes_round_trip_through_json_and_toml(spec: Position) -> None:
    assert Spec.from_json(spec.to_json()) == Spec.from_toml(spec.to_toml()) == spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(share=0.0), "share=0.0 must be above 0 and at most 1"),
        (lambda: Rope(share=0.3).build(16, 1), "share=0.3 of head_dim=16 must be even"),
        (lambda: Rope(share=0.5).build(6, 1), "share=0.5 of head_dim=6 must be even"),
        (lambda: Rope(layout="halves"), "did you mean 'half'"),
        (lambda: Rope2D(0), "columns=0 must be positive"),
        (lambda: Rope2D(4, prefix=-1), "prefix=-1 must not be negative"),
        (lambda: Rope2D(4).build(6, 1), "head_dim=6 must be divisible by 4"),
        (lambda: LinearScaling(0.5), "linear: factor=0.5 must be at least 1"),
        (lambda: DynamicNTK(2.0, 1), "dynamic_ntk: length=1 must be above 1"),
        (lambda: Rope(scaling=NTK(2.0)).build(2, 1), "ntk: 2 coordinates are rotated"),
        (lambda: Rope(scaling=DynamicNTK(2.0, 8)).build(2, 1), "dynamic_ntk: 2 coordinates are rotated"),
        (lambda: Yarn(2.0, 8, beta_fast=1.0), "beta_fast=1.0 must be above beta_slow=1.0"),
        (lambda: Rope(1.0, scaling=Yarn(2.0, 8)).build(4, 1), "base=1.0 must be above 1"),
        (lambda: Llama3(2.0, 8, 4.0, 4.0), "high_freq_factor=4.0 must be above low_freq_factor=4.0"),
        (lambda: LongRope((1, 0), (1, 1), 2.0, 8), "so 0.0 must be above 0"),
        (
            lambda: Rope(scaling=LongRope((1,), (1, 2), 2.0, 8)).build(4, 1),
            "2 pairs need as many divisors; short has 1",
        ),
        (lambda: Learned(4, offset=-1), "offset=-1 must not be negative"),
        (lambda: T5Buckets(1), "buckets=1 must be at least 2"),
        (lambda: T5Buckets(2, bidirectional=True), "buckets=2 must be at least 4"),
        (lambda: T5Buckets(7, bidirectional=True), "buckets=7 must be even"),
        (lambda: T5Buckets(32, 16), "distance=16 must be above 16"),
        (lambda: T5Buckets(heads=0), "heads=0 must be positive"),
        (lambda: T5Buckets().check_place("stack"), "a stack's table needs it; set heads"),
        (lambda: Attention(4, position=T5Buckets(heads=4)), "heads=4 is for a stack"),
        (lambda: Attention(4, position=Learned(4)), "has no effect here; set it in the stack"),
    ],
)
def test_invalid_specs_are_refused(make, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name in MODELS if "t5" in name])
def test_gradients_reach_the_bias_tables_of_a_model(name: str) -> None:
    model, tokens = build(MODELS[name]).requires_grad_(True), random_ids(2, 12)
    model(tokens).square().mean().backward()
    tables = [p for n, p in model.named_parameters() if n.endswith("position.table.weight")]
    assert tables and all(table.grad.abs().max() > 0 for table in tables)
