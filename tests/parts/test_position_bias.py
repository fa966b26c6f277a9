"""ALiBi and T5's buckets: published slopes and buckets, distances in decoding, and tiles equal to the whole bias."""

import math
import warnings

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from regard.kernels.attention.bias import Buckets, Slopes
from regard.kernels.attention.mask import Causal, Full, Mask
from regard.layout import Bias, TokenLayout
from regard.parts.attention import Attention
from regard.parts.position.alibi import Alibi, slopes
from regard.parts.position.t5 import T5Buckets


def layout_at(*positions: int) -> TokenLayout:
    return TokenLayout(torch.tensor([positions]))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BIASES: dict[str, Bias] = {
    "slopes": Slopes(slopes(3)),
    "buckets": Buckets(random(8, 3), 16, False),
    "buckets, bidirectional": Buckets(random(8, 3), 16, True),
}


@pytest.mark.parametrize("name", BIASES)
def test_tiles_equal_the_whole_bias(name: str) -> None:
    """For any queries and keys, in any order and shape."""
    generator = torch.Generator().manual_seed(0)
    bias, q, k = BIASES[name], *(torch.randint(0, 90, (2, n), generator=generator) for n in (7, 9))
    whole = bias.values(TokenLayout(q).with_keys(k), torch.float64)  # (B, H, L, S)
    assert whole.shape == (2, 3, 7, 9)
    for b in range(2):
        for i in range(7):
            for j in range(9):
                single = bias.tile(q[b, i : i + 1], k[b, j : j + 1], torch.float64)  # (H, 1, 1)
                assert torch.equal(single[:, 0, 0], whole[b, :, i, j])
    queries, keys = q[:, :6].unflatten(1, (3, 2)), k.unsqueeze(1)[..., [2, 0, 5, 5]]  # (B, 3, 2) and (B, 1, 4)
    tiles = bias.tile(queries, keys, torch.float64)  # (B, 3, H, 2, 4)
    assert torch.equal(tiles.movedim(1, 2).flatten(2, 3), whole[:, :, :6][..., [2, 0, 5, 5]])
    assert bias.tile(queries, keys, torch.float32).dtype == torch.float32


