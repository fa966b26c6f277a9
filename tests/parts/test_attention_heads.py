"""Multi-head attention equals torch's; identities of its heads, and of grouped queries that share keys and values."""

import pytest
import torch
from torch import Tensor, nn

from regard.engine.stores.contiguous import Contiguous
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule, use_backend
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.spec import SpecError
from tests.parts.attention_layer import LENGTH, WIDTH, attention, bytes_of, flops, random, record, saved_bytes

KV = ("k_proj", "v_proj")


@pytest.mark.ledger("mha.module")
def test_outputs_and_gradients_equal_torch() -> None:
    ours, theirs = attention(4, bias=True), nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=torch.float64)
    copy_weights(theirs, ours)
    for module in (ours, theirs):
        module.requires_grad_()
    x = random(2, LENGTH, WIDTH).requires_grad_()
    out, expected = ours(x, TokenLayout.whole(2, LENGTH)), theirs(x, x, x, need_weights=False)[0]
    assert (out - expected).abs().max() < 1e-12
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    packed = torch.cat([torch.autograd.grad(out.sin().sum(), p.weight, retain_graph=True)[0] for p in projections])
    found = [packed, *torch.autograd.grad(out.sin().sum(), (x, ours.o_proj.weight))]
    expected_gradients = torch.autograd.grad(expected.sin().sum(), (theirs.in_proj_weight, x, theirs.out_proj.weight))
    for f, e in zip(found, expected_gradients, strict=True):
        assert (f - e).abs().max() < 1e-12


def copy_weights(theirs: nn.MultiheadAttention, ours: AttentionModule) -> None:
    """Copies our weights into torch's layer."""
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.in_proj_weight.data = torch.cat([p.weight for p in projections])
    theirs.in_proj_bias.data = torch.cat([p.bias for p in projections])
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


@pytest.mark.ledger("mha.sum")
def test_the_output_is_a_sum_over_heads() -> None:
    module, x = attention(4), random(2, LENGTH, WIDTH)
    heads = record(module, x)["z"].unbind(1)
    terms = [z @ w.T for z, w in zip(heads, module.o_proj.weight.chunk(4, dim=1), strict=True)]
    assert (sum(terms) - module(x, TokenLayout.whole(2, LENGTH))).abs().max() < 1e-13


