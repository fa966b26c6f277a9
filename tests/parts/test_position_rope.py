"""RoPE: relative distances, precision at large positions, both layouts, partial rotation, and two dimensions."""

import math

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2VLConfig
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from regard.parts.position.rope2d import Rope2D
from regard.parts.position.rope_scaling import LinearScaling
from tests.laws import block, build, decoder, random_ids

POSITIONS = [0, 1, 255, 256, 257, 2047, 2048, 2049, 131071]
DTYPES = [torch.float64, torch.float32]
LAYOUTS = ["half", "interleaved"]


def layout_at(*positions: int) -> TokenLayout:
    return TokenLayout(torch.tensor([positions]))


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair_indices(i: int, dim: int, layout: str) -> tuple[int, int]:
    return (i, i + dim // 2) if layout == "half" else (2 * i, 2 * i + 1)


@pytest.mark.ledger("pos.rope")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", [10000.0, 500000.0, 7.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_each_pair_is_rotated_by_its_angle(dtype: torch.dtype, base: float, layout: str, share: float) -> None:
    """The expected values are computed with Python's sine and cosine, one pair at a time."""
    head_dim, dim = 8, int(8 * share)
    q, k = random(1, 2, len(POSITIONS), head_dim, dtype=dtype), random(1, 1, len(POSITIONS), head_dim, dtype=dtype) * 2
    rotated = Rope(base, share, layout).build(head_dim, 2).rotate(q, k, layout_at(*POSITIONS))
    limit = 1e-9 if dtype == torch.float64 else 1e-6
    for x, found in zip((q, k), rotated, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found[..., dim:], x[..., dim:])
        for i in range(dim // 2):
            first, second = pair_indices(i, dim, layout)
            for n, position in enumerate(POSITIONS):
                angle = position / base ** (2 * i / dim)
                a, b = x[0, :, n, first].double(), x[0, :, n, second].double()
                expected = a * math.cos(angle) - b * math.sin(angle)
                assert (found[0, :, n, first] - expected).abs().max() <= limit
                expected = b * math.cos(angle) + a * math.sin(angle)
                assert (found[0, :, n, second] - expected).abs().max() <= limit


@pytest.mark.ledger("pos.rope", "pos.rope.absolute")
def test_rotation_equals_multiplication_by_a_complex_number() -> None:
    """z_i e^{i m θ_i}; norms are kept, position 0 is the identity, and later pairs have lower frequencies."""
    q = random(1, 1, len(POSITIONS), 8)
    found = Rope(layout="interleaved").build(8, 1).rotate(q, q, layout_at(*POSITIONS))[0]
    theta = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    rotation = torch.polar(torch.ones(()).double(), torch.tensor(POSITIONS).unsqueeze(-1) * theta)  # (L, 4)
    z = torch.view_as_complex(q.unflatten(-1, (4, 2))) * rotation
    assert (found - torch.view_as_real(z).flatten(-2)).abs().max() < 1e-12
    assert torch.allclose(found.norm(dim=-1), q.norm(dim=-1), atol=1e-12)
    assert torch.equal(found[:, :, 0], q[:, :, 0])
    assert (Rope().frequencies(8, layout_at(0)).diff() < 0).all()


def test_the_rotation_of_a_token_depends_only_on_its_position() -> None:
    x = random(1, 1, 3, 8)
    first, second = (Rope().build(8, 1).rotate(x, x, layout_at(4, middle, 9))[0] for middle in (5, 500))
    assert torch.equal(first[:, :, [0, 2]], second[:, :, [0, 2]])


@pytest.mark.ledger("pos.rope.relative")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_scores_depend_only_on_the_distance(layout: str, position: int) -> None:
    """R(a)ᵀR(b) = R(b - a): positions (2, 5) have the same score as (100, 103) and as any two positions 3 apart."""
    rope, q, k = Rope(layout=layout).build(8, 1), random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def score(m: int, n: int) -> float:
        return (rope.rotate(q, q, layout_at(m))[0] * rope.rotate(k, k, layout_at(n))[1]).sum().item()

    assert score(2, 5) == pytest.approx(score(100, 103), abs=1e-12)
    assert score(position, position + 3) == pytest.approx(score(2, 5), abs=1e-9)
    assert abs(score(2, 6) - score(2, 5)) > 1e-2


@pytest.mark.ledger("pos.rope.sign")
def test_the_relative_rotation_is_by_key_minus_query() -> None:
    """⟨R_m q, R_n k⟩ = qᵀ R_{n-m} k; R_{m-n}, its transpose, would rotate in the opposite direction."""
    m, n, q, k = 3, 7, random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)
    rope, columns = Rope().build(8, 1), torch.eye(8).double().view(1, 8, 1, 8)

    def matrix(t: int) -> Tensor:
        return rope.rotate(columns, columns, layout_at(t))[0].view(8, 8).T

    score = (rope.rotate(q, q, layout_at(m))[0] * rope.rotate(k, k, layout_at(n))[0]).sum()
    q, k = q.view(8), k.view(8)
    assert (score - q @ matrix(n - m) @ k).abs() < 1e-12
    assert (score - q @ matrix(m - n) @ k).abs() > 0.1
    assert torch.allclose(matrix(m).T @ matrix(n), matrix(n - m), atol=1e-12)


@pytest.mark.ledger("pos.rope.fig")
def test_unit_vectors_three_positions_apart_have_the_published_score() -> None:
    """m = 2, n = 5, θ₀ = 0.5: angles 1.00 and 2.50, difference -1.50, score cos 1.5 = 0.07."""
    unit = torch.tensor([1.0, 0.0]).double().view(1, 1, 1, 2)
    rope = Rope(scaling=LinearScaling(2.0)).build(2, 1)  # one pair, whose angle of 1 per position is scaled to 0.5
    q, k = (rope.rotate(unit, unit, layout_at(position))[0].flatten() for position in (2, 5))
    angles = [math.atan2(x[1], x[0]) for x in (q, k)]
    assert angles == pytest.approx([1.0, 2.5], abs=1e-12)
    assert angles[0] - angles[1] == pytest.approx(-1.5, abs=1e-12)
    assert (q @ k).item() == pytest.approx(math.cos(1.5), abs=1e-12)
    assert f"{(q @ k).item():.2f}" == "0.07"


@pytest.mark.ledger("pos.rope.decay", exact=True)
def test_aligned_pairs_decay_with_distance_but_random_ones_do_not() -> None:
    rope, distances = Rope().build(128, 1), [0, 10, 100, 1000, 4000]
    aligned = torch.ones(1, 1, 1, 128).double()
    start = rope.rotate(aligned, aligned, layout_at(0))[0]
    curve = [(start * rope.rotate(aligned, aligned, layout_at(d))[0]).mean().item() for d in distances]
    assert [f"{mean:.2f}" for mean in curve] == ["1.00", "0.67", "0.48", "0.16", "0.01"]
    q, k = random(1, 20_000, 1, 128), random(1, 20_000, 1, 128, seed=1)
    for d in distances:
        products = (q * rope.rotate(k, k, layout_at(d))[0]).sum(-1)
        assert products.abs().mean().item() == pytest.approx(9.0, abs=0.15)  # √(2/π) · √128 = 9.03
        assert abs(products.mean().item()) < 0.3


@pytest.mark.ledger("pos.rope.layout")
def test_the_two_layouts_are_equal_up_to_a_permutation_of_rows() -> None:
    """An interleaved model with permuted rows of q and k has the logits of the half model."""
    models = [build(decoder(block(Attention(4, 2, head_dim=8, position=Rope(layout=layout))))) for layout in LAYOUTS]
    order = torch.tensor([index for i in range(4) for index in pair_indices(i, 8, "half")])  # from interleaved to half
    for name, weight in models[1].named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.copy_(weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1))
    tokens = random_ids(2, 12)
    assert (models[0](tokens) - models[1](tokens)).abs().max() < 1e-12
    assert (models[0](tokens) - build(models[1].spec)(tokens)).abs().max() > 1e-2