@pytest.mark.ledger("pos.alibi.slopes")
@pytest.mark.parametrize("heads", range(1, 34))
def test_slopes_equal_transformers(heads: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bloom = bloom_alibi(torch.ones(1, 3), heads, torch.float32)[:, 0, 1]  # (H, 1, S): slope · key position
        falcon = falcon_alibi(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(heads, 3)[:, 0, 1]
    assert torch.allclose(slopes(heads).float(), bloom, rtol=1e-6)
    assert torch.allclose(slopes(heads).float(), mpt, rtol=1e-6)
    assert torch.allclose(slopes(heads).float(), falcon, rtol=2**-8)  # Falcon rounds them to bfloat16
    larger_exponent = -build_mpt_alibi_tensor(heads, 3, alibi_bias_max=16)[:, 0, 1]
    assert torch.allclose(slopes(heads, exponent=16.0).float(), larger_exponent, rtol=1e-6)


@pytest.mark.ledger("pos.alibi.slopes")
@pytest.mark.parametrize("heads", range(1, 21))
def test_slopes_equal_the_paper(heads: int) -> None:
    power = 1 << heads.bit_length() - 1
    exponents = [8 * h / power for h in range(1, power + 1)] + [4 * h / power for h in range(1, 2 * power, 2)]
    for found, exponent in zip(slopes(heads).tolist(), exponents, strict=False):
        assert found == pytest.approx(2**-exponent, rel=1e-15)


@pytest.mark.ledger("pos.alibi.slopes")
def test_eight_heads_have_slopes_from_a_half_to_a_256th() -> None:
    assert slopes(8).tolist() == [2**-h for h in range(1, 9)]


def causal_weights(scores: Tensor, bias: Tensor) -> Tensor:
    return (scores + bias).masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, float("-inf")).softmax(-1)


@pytest.mark.ledger("pos.alibi")
@pytest.mark.parametrize("heads", [4, 6])
def test_weights_equal_bloom_and_mpt(heads: int) -> None:
    """Their biases count keys from the start or the end of the row; a constant per row does not change the softmax."""
    scores, length = random(1, heads, 20, 20).float(), 20
    ours = causal_weights(
        scores, Alibi().build(8, heads).bias(layout_at(0)).values(TokenLayout.whole(1, length), torch.float32)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bloom = bloom_alibi(torch.ones(1, length), heads, torch.float32).view(1, heads, 1, length)
    assert (ours - causal_weights(scores, bloom)).abs().max() < 2e-6
    assert (ours - causal_weights(scores, build_mpt_alibi_tensor(heads, length))).abs().max() < 2e-6


@pytest.mark.ledger("pos.alibi")
def test_alibi_uses_true_distances_and_does_not_change_queries_keys_and_embeddings() -> None:
    module = Alibi().build(8, 2)
    layout = TokenLayout(torch.tensor([[9]])).with_keys(torch.tensor([[0, 8, 9]]))
    expected = -torch.tensor([1 / 16, 1 / 256]).view(2, 1) * torch.tensor([9.0, 1.0, 0.0])
    assert torch.equal(module.bias(layout).values(layout, torch.float32)[0, :, 0], expected)
    x = random(1, 1, 1, 8)
    assert module.embed(x, layout) is x and module.rotate(x, x, layout) == (x, x)


@pytest.mark.ledger("pos.alibi.form")
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
def test_the_bias_is_added_after_the_scaling_and_not_scaled_itself(mask: Mask) -> None:
    module = Attention(2, position=Alibi(), mask=mask).build(8).double().requires_grad_(False)
    x, m = random(1, 6, 8), slopes(2).view(2, 1, 1)
    q, k, v = (p(x)[0].unflatten(-1, (2, 4)).transpose(0, 1) for p in (module.q_proj, module.k_proj, module.v_proj))
    allowed = torch.ones(6, 6).tril() > 0 if mask.causal else torch.ones(6, 6) > 0
    relative = torch.arange(6) - torch.arange(6).unsqueeze(-1)  # j - i
    products = q @ k.mT

    def output_of(scores: Tensor) -> Tensor:
        z = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
        return module.o_proj(z.transpose(0, 1).flatten(1))

    found = module(x, TokenLayout.whole(1, 6))[0]
    assert (found - output_of(products / math.sqrt(4) - m * relative.abs())).abs().max() < 1e-12
    assert (found - output_of(products - m * relative.abs())).abs().max() > 1e-3  # without 1/√E
    assert (found - output_of((products - m * relative.abs()) / math.sqrt(4))).abs().max() > 1e-3  # bias scaled as well
    signed_error = (found - output_of(products / math.sqrt(4) + m * relative)).abs().max()
    assert signed_error < 1e-12 if mask.causal else signed_error > 1e-3  # j - i = -|i - j| holds in a decoder only


def test_a_scaled_bias_is_divided_by_the_root_of_head_dim_as_in_falcon() -> None:
    layout = TokenLayout.whole(1, 5)
    unscaled, scaled = (
        Alibi(scaled).build(16, 3).bias(layout).values(layout, torch.float64) for scaled in (False, True)
    )
    assert torch.equal(scaled, unscaled / 4)


def test_alibi_keeps_its_precision_in_a_half_precision_model() -> None:
    """bfloat16 has eight bits: a slope of 2^-0.5 is off by a thousandth, a distance of 1001 becomes 1000."""
    layout = TokenLayout(torch.tensor([[1001]])).with_keys(torch.tensor([[0, 1, 600]]))
    values = Alibi().build(8, 16).bfloat16().bias(layout).values(layout, torch.bfloat16)
    exact = -slopes(16).view(16, 1) * torch.tensor([1001.0, 1000.0, 401.0], dtype=torch.float64)
    assert torch.equal(values[0, :, 0], exact.bfloat16())
    exact = Alibi().build(8, 16).bias(layout).values(layout, torch.float64)
    assert (exact[0, :, 0, 0] + 1001 * slopes(16)).abs().max() < 1e-12


def bucket(relative: int, buckets: int, reach: int, bidirectional: bool) -> int:
    """The rule of T5 in integers.

    The first e buckets hold one distance each; range k of the other n starts at the first d with (d/e)^n ≥ (reach/e)^k.
    """
    offset = 0
    if bidirectional:
        buckets //= 2
        offset, distance = (buckets if relative > 0 else 0), abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    ranges, k = buckets - exact, 0
    while k < ranges - 1 and distance**ranges * exact ** (k + 1) >= reach ** (k + 1) * exact**ranges:
        k += 1
    return offset + exact + k


BUCKETS = [(32, 128), (8, 16), (64, 256), (320, 800), (4, 3), (32, 129)]
BUCKETS += [(36, 32), (72, 64)]  # rounding would put 24 and 48, the first distances of a range, into the previous range


@pytest.mark.ledger("pos.t5")
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both directions"])
@pytest.mark.parametrize(("buckets", "reach"), BUCKETS)
def test_buckets_equal_the_rule_and_transformers(buckets: int, reach: int, bidirectional: bool) -> None:
    relative = torch.arange(-2100, 2101) if reach < 300 else torch.arange(-900, 901)
    found = Buckets(torch.zeros(buckets, 1), reach, bidirectional).bucket(relative)
    assert found.tolist() == [bucket(d, buckets, reach, bidirectional) for d in relative.tolist()]
    theirs = T5Attention._relative_position_bucket(relative, bidirectional, buckets, reach)
    assert torch.equal(found, theirs)


@pytest.mark.ledger("pos.t5")
@pytest.mark.parametrize("bidirectional", [False, True], ids=["decoder", "encoder"])
def test_bias_and_gradients_equal_t5(bidirectional: bool) -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=4, is_decoder=not bidirectional)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Buckets(bidirectional=bidirectional).build(4, 4)
    ours.table.weight.data = theirs.relative_attention_bias.weight.detach().clone()
    layout = TokenLayout.whole(1, 300)
    found, expected = ours.bias(layout).values(layout, torch.float32), theirs.compute_bias(300, 300)
    assert torch.equal(found, expected)
    weights = random(1, 4, 300, 300).float()
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    grads = ours.table.weight.grad, theirs.relative_attention_bias.weight.grad
    assert (grads[0] - grads[1]).abs().max() / grads[1].abs().max() < 1e-5


@pytest.mark.ledger("pos.t5")
def test_distances_beyond_the_last_bucket_are_equal_also_in_decoding() -> None:
    module = T5Buckets().build(4, 3)
    layout = layout_at(2500).with_keys(torch.tensor([[500, 2300, 2372, 2499, 2500]]))  # distances 2000, 200, 128, 1, 0
    values = module.bias(layout).values(layout, torch.float32)[0, :, 0]  # (H, 5)
    assert torch.equal(values[:, 0], values[:, 1]) and torch.equal(values[:, 1], values[:, 2])
    assert torch.equal(values, module.table.weight[[31, 31, 31, 1, 0]].T)


def test_the_layout_carries_the_bias_of_the_stack_and_an_attention_may_have_its_own() -> None:
    shared, layout = T5Buckets(heads=4).build(16, 1), TokenLayout.whole(1, 5)
    shared_layout = shared.share_bias(layout)
    bias = shared_layout.inputs.bias
    assert bias.table is shared.table.weight and bias.table.shape == (32, 4)
    assert Alibi().build(4, 4).bias(shared_layout) is not bias
    assert Attention(4).build(16).position.bias(shared_layout) is bias
    assert layout.inputs.bias is None


def test_layers_share_the_values_of_a_bias_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {Slopes: 0, Buckets: 0}
    for kind, tile in [(kind, kind.tile) for kind in counts]:

        def counted(self: Bias, *given, kind=kind, tile=tile) -> Tensor:
            counts[kind] += 1
            return tile(self, *given)

        monkeypatch.setattr(kind, "tile", counted)
    layout, x = TokenLayout.whole(1, 5), torch.randn(1, 5, 16)
    for position in (Alibi(), Alibi(exponent=16.0), T5Buckets()):
        for layer in [Attention(4, position=position).build(16) for _ in range(3)]:
            layer(x, layout)
    assert counts == {Slopes: 2, Buckets: 3}  # the two exponents; learned tables are of one layer each


def test_gradients_of_the_table_equal_finite_differences() -> None:
    table, q, k = random(8, 2).requires_grad_(), torch.tensor([[3, 9]]), torch.tensor([[0, 4, 30]])
    assert torch.autograd.gradcheck(lambda t: Buckets(t, 16, True).tile(q, k, t.dtype), (table,), fast_mode=True)
