"""LoRA: a new adapter changes no output, only adapters are trained, and a merged model has the same outputs."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.adapt import AdapterError, LoRA, add_lora, merge_lora, unmerge_lora
from regard.adapt.adapters import adapters
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward
from regard.parts.recurrent import LSTM
from regard.parts.router import Router
from regard.spec import Spec, SpecError
from regard.training.optimizer import AdamW
from tests.laws import assert_equal_weights

ALL_PROJECTIONS = LoRA(
    rank=3, alpha=6.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


@pytest.mark.ledger("lora.zero", "lora.targets")
@pytest.mark.parametrize("tied", [True, False])
def test_a_new_adapter_changes_no_output_and_freezes_all_other_weights(make_model, ids, tied):
    model = make_model(tied)
    base_output = model(ids)
    names = add_lora(model, LoRA(rank=3, targets=("q_proj", "head")), seed=0)
    assert names == ["stack.blocks.0.sublayers.0.body.q_proj", "stack.blocks.1.sublayers.0.body.q_proj", "head"]
    assert torch.equal(model(ids), base_output)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{side}.default.weight" for name in names for side in ("lora_A", "lora_B")}


@pytest.mark.ledger("lora.linear", "lora.rank")
def test_an_adapted_layer_equals_its_equation(make_model, ids, randomize_adapter):
    model = make_model()
    add_lora(model, ALL_PROJECTIONS)
    randomize_adapter(model)
    layer = model.stack.blocks[0].sublayers[0].body.q_proj
    x = torch.randn(5, 16, dtype=torch.float64)
    change = 6.0 / 3 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    expected = x @ (layer.base.weight + change).T + layer.base.bias
    assert (layer(x) - expected).abs().max() <= 1e-12
    assert torch.linalg.matrix_rank(change) == 3  # of 16


@pytest.mark.ledger("lora.linear")
def test_only_adapters_are_trained(make_model, ids):
    model = make_model()
    add_lora(model, ALL_PROJECTIONS, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.ledger("lora.zero")
def test_merged_equals_unmerged(make_model, ids, randomize_adapter):
    base, model = make_model(), make_model()
    add_lora(model, ALL_PROJECTIONS)
    randomize_adapter(model)
    adapted = model(ids)
    assert (adapted - base(ids)).abs().max() > 1e-3
    body, base_weight = model.stack.blocks[0].sublayers[0].body, base.stack.blocks[0].sublayers[0].body.q_proj.weight
    assert torch.equal(body.q_proj.base.weight, base_weight)
    layers = merge_lora(model)
    assert not torch.equal(body.q_proj.weight, base_weight)
    assert (model(ids) - adapted).abs().max() <= 1e-12
    assert list(model.state_dict()) == list(base.state_dict())
    unmerge_lora(model, layers)
    assert torch.equal(model(ids), adapted)
    assert torch.equal(body.q_proj.base.weight, base_weight)


def test_a_tied_head_is_adapted_but_not_merged(make_model, ids, randomize_adapter):
    model = make_model(tied=True)
    add_lora(model, LoRA(targets=("head",)))
    randomize_adapter(model)
    embedded, adapted = model.embedding(ids), model(ids)
    with pytest.raises(AdapterError, match="embedding.weight = head.base.weight"):
        merge_lora(model)
    assert torch.equal(model.embedding(ids), embedded) and torch.equal(model(ids), adapted)
    untied = make_model(tied=False)
    add_lora(untied, LoRA(targets=("head",)))
    randomize_adapter(untied)
    adapted = untied(ids)
    merge_lora(untied)
    assert (untied(ids) - adapted).abs().max() <= 1e-12


def test_state_dicts_with_adapters_round_trip(make_model, ids, randomize_adapter):
    model, other = make_model(seed=1), make_model(seed=2)
    add_lora(model, ALL_PROJECTIONS)
    add_lora(other, ALL_PROJECTIONS)
    randomize_adapter(model)
    other.load_state_dict(model.state_dict())
    assert_equal_weights(other, model)
    assert (other(ids) - model(ids)).abs().max() <= 1e-12
    assert other.head.weight is other.embedding.weight


def test_dropout_acts_on_the_adapter_in_training_only(make_model, ids, randomize_adapter):
    model = make_model()
    add_lora(model, LoRA(targets=("q_proj",), dropout=0.5))
    base_output = model(ids)
    assert torch.equal(model(ids), base_output)  # B is zero, so dropout has no effect
    randomize_adapter(model)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.ledger("lwr.init")
def test_the_defaults_are_those_of_lora_without_regret(make_model):
    """α = 32 for every rank, all layers but the head, A uniform within ±1/√in, B zero, and one rate for both."""
    model = make_model()
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert LoRA().alpha == 32 == LoRA(rank=64).alpha and {*add_lora(model, LoRA(64), seed=0)} == linears - {"head"}
    for layer in adapters(model).values():
        a, b = layer.matrix("A", "default"), layer.matrix("B", "default")
        bound = a.shape[-1] ** -0.5
        assert not b.any() and a.abs().max() <= bound
        assert a.var().item() == pytest.approx(bound**2 / 3, rel=0.15)  # that of the uniform distribution
    groups = AdamW(weight_decay=0.0).build(model, 1e-3).param_groups
    assert {group["lr"] for group in groups} == {1e-3}


def test_a_seed_fixes_the_initial_weights_and_not_the_global_generator(make_model):
    drawn = []
    for _ in range(2):
        model, state = make_model(), torch.get_rng_state()
        add_lora(model, LoRA(), seed=7)
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append(model.stack.blocks[0].sublayers[0].body.q_proj.lora_A.default.weight)
    assert torch.equal(*drawn)


def test_lora_settings_round_trip_as_toml():
    assert Spec.from_toml(ALL_PROJECTIONS.to_toml()) == ALL_PROJECTIONS


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"alpha": 0.0}, {"targets": ()}, {"dropout": 1.0}, {"rank": 2.5}, {"targets": "q_proj"}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        LoRA(**wrong)


def test_a_string_of_targets_is_refused_with_the_tuple_to_write():
    with pytest.raises(SpecError, match=r"LoRA.targets='q_proj' is neither .* write targets=\('q_proj',\)"):
        LoRA(targets="q_proj")


@pytest.mark.ledger("lora.targets")
def test_wrong_targets_are_refused(make_model):
    model = make_model()
    with pytest.raises(AdapterError, match="did you mean 'q_proj'"):
        add_lora(model, LoRA(targets=("v_proj", "q_porj")))
    with pytest.raises(AdapterError, match="embedding is not a linear layer"):
        add_lora(model, LoRA(targets=("embedding",)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(AdapterError, match="no LoRA adapters"):
        merge_lora(model)
    add_lora(model, LoRA())
    with pytest.raises(AdapterError, match="already"):
        add_lora(model, LoRA())


def test_targets_of_layers_used_only_in_training_are_refused(ids):
    """Adapters of multi-token prediction (`ahead`) blocks and of router noise change no output.

    Targets that match only these are refused.
    """
    block = Block((Sublayer(Attention(2)),))
    routed = Sublayer(Experts(count=4, top_k=2, expert=FeedForward(8), router=Router(noise=True)))
    ahead = Decoder(31, 16, (Repeat((Block((Sublayer(LSTM(8)),)),)),), ahead=(block,)).build(seed=0)
    noisy = Decoder(31, 16, (Repeat((Block((Sublayer(Attention(2)), routed)),)),)).build(seed=0)
    for model, target, remedy in ((ahead, "q_proj", "h_proj, head"), (noisy, "noise_proj", "head, k_proj")):
        with pytest.raises(AdapterError, match=rf"{target} match layers that run only in training .* among .*{remedy}"):
            add_lora(model, LoRA(targets=(target,)))
        assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.warns(UserWarning, match=r"'noise_proj' matches layers that run only in training \(.*noise_proj"):
        assert len(add_lora(noisy, LoRA(targets=("q_proj", "noise_proj")))) == 2
    assert not [name for name in add_lora(noisy, LoRA(targets="all-linear"), name="all") if "noise_proj" in name]
    assert not [name for name in add_lora(ahead, LoRA(targets="all-linear")) if name.startswith("ahead.")]


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(AdapterError, match="'q_proj'; the model has no linear layer at all"):
        add_lora(torch.nn.Sequential(torch.nn.ReLU()), LoRA(targets=("q_proj",)))
    with pytest.raises(AdapterError, match="'all-linear' selects no layer; the model has no linear layer but its head"):
        add_lora(torch.nn.Sequential(torch.nn.ReLU()), LoRA())