@pytest.mark.ledger("mha.dims")
@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_the_number_of_weights_does_not_depend_on_the_number_of_heads(heads: int) -> None:
    with torch.device("meta"):
        without_bias, with_bias = (Attention(heads, bias=bias).build(512) for bias in (False, True))
    assert sum(p.numel() for p in without_bias.parameters()) == 4 * 512**2 == 1_048_576
    assert sum(p.numel() for p in with_bias.parameters()) == 1_050_624
    assert Attention(heads).sizes(512) == (heads, heads, 512 // heads)
    assert without_bias.q_proj.weight.unflatten(0, (heads, -1))[0].T.shape == (512, 512 // heads)  # 512 × 64 for eight
    assert without_bias.o_proj.weight.shape == (512, 512)
    with pytest.raises(SpecError, match="width=512 is not divisible by heads=7"):
        Attention(7).sizes(512)


@pytest.mark.ledger("mha.cost")
def test_more_heads_add_attention_weights_but_no_flops() -> None:
    x = random(1, 64, WIDTH)
    counts, weight_bytes, saved = [], [], []
    for heads in (1, 2, 8):
        module = attention(heads)
        use_backend(module, "reference")
        counts.append(flops(module, x))
        weight_bytes.append(record(module, x)["weights"].nbytes)
        use_backend(module, "sdpa")
        y = x.clone().requires_grad_()
        saved.append(saved_bytes(lambda module=module, y=y: module(y, TokenLayout.whole(1, 64))))
    assert counts[0] == counts[1] == counts[2]
    assert weight_bytes == [64 * 64 * 8 * heads for heads in (1, 2, 8)]
    assert saved[2] - saved[0] <= 7 * 64 * 8  # one sum per row and head, not the matrix of weights


@pytest.mark.ledger("mha.rank")
def test_softmax_raises_the_rank_of_scores_and_head_dim_bounds_that_of_the_output_map() -> None:
    n, width = 64, 8
    q, k = random(n, width), random(n, width, seed=1)
    scores = q @ k.T
    rank = torch.linalg.matrix_rank
    assert rank(scores) == width
    assert rank((scores / width**0.5).softmax(-1)) == n
    permutation = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    peaked = (50.0 * torch.eye(n, dtype=torch.float64)[permutation]).softmax(-1)
    assert rank(peaked) == n
    assert rank(torch.zeros(n, n, dtype=torch.float64).softmax(-1)) == 1
    module = attention(4)
    for values, out in zip(module.v_proj.weight.chunk(4), module.o_proj.weight.chunk(4, 1), strict=True):
        assert rank(out @ values) == WIDTH // 4


@pytest.mark.ledger("mha.independent")
def test_heads_mix_only_in_the_output_projection() -> None:
    module, x = attention(4), random(1, LENGTH, WIDTH)
    use_backend(module, "reference")
    before = record(module, x)["z"]
    for projection in (module.q_proj, module.k_proj, module.v_proj):
        projection.weight[4:8] += 1  # the rows of the second head
    after = record(module, x)["z"]
    assert [torch.equal(b, a) for b, a in zip(before[0], after[0], strict=True)] == [True, False, True, True]
    for projection in (module.q_proj, module.k_proj, module.v_proj):
        projection.weight.copy_(projection.weight[:4].repeat(4, 1))
    shared = record(module, x)["z"]
    assert (shared - shared[:, :1]).abs().max() < 1e-14


@pytest.mark.ledger("mha.averaged")
def test_torch_returns_the_mean_of_the_heads_weights() -> None:
    ours, x = attention(8, width=512, bias=True), random(2, 10, 512)
    theirs = nn.MultiheadAttention(512, 8, batch_first=True, dtype=torch.float64)
    copy_weights(theirs, ours)
    out, averaged = theirs(x, x, x)
    weights = record(ours, x)["weights"]
    assert (out.shape, averaged.shape, weights.shape) == ((2, 10, 512), (2, 10, 10), (2, 8, 10, 10))
    assert (weights.mean(1) - averaged).abs().max() < 1e-12
    assert weights.std(1).max() > 0.1  # heads differ, which the mean hides


@pytest.mark.ledger("mha.headdim")
def test_head_dims_equal_those_of_published_models() -> None:
    published = {"2017": (8, 512, 64), "7B": (32, 4096, 128), "70B": (64, 8192, 128), "GPT-3": (96, 12288, 128)}
    for heads, width, head_dim in published.values():
        assert Attention(heads).sizes(width)[2] == head_dim
        assert 32 <= head_dim <= 128


@pytest.mark.ledger("mha.keras")
def test_the_block_of_2017_equals_torch() -> None:
    """Eight heads of width d/8, a ReLU layer of width 4d, and post-norm."""
    spec = Block(
        (
            Sublayer(Attention(8, mask=Full(), bias=True), LayerNorm()),
            Sublayer(FeedForward(4 * 64, "relu"), LayerNorm()),
        ),
        style="post",
    )
    block, x = spec.build(64).double(), random(2, LENGTH, 64)
    self_attention, feed_forward = block.sublayers
    theirs = nn.MultiheadAttention(64, 8, batch_first=True, dtype=torch.float64)
    copy_weights(theirs, self_attention.body)
    inner = self_attention.norm(x + theirs(x, x, x, need_weights=False)[0])
    expected = feed_forward.norm(inner + feed_forward.body.down_proj(feed_forward.body.up_proj(inner).relu()))
    assert (block(x, TokenLayout.whole(2, LENGTH))[0] - expected).abs().max() < 1e-12
    assert sum(p.numel() for p in block.parameters()) == 12 * 64**2 + (4 + 5) * 64 + 2 * 2 * 64


@pytest.mark.ledger("gqa.module")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_equal_heads_with_repeated_keys(kv_heads: int) -> None:
    grouped, ungrouped, x = attention(4, kv_heads).requires_grad_(), attention(4), random(2, LENGTH, WIDTH)
    with torch.no_grad():
        ungrouped.load_state_dict(
            grouped.state_dict() | {f"{name}.weight": repeat_kv_heads(grouped, name) for name in KV}
        )
    ungrouped.requires_grad_()
    layout = TokenLayout.whole(2, LENGTH)
    out, expected = grouped(x, layout), ungrouped(x, layout)
    assert (out - expected).abs().max() < 1e-13
    out.sin().sum().backward()
    expected.sin().sum().backward()
    for name in KV:  # the gradient of a shared head is the sum over its copies
        summed = getattr(ungrouped, name).weight.grad.unflatten(0, (kv_heads, 4 // kv_heads, -1)).sum(1).flatten(0, 1)
        assert (getattr(grouped, name).weight.grad - summed).abs().max() < 1e-12
    with pytest.raises(SpecError, match="choose one of 1, 2, 4"):
        Attention(4, 3)


def repeat_kv_heads(module: AttentionModule, name: str) -> Tensor:
    """A projection with each head repeated once per query head of its group."""
    heads = getattr(module, name).weight.unflatten(0, (module.kv_heads, -1))
    return heads.repeat_interleave(module.heads // module.kv_heads, 0).flatten(0, 1)


@pytest.mark.ledger("gqa.ratio", "kv.heads")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ratio"), [(8, 8, 1), (8, 4, 2), (8, 2, 4), (8, 1, 8), (32, 8, 4), (64, 8, 8)]
)
def test_the_cache_shrinks_by_the_group_size(heads: int, kv_heads: int, ratio: int) -> None:
    ungrouped, grouped = (
        Contiguous(((Attention(heads, k, head_dim=4).memory(64),),), 1, 15, torch.float32) for k in (heads, kv_heads)
    )
    assert bytes_of(ungrouped) == ratio * bytes_of(grouped)
    assert bytes_of(grouped) == 16 * 2 * kv_heads * 4 * 4  # 16 slots, keys and values, 4 numbers per head, 4 bytes


@pytest.mark.ledger("gqa.exact")
def test_grouped_queries_change_the_output_but_not_the_flops_of_attention() -> None:
    x, layout = random(1, 32, WIDTH), TokenLayout.whole(1, 32)
    attention_flops = {}
    for kv_heads in (4, 2, 1):
        module = attention(4, kv_heads)
        use_backend(module, "reference")
        projections = 4 * 32 * WIDTH**2 + 4 * 32 * WIDTH * (WIDTH // 4) * kv_heads  # q and o; k and v
        attention_flops[kv_heads] = flops(module, x) - projections
    assert attention_flops[4] == attention_flops[2] == attention_flops[1] == 4 * 32**2 * WIDTH
    caches = [bytes_of(Contiguous(((Attention(4, n).memory(WIDTH),),), 1, 31, torch.float64)) for n in (4, 2, 1)]
    assert caches == [2 * 32 * (WIDTH // 4) * n * 8 for n in (4, 2, 1)]
    ungrouped, pooled = attention(4), attention(4, 2)
    weights = ungrouped.state_dict()
    for name in KV:  # the mean of each pair of heads, as in the conversion of a trained model
        weights[f"{name}.weight"] = weights[f"{name}.weight"].unflatten(0, (2, 2, -1)).mean(1).flatten(0, 1)
    pooled.load_state_dict(weights)
    assert (pooled(x, layout) - ungrouped(x, layout)).abs().max() > 0.1