def test_two_ropes_in_one_model_do_not_share_angles() -> None:
    """Angles are computed once per forward for equal layers; layers with other frequencies must not reuse them."""
    q, token_layout = random(1, 1, 3, 8), layout_at(0, 3, 9)
    specs = [Rope(), Rope(100.0), Rope(share=0.5), Rope(scaling=LinearScaling(2.0)), Rope2D(2), Rope2D(3), Rope2D(2, 1)]
    for spec in specs + [Rope(layout="interleaved")]:
        expected = spec.build(8, 1).rotate(q, q, layout_at(0, 3, 9))[0]
        assert torch.equal(spec.build(8, 1).rotate(q, q, token_layout)[0], expected)
    smaller_head = random(1, 1, 3, 4)
    assert Rope().build(4, 1).rotate(smaller_head, smaller_head, token_layout)[0].shape == smaller_head.shape


def test_dtypes_do_not_share_angles() -> None:
    """A layout may be used in float32 first and then in float64, or the reverse: neither reuses the other's angles."""
    q, token_layout = random(1, 1, 3, 8), layout_at(5, 300, 7000)
    for dtype in (torch.float32, torch.float64, torch.float32):
        found = Rope().build(8, 1).rotate(q.to(dtype), q.to(dtype), token_layout)[0]
        assert found.dtype == dtype
        assert torch.equal(found, Rope().build(8, 1).rotate(q.to(dtype), q.to(dtype), layout_at(5, 300, 7000))[0])


@pytest.mark.parametrize("spec", [Rope(), Rope(share=0.5, layout="interleaved"), Rope2D(2, prefix=1)], ids=str)
def test_gradients_equal_finite_differences(spec: Rope | Rope2D) -> None:
    q, k, module = random(1, 2, 3, 8).requires_grad_(), random(1, 1, 3, 8, seed=1).requires_grad_(), spec.build(8, 2)
    assert torch.autograd.gradcheck(lambda q, k: module.rotate(q, k, layout_at(0, 5, 300)), (q, k), fast_mode=True)


