"""Identities of masks: equivalent forms, no influence of later tokens, and the meaning of True."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention import BACKENDS, backend
from regard.kernels.attention.arguments import ScoreOptions, describe
from regard.kernels.attention.mask import Causal, Full, attention_mask
from regard.kernels.attention.reference import attention_weights
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.spec import SpecError
from tests.laws import MODELS, build, random_ids


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ledger("mask.causal")
@pytest.mark.parametrize("name", BACKENDS)
def test_causal_queries_attend_to_themselves_and_earlier_keys(name: str) -> None:
    for n in range(1, 18):
        q, k, v = (random(1, 2, n, 4, seed=seed) for seed in range(3))
        scores = q @ k.mT / 2 + torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
        expected = scores.softmax(-1) @ v
        for layout in (TokenLayout.whole(1, n), TokenLayout(torch.arange(n).unsqueeze(0))):
            options = ScoreOptions(Causal(), 0.5)
            if BACKENDS[name].unsupported_reason(describe(q, k, v, layout, options)) is None:
                assert (backend(name)(q, k, v, layout, options) - expected).abs().max() < 1e-12


@pytest.mark.ledger("mask.causal", "mask.nofuture")
@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if isinstance(spec, Decoder)])
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model, tokens = build(MODELS[name]), random_ids(1, 17)
    logits = model(tokens)
    for t in range(1, 17):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % 31
        changed_logits = model(changed)
        assert (changed_logits[:, :t] - logits[:, :t]).abs().max() < 1e-12
        assert (changed_logits[:, t] - logits[:, t]).abs().max() > 1e-6


@pytest.mark.ledger("mask.forms")
def test_masking_equals_softmax_over_the_allowed_keys() -> None:
    n, layout = 7, TokenLayout.whole(1, 7)
    q, k = random(1, 1, n, 4), random(1, 1, n, 4, seed=1)
    scores, allowed = (q @ k.mT / 2)[0, 0], torch.ones(n, n, dtype=torch.bool).tril()
    weights = attention_weights(q, k, layout, ScoreOptions(Causal(), 0.5))[0, 0]
    added = (scores + torch.zeros(n, n, dtype=torch.float64).masked_fill(~allowed, -torch.inf)).softmax(-1)
    filled = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    over_allowed = torch.stack([F.pad(scores[i, : i + 1].softmax(-1), (0, n - 1 - i)) for i in range(n)])
    for other in (added, filled, over_allowed):
        assert (weights - other).abs().max() < 1e-15
        assert torch.equal(weights == 0, ~allowed)  # exactly zero
    zero_scores = scores.masked_fill(~allowed, 0).softmax(-1)
    assert zero_scores[0, 1] == pytest.approx(1 / (scores[0, 0].exp() + n - 1).item())  # a score of 0 weighs e⁰ = 1
    zero_weights = scores.softmax(-1).masked_fill(~allowed, 0)
    assert (zero_weights.sum(-1)[:-1] < 0.99).all()
    padded = TokenLayout(
        torch.arange(n).unsqueeze(0), valid=torch.tensor([[False, False, True, True, True, True, True]])
    )
    for name in BACKENDS:
        tensors = [random(1, 1, n, 4, seed=seed).requires_grad_() for seed in range(3)]
        if BACKENDS[name].unsupported_reason(describe(*tensors, padded, ScoreOptions(Causal()))) is None:
            out = backend(name)(*tensors, padded, ScoreOptions(Causal()))
            assert not out[:, :, :2].any()
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.ledger("mask.polarity")
def test_true_means_allowed_in_sdpa_and_blocked_in_multihead_attention() -> None:
    x, layout = random(1, 6, 8), TokenLayout.whole(1, 6)
    ours = Attention(2, bias=True).build(8).double()
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    allowed = attention_mask(Causal(), layout)[0, 0]
    assert allowed[1].tolist() == [True, True, False, False, False, False]
    expected, inverted = (theirs(x, x, x, attn_mask=mask, need_weights=False)[0] for mask in (~allowed, allowed))
    assert (ours(x, layout) - expected).abs().max() < 1e-12
    assert not (ours(x, layout) - inverted).abs().max() < 0.01
    q, k, v = (random(1, 2, 6, 4, seed=seed) for seed in range(3))
    expected = backend("reference")(q, k, v, layout, ScoreOptions(Causal(), 0.5))
    assert (F.scaled_dot_product_attention(q, k, v, attn_mask=allowed) - expected).abs().max() < 1e-12
    assert attention_mask(Full(), layout) is None
    with pytest.raises(SpecError, match="mask"):  # a mask is a spec, not a tensor
        Attention(2, mask=allowed)
