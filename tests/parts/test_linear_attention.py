"""Linear attention, retention and gated linear attention equal their equations; states and invalid specs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.recurrent.linear_attention import with_ones
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.decayed_linear_attention import GatedLinear, Retention
from regard.parts.linear_attention import EluFeatures, IdentityFeatures, LinearAttention, PerformerFeatures
from regard.parts.norm import NoNorm
from regard.parts.split_heads import merge_heads, split_heads
from regard.spec import Spec, SpecError
from regard.verification.trial import randomize_weights

WIDTH, LENGTH = 12, 9


def build_randomized(spec: Spec, width: int = WIDTH) -> nn.Module:
    module = spec.build(width).double().requires_grad_(False)
    randomize_weights(module)
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def project(module: nn.Module, x: Tensor, heads: int) -> list[Tensor]:
    return [split_heads(p(x), heads) for p in (module.q_proj, module.k_proj, module.v_proj)]


@pytest.mark.ledger("lin.elu")
def test_elu_keeps_weights_positive() -> None:
    module = build_randomized(LinearAttention(2))
    q, k, v = project(module, x := 5 * random(1, 50, WIDTH), 2)
    assert (q @ k.mT).min() < 0  # scores without a feature map may be negative
    scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    assert scores[..., *torch.tril_indices(50, 50)].min() > 0
    expected = scores / scores.sum(-1, keepdim=True) @ v
    assert (module(x, TokenLayout.whole(1, 50)) - module.o_proj(merge_heads(expected))).abs().max() < 1e-12


@pytest.mark.ledger("lin.elu")
def test_normalization_is_refused_for_identity_features() -> None:
    """Scores of 1 and -1 sum to zero, so they cannot be normalized."""
    query, keys = torch.tensor([1.0]), torch.tensor([[1.0], [-1.0]])
    assert (keys @ query).sum() == 0
    with pytest.raises(SpecError, match="sum to zero.*set normalize=False, or choose elu or performer"):
        LinearAttention(2, features=IdentityFeatures())
    module = build_randomized(LinearAttention(2, features=IdentityFeatures(), normalize=False))
    x = random(1, LENGTH, WIDTH)
    q, k, v = project(module, x, 2)
    assert torch.allclose(module(x, TokenLayout.whole(1, LENGTH)), module.o_proj(merge_heads((q @ k.mT).tril() @ v)))


def test_performer_features_must_be_normalized() -> None:
    with pytest.raises(SpecError, match="leave normalize=False out"):
        LinearAttention(2, features=PerformerFeatures(), normalize=False)


@pytest.mark.ledger("lin.normalised")
def test_normalization_changes_the_output() -> None:
    x, layout = random(1, LENGTH, WIDTH), TokenLayout.whole(1, LENGTH)
    normalized, unnormalized = (build_randomized(LinearAttention(2, normalize=flag)) for flag in (True, False))
    assert (normalized(x, layout) - unnormalized(x, layout)).abs().max() > 0.1


@pytest.mark.ledger("lin.performer")
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
def test_performer_approximates_softmax(bidirectional: bool) -> None:
    torch.manual_seed(0)
    module = LinearAttention(2, features=PerformerFeatures(2048), bidirectional=bidirectional).build(WIDTH).double()
    x = random(1, 40, WIDTH) / 2
    q, k, v = project(module, x, 2)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=not bidirectional)
    expected, found = module.o_proj(merge_heads(exact)), module(x, TokenLayout.whole(1, 40))
    assert (found - expected).norm() < 0.1 * expected.norm()
    with_few_features = (
        LinearAttention(2, features=PerformerFeatures(8), bidirectional=bidirectional).build(WIDTH).double()
    )
    with_few_features.load_state_dict(module.state_dict() | {"directions": with_few_features.directions.data})
    assert (with_few_features(x, TokenLayout.whole(1, 40)) - expected).norm() > 2 * (found - expected).norm()


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_performer_stays_finite_where_exp_would_overflow(factor: float) -> None:
    """The expected output is a softmax over the logarithms of the scores, in float64."""
    module, x = build_randomized(LinearAttention(2, features=PerformerFeatures(5))), factor * random(1, 70, WIDTH)
    q, k, v = project(module, x, 2)
    q, k = (y * (WIDTH // 2) ** -0.25 for y in (q, k))
    logs = (q @ module.directions.T).unsqueeze(3) + (k @ module.directions.T).unsqueeze(2)  # (B, H, L, L, R)
    logs = logs - k.square().sum(-1)[:, :, None, :, None] / 2
    weights = logs.logsumexp(-1).masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf).softmax(-1)
    expected = module.o_proj(merge_heads(weights @ v))
    found = module(x, TokenLayout.whole(1, 70))
    assert (found - expected).abs().max() < 1e-9 * factor
    in_float32 = module.float()(x.float(), TokenLayout.whole(1, 70))
    assert in_float32.isfinite().all()


def test_performers_directions_are_saved_with_the_weights_and_not_trained() -> None:
    spec = Decoder(5, WIDTH, (Repeat((Block((Sublayer(LinearAttention(2, features=PerformerFeatures(7))),)),)),))
    model = spec.build(seed=0)
    name = "stack.blocks.0.sublayers.0.body.directions"
    assert model.state_dict()[name].shape == (7, WIDTH // 2)
    assert not model.get_parameter(name).requires_grad
    assert not torch.equal(model.state_dict()[name], spec.build(seed=1).state_dict()[name])


@pytest.mark.parametrize(
    "spec",
    [Retention(3), Retention(2, 4, 5, NoNorm(), gate=False, rotation=False)],
    ids=["default", "no norm, gate or rotation"],
)
def test_retention_equals_attention_without_softmax(spec: Retention) -> None:
    """The expected output is (Q Kᵀ ⊙ D) V, with rotations as complex numbers."""
    module, x = build_randomized(spec), random(2, LENGTH, WIDTH)
    q, k, v = project(module, x, spec.heads)
    dim, steps = q.shape[-1], torch.arange(LENGTH, dtype=torch.float64)
    if spec.rotation:
        phases = torch.polar(torch.ones(1).double(), steps.unsqueeze(-1) / 10000 ** (torch.arange(dim // 2) * 2 / dim))
        q, k = (torch.complex(*y.chunk(2, -1)) * phases for y in (q, k))
    scores = (q @ k.conj().mT).real / dim**0.5
    gamma = 1 - 2.0 ** (-5 - torch.arange(spec.heads, dtype=torch.float64)).view(-1, 1, 1)
    decays = gamma ** (steps.unsqueeze(-1) - steps).clamp_min(0)
    out = merge_heads(module.norm((scores * decays).tril() @ v))
    out = out * F.silu(module.gate_proj(x)) if spec.gate else out
    assert torch.allclose(module(x, TokenLayout.whole(2, LENGTH)), module.o_proj(out), atol=1e-11)


@pytest.mark.parametrize("decay", ["channel", "head"])
def test_gated_linear_attention_equals_its_recurrence(decay: str) -> None:
    spec = GatedLinear(3, decay=decay, rank=2, temperature=4.0)
    module, x = build_randomized(spec), random(1, LENGTH, WIDTH)
    q, k, v = (y[0] for y in project(module, x, 3))  # (H, L, ·)
    decays = module.decay_proj(module.low_proj(x)).sigmoid()[0].unflatten(-1, (3, -1)) ** 0.25  # (L, H, 2 or 1)
    state, outputs = torch.zeros(3, 2, 4, dtype=torch.float64), []
    for t in range(LENGTH):
        state = decays[t].unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("hn,hnp->hp", q[:, t], state) / 2**0.5)
    out = module.norm(torch.stack(outputs)).flatten(1)  # (L, H·P)
    expected = module.o_proj(out * F.silu(module.gate_proj(x[0])))
    assert torch.allclose(module(x, TokenLayout.whole(1, LENGTH))[0], expected, atol=1e-11)


def test_state_shapes_follow_from_the_spec_and_the_width() -> None:
    assert Retention(3).memory(12).arrays == {"sums": (3, 4, 4)}
    assert GatedLinear(3).memory(12).arrays == {"sums": (3, 2, 4)}
    assert GatedLinear(5, 3, 2).memory(12).arrays == {"sums": (5, 3, 2)}
    assert LinearAttention(3, features=PerformerFeatures(9)).memory(12).arrays == {"sums": (3, 9, 5), "peak": (3,)}
    assert LinearAttention(3, bidirectional=True).memory(12) is None


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Retention(5).build(12), "retention: width=12 is not divisible by heads=5"),
        (lambda: Retention(0), "heads=0 must be positive"),
        (lambda: Retention(2, key_dim=3).build(12), "rope: head_dim=3 must be even"),
        (lambda: Retention(2, base=0.0), "base=0.0 must be positive"),
        (lambda: GatedLinear(4).build(12), "half of width=12 is not divisible by heads=4; set key_dim"),
        (lambda: GatedLinear(2, rank=0), "rank=0 must be positive"),
        (lambda: GatedLinear(2, temperature=0.0), "temperature=0.0 must be positive"),
        (lambda: PerformerFeatures(0), "count=0 must be positive"),
    ],
)
def test_invalid_specs_are_refused(make, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_bidirectional_equals_its_linear_form() -> None:
    """The expected output is φ(Q)(φ(K)ᵀV), without an (L, L) matrix."""
    module = build_randomized(LinearAttention(2, features=EluFeatures(), bidirectional=True))
    x = random(1, LENGTH, WIDTH)
    q, k, v = project(module, x, 2)
    out = (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ with_ones(v))
    expected = module.o_proj(merge_heads(out[..., :-1] / out[..., -1:]))
    assert torch.allclose(module(x, TokenLayout.whole(1, LENGTH)), expected, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_large_features_of_a_document_do_not_affect_other_documents(bidirectional: bool) -> None:
    """Performer's features are scaled by a peak, which differs between documents."""
    module = LinearAttention(2, features=PerformerFeatures(16), bidirectional=bidirectional).build(32)
    x = torch.randn(1, 8, 32) * torch.tensor([1.0] * 4 + [16.0] * 4).view(1, 8, 1)
    packed = TokenLayout(torch.tensor([[0, 1, 2, 3] * 2]), segments=torch.tensor([[0] * 4 + [1] * 4]), consecutive=True)
    out = module(x, packed)
    for document in (slice(0, 4), slice(4, 8)):
        assert torch.allclose(out[:, document], module(x[:, document], TokenLayout.whole(1, 4)), atol=1e-5)