@pytest.mark.ledger("pos.rope")
def test_the_half_layout_equals_llama() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=64)
    q, k, token_layout = random(2, 2, 9, 16).float(), random(2, 1, 9, 16, seed=1).float(), TokenLayout.whole(2, 9)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, token_layout.positions)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for found, theirs in zip(Rope().build(16, 2).rotate(q, k, token_layout), expected, strict=True):
        assert (found - theirs).abs().max() < 2e-6


def test_the_interleaved_layout_equals_gpt_j() -> None:
    q = random(1, 9, 2, 16).float()  # (B, L, H, E) in GPT-J; only the first 8 coordinates are rotated
    sin, cos = gptj.create_sinusoidal_positions(9, 8)[None].chunk(2, -1)
    theirs = torch.cat([gptj.apply_rotary_pos_emb(q[..., :8], sin, cos), q[..., 8:]], -1).transpose(1, 2)
    ours = (
        Rope(share=0.5, layout="interleaved")
        .build(16, 2)
        .rotate(q.transpose(1, 2), q.transpose(1, 2), layout_at(*range(9)))
    )
    assert (ours[0] - theirs).abs().max() < 2e-6


def test_partial_rotation_equals_gpt_neox() -> None:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rotary)
    q, k, token_layout = random(1, 2, 9, 32).float(), random(1, 2, 9, 32, seed=1).float(), layout_at(*range(100, 109))
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, token_layout.positions)
    expected = neox.apply_rotary_pos_emb(q, k, cos, sin)
    for found, theirs in zip(Rope(share=0.25).build(32, 2).rotate(q, k, token_layout), expected, strict=True):
        assert (found - theirs).abs().max() < 1e-5


def test_patches_are_rotated_by_row_and_column() -> None:
    """A grid of 5 columns after one [CLS]: patch 0 is at the origin; half of the pairs encode rows, half columns."""
    x, token_layout = random(1, 1, 16, 16), layout_at(*range(16))
    found = Rope2D(columns=5, prefix=1, base=100.0).build(16, 1).rotate(x, x, token_layout)[0]
    assert torch.equal(found[:, :, :2], x[:, :, :2])  # [CLS] is not rotated, and the first patch by angle 0
    for t in range(1, 16):
        for i in range(8):
            angle = divmod(t - 1, 5)[i // 4] / 100.0 ** (2 * (i % 4) / 8)
            a, b = x[0, 0, t, i].item(), x[0, 0, t, i + 8].item()
            assert found[0, 0, t, i].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-12)
            assert found[0, 0, t, i + 8].item() == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-12)


def test_scores_of_patches_depend_on_both_distances() -> None:
    rope, q, k = Rope2D(columns=7).build(16, 1), random(1, 1, 1, 16), random(1, 1, 1, 16, seed=1)

    def score(a: tuple[int, int], b: tuple[int, int]) -> float:
        rotated = [rope.rotate(x, x, layout_at(7 * row + column))[0] for x, (row, column) in ((q, a), (k, b))]
        return (rotated[0] * rotated[1]).sum().item()

    assert score((0, 0), (2, 1)) == pytest.approx(score((3, 5), (5, 6)), abs=1e-12)
    assert abs(score((0, 0), (2, 1)) - score((0, 0), (1, 2))) > 1e-2


def test_patches_equal_qwen2_vl() -> None:
    config = Qwen2VLConfig().vision_config
    head_dim = config.embed_dim // config.num_heads
    q = random(12, 2, head_dim).float()  # (L, H, E) in Qwen2-VL
    grid = torch.tensor([divmod(t, 4) for t in range(12)])
    cos, sin = qwen.Qwen2VLVisionRotaryEmbedding(config)(q, grid)
    theirs = qwen.apply_rotary_pos_emb_vision(q, q, cos, sin)[0].transpose(0, 1)
    ours = Rope2D(columns=4).build(head_dim, 2).rotate(*[q.transpose(0, 1)[None]] * 2, layout_at(*range(12)))[0][0]
    assert (ours - theirs).abs().max() < 2e-6


def test_a_compiled_model_computes_the_angles_once() -> None:
    """As one operator for all layers; fused into the rotations, the float64 sines are computed again in each."""
    layer = Block((Sublayer(Attention(2, position=Rope())),))
    model = Decoder(11, 16, (Repeat((layer,), 3),)).build(seed=0)
    tokens, graphs = torch.randint(11, (2, 7)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert (compiled(tokens) - model(tokens)).abs().max() < 1e-6
    calls = [node for node in graphs[0].graph.nodes if "cos_sin" in str(node.target)]
    assert len(graphs) == 1 and len(calls) == 1
