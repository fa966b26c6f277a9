"""Recomputed attention maps: their product with the recorded values is the recorded output, for every backend."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.lens import attention_heads, attention_maps, entropy, record, row_entropy
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention, AttentionModule
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.latent_attention import LatentAttention
from regard.parts.position.alibi import Alibi
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.t5 import T5Buckets

BODY = "stack.blocks.0.sublayers.0.body"
CASES = [(k, p, b) for k in (1, 2, 4) for p in ("none", "rope", "alibi") for b in ("sdpa", "reference")]


def layout_of(case: str, length: int) -> TokenLayout:
    layout = TokenLayout.whole(1, length)
    if case == "whole":
        return layout
    if case == "packed":
        starts = torch.tensor([[0] * 5 + [5] * (length - 5)])
        return TokenLayout(layout.positions - starts, segments=(starts > 0).long())
    return TokenLayout(layout.positions, valid=layout.positions < length - 3)


@pytest.mark.ledger("lens.maps")
@pytest.mark.parametrize("case", ["whole", "packed", "padded"])
@pytest.mark.parametrize("kv_heads, position, backend", CASES)
def test_maps_times_values_are_the_output(make_model, ids, kv_heads, position, backend, case):
    model, layout = make_model(kv_heads, position, backend), layout_of(case, ids.shape[1])
    with torch.no_grad(), record(model, "*.body.?") as recorded:
        model(ids, layout)
    maps = attention_maps(model, ids[0], layout_of(case, ids.shape[1]))
    assert maps[1] is None
    for layer in (0, 2):
        values, z = (recorded[f"stack.blocks.{layer}.sublayers.0.body.{tap}"][0] for tap in "vz")
        output = maps[layer] @ values.repeat_interleave(4 // kv_heads, 0)
        assert (output - z).abs().max() <= 1e-12
        assert maps[layer].std(-1).max() > 0.1  # not uniform, so that wrong weights are noticed


@pytest.mark.ledger("lens.maps")
def test_maps_are_causal_probabilities(make_model, ids):
    maps = attention_maps(make_model(), ids[0].tolist())
    assert maps[0].shape == (4, 12, 12)
    assert torch.allclose(maps[0].sum(-1), torch.ones(4, 12, dtype=torch.float64))
    assert maps[0].triu(1).count_nonzero() == 0


@pytest.mark.parametrize(
    "mixer, position",
    [(Attention(4, 2, sinks=True, softcap=2.0), T5Buckets(8, 16, heads=4)), (LatentAttention(4, 6, 4, 4), NoPosition()),
     (LatentAttention(4, 6, 4, 4, position=Alibi()), NoPosition())],
)  # fmt: skip
def test_maps_include_shared_biases_and_latent_keys(mixer: Body, position: Position, ids):
    model = Decoder(61, 32, (Repeat((Block((Sublayer(mixer),)),), 2),), position).build(seed=0).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    with torch.no_grad(), record(model, "*.body.?") as recorded:
        model(ids)
    for layer, weights in enumerate(attention_maps(model, ids[0])):
        values, z = (recorded[f"stack.blocks.{layer}.sublayers.0.body.{tap}"][0] for tap in "vz")
        assert (weights @ values.repeat_interleave(4 // len(values), 0) - z).abs().max() <= 1e-12


def test_packed_documents_do_not_attend_to_each_other(make_model, ids):
    model = make_model()
    packed = attention_maps(model, ids[0], layout_of("packed", 12))[2]
    assert packed[:, 5:, :5].count_nonzero() == 0
    assert (packed[:, :5, :5] - attention_maps(model, ids[0, :5])[2]).abs().max() <= 1e-12
    assert (packed[:, 5:, 5:] - attention_maps(model, ids[0, 5:])[2]).abs().max() <= 1e-12


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_selected_rows_and_heads_equal_those_of_the_whole_map(make_model, ids, position):
    model, layout = make_model(position=position), TokenLayout.whole(1, 12)
    with torch.no_grad(), record(model, [f"{BODY}.q", f"{BODY}.k"]) as recorded:
        model(ids, layout)
    body, q, k = model.get_submodule(BODY), recorded[f"{BODY}.q"], recorded[f"{BODY}.k"]
    whole, rows = body.attention_map({"q": q, "k": k}, layout), slice(7, 10)
    part = body.attention_map({"q": q[:, :, rows], "k": k}, layout.queries(rows), slice(1, 4))
    assert (part - whole[:, 1:4, 7:10]).abs().max() <= 1e-15


def test_weights_of_a_cached_step_equal_the_last_row_of_the_map(make_model, ids):
    """The last token with cached keys has the weights that it has in a forward of the whole sequence."""
    model = make_model(position="alibi")
    store = Contiguous(model.spec.memory(), rows=1, capacity=12, dtype=torch.float64)
    first, last = TokenLayout.whole(1, 11), TokenLayout(torch.tensor([[11]]))
    with torch.no_grad():
        model(ids[:, :11], first, store.begin_forward(first))
        with record(model, [f"{BODY}.q", f"{BODY}.k"]) as recorded:
            model(ids[:, 11:], last, store.begin_forward(last))
    layout = last.with_keys(torch.arange(12).expand(1, 12))
    taps = {name: recorded[f"{BODY}.{name}"] for name in "qk"}
    weights = model.get_submodule(BODY).attention_map(taps, layout)
    assert (weights[0, :, 0] - attention_maps(model, ids[0])[0][:, -1]).abs().max() <= 1e-12


def test_maps_of_a_batch_equal_those_of_its_rows(make_model, ids):
    model, batch = make_model(), torch.cat([ids, ids.flip(1)])
    found = attention_maps(model, batch)
    assert found[0].shape == (2, 4, 12, 12) and found[1] is None
    for row in (0, 1):
        assert (found[2][row] - attention_maps(model, batch[row])[2]).abs().max() <= 1e-12
    with pytest.raises(ValueError, match=r"shape \(1, 2, 12\) are neither"):
        attention_maps(model, batch[None])


def test_the_map_of_one_layer_equals_that_of_all_layers(make_model, ids, monkeypatch):
    model, computed = make_model(), []
    all_maps = attention_maps(model, ids[0])
    original = AttentionModule.attention_map
    monkeypatch.setattr(AttentionModule, "attention_map", lambda *args: computed.append(args[0]) or original(*args))
    assert torch.equal(*attention_maps(model, ids[0], layer=2), all_maps[2])
    assert attention_maps(model, ids[0], layer=1) == [None]
    assert computed == [model.get_submodule("stack.blocks.2.sublayers.0.body")]


def test_heads_are_counted_per_layer(make_model):
    assert attention_heads(make_model()) == (4, 0, 4)


@pytest.mark.ledger("lens.entropy")
def test_entropy_is_log_n_for_uniform_and_zero_for_one_hot_rows():
    uniform = torch.full((3, 5, 8), 1 / 8)
    one_hot = torch.eye(8)[None, :5]
    assert torch.allclose(row_entropy(uniform), torch.full((3, 5), math.log(8)))
    assert torch.allclose(entropy(torch.cat([uniform, one_hot])), torch.tensor([math.log(8)] * 3 + [0.0]))


@pytest.mark.ledger("lens.collapse.grad")
def test_one_hot_attention_has_no_gradient_for_queries_and_keys():
    """No gradient reaches the queries and keys; values and output have their full gradients."""
    torch.manual_seed(0)
    module, x, layout = (
        Attention(1).build(8).double(),
        torch.randn(1, 6, 8, dtype=torch.float64),
        TokenLayout.whole(1, 6),
    )
    norms = {}
    for sharpness in (1, 1e6):
        module.scale = sharpness * 8**-0.5
        module.zero_grad()
        module(x, layout).sin().sum().backward()
        norms[sharpness] = {name: weight.grad.norm().item() for name, weight in module.named_parameters()}
    # The scores' maxima select one value per query, and the gradient of the values is Aᵀ times that of the output.
    q, k, v = (projection(x) for projection in (module.q_proj, module.k_proj, module.v_proj))
    one_hot = F.one_hot((q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).argmax(-1), 6).double()
    grad = (one_hot @ v @ module.o_proj.weight.T).cos() @ module.o_proj.weight
    assert torch.allclose(module.v_proj.weight.grad, ((one_hot.mT @ grad).mT @ x)[0], atol=1e-12)
    assert all(norm > 0.1 for norm in norms[1].values())
    assert all(norms[1e6][f"{name}_proj.weight"] < 1e-8 for name in "qk")
    assert all(norms[1e6][f"{name}_proj.weight"] > 0.1 for name in "vo")
