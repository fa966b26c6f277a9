"""rsLoRA, DoRA and PiSSA: equal to PEFT both ways, from the first gradient to the merged weights."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from regard.adapt import (
    AdapterError,
    LoRA,
    add_lora,
    disable_adapters,
    load_adapter,
    merge_lora,
    quantize_linears,
    save_adapter,
    unmerge_lora,
)
from regard.adapt.foreign_adapters import export_adapter, load_foreign_adapter
from regard.adapt.lora import LoRALinear
from regard.adapt.lora_weights import lora_weights
from regard.adapt.many_lora import AdaptedModel, AdapterRows
from regard.checkpoint import load
from regard.families import family
from regard.formats.integers import Integer
from regard.spec import SpecError
from tests.families.pairs import LIMIT, make_pair

TARGETS = ("q_proj", "v_proj", "down_proj", "head")
VARIANTS = {
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "dora, rslora, pissa": {"dora": True, "rslora": True, "init": "pissa"},
}


class Toy(nn.Module):
    """Two linear layers, with and without bias, under the same names here and in PEFT."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 10), nn.Linear(10, 7, bias=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).to(dtype)


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[float]:
    """A few steps of SGD; returns the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(variant: str, dtype: torch.dtype = torch.float64) -> Toy:
    model = Toy(dtype)
    add_lora(model, LoRA(3, 6.5, ("first", "second"), **VARIANTS[variant]), seed=0)
    train(model, inputs(dtype))
    return model


def peft_config(lora: LoRA, init: str | bool = True) -> Any:
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=["first", "second"], use_rslora=lora.rslora,
        use_dora=lora.dora, init_lora_weights=init,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_start_and_the_disabled_adapter_are_bitwise_the_base(variant: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x, base = inputs(dtype), Toy(dtype)(inputs(dtype))
        model = Toy(dtype)
        add_lora(model, LoRA(3, 6.5, ("first", "second"), **VARIANTS[variant]), seed=0)
        assert torch.equal(model(x), base)
        train(model, x)
        assert (model(x) - base).abs().max() > 1e-2
        with disable_adapters(model):
            assert torch.equal(model(x), base)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_in_peft_gives_the_same_losses(variant: str) -> None:
    """Gradients too: those of the second and third loss depend on them."""
    model, lora = Toy(torch.float32), LoRA(3, 6.5, ("first", "second"), **VARIANTS[variant])
    add_lora(model, lora, seed=0)
    init = "pissa" if lora.init == "pissa" else True
    theirs = peft.get_peft_model(Toy(torch.float32), peft_config(lora, init))
    if init is True:  # the random A
        for name in ("first", "second"):
            ours = model.get_submodule(name)
            assert isinstance(ours, LoRALinear)
            theirs.get_submodule(f"base_model.model.{name}").lora_A.default.weight.data.copy_(
                ours.matrix("A", "default")
            )
    x = inputs(torch.float32)
    assert train(model, x) == pytest.approx(train(theirs, x), rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_reads_our_folder_on_the_original_base(variant: str, tmp_path: Path) -> None:
    model, x = trained(variant), inputs()
    expected = model(x)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (6 if "pissa" in variant else 3, "dora" in variant)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"task_type": None}))  # the model is no LM
    theirs = peft.PeftModel.from_pretrained(Toy(), tmp_path, autocast_adapter_dtype=False)
    assert (theirs(x) - expected).abs().max() <= 1e-12
    assert (theirs.merge_and_unload()(x) - expected).abs().max() <= 1e-12
    again = Toy()
    load_adapter(again, tmp_path)
    assert (again(x) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_of_peft_is_read(variant: str, tmp_path: Path) -> None:
    """Also PiSSA's matrices of the residual, which PEFT saves unless it is told where the first ones are."""
    lora = LoRA(3, 6.5, **VARIANTS[variant])
    init = "pissa" if lora.init == "pissa" else True
    theirs, x = peft.get_peft_model(Toy(torch.float32), peft_config(lora, init)), inputs(torch.float32)
    train(theirs, x)
    theirs.save_pretrained(tmp_path)
    model = Toy(torch.float32)
    load_adapter(model, tmp_path)
    assert (model(x) - theirs(x)).abs().max() <= 1e-5


def test_pissa_that_peft_converted_is_read(tmp_path: Path) -> None:
    theirs, x = peft.get_peft_model(Toy(torch.float32), peft_config(LoRA(3, 6.5), "pissa")), inputs(torch.float32)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "first")
    train(theirs, x)
    theirs.save_pretrained(tmp_path / "last", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    model = Toy(torch.float32)
    load_adapter(model, tmp_path / "last")
    assert model.get_submodule("first").loras["default"].rank == 6
    assert (model(x) - theirs(x)).abs().max() <= 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_is_unmerged(variant: str) -> None:
    model, x = trained(variant), inputs()
    expected, keys = model(x), set(Toy().state_dict())
    layers = merge_lora(model)
    assert set(model.state_dict()) == keys and (model(x) - expected).abs().max() <= 1e-12
    unmerge_lora(model, layers)
    assert torch.equal(model(x), expected)
    if "dora" in variant:  # the rows of the merged weight have the trained norms
        layer = model.get_submodule("first")
        assert isinstance(layer, LoRALinear)
        norms = layer.merged_weight(layer.base.weight, "default").norm(dim=1)
        assert (norms - layer.magnitude("default").abs()).abs().max() <= 1e-12


def test_the_matrices_of_pissa_are_the_leading_singular_vectors() -> None:
    model = Toy()
    weight = model.first.weight.detach().clone()
    values = torch.linalg.svdvals(weight)
    for init, tolerance in (("pissa", 1e-12), ("pissa_niter_16", 1e-3)):
        model = Toy()
        add_lora(model, LoRA(4, 2.0, ("first",), init=init), seed=0)
        layer = model.get_submodule("first")
        assert isinstance(layer, LoRALinear)
        principal = 0.5 * layer.matrix("B", "default") @ layer.matrix("A", "default")
        left = torch.linalg.svdvals(weight - principal)
        assert (left[:6] - values[4:]).abs().max() <= tolerance
        assert not layer.matrix("init_A", "default").requires_grad and torch.equal(layer.base.weight, weight)


def test_stacked_weights_take_pissa_and_refuse_dora(make_stacked, ids, tmp_path) -> None:
    model, base = make_stacked(), make_stacked()(ids)
    with pytest.raises(AdapterError, match=r"dora does not work for stacked weights \(.*\), as in PEFT"):
        add_lora(model, LoRA(2, targets="all-linear", dora=True))
    with pytest.raises(AdapterError, match="rank=9 is larger than the number of singular values of .*, 6; choose"):
        add_lora(model, LoRA(9, targets="all-linear", init="pissa"))
    add_lora(model, LoRA(2, targets="all-linear", init="pissa"), seed=0)
    assert torch.equal(model(ids), base)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(ids).square().mean().backward()
    optimizer.step()
    expected = model(ids)
    save_adapter(model, tmp_path)
    again = make_stacked()
    load_adapter(again, tmp_path)
    assert (again(ids) - expected).abs().max() <= 1e-12 < 1e-4 < (expected - base).abs().max()
    merge_lora(model)
    assert (model(ids) - expected).abs().max() <= 1e-12


def test_wrong_initializations_are_refused() -> None:
    for init in ("pisa", "pissa_niter_", "pissa_niter_0"):
        with pytest.raises(SpecError, match="is none of 'uniform', 'pissa' and 'pissa_niter_N'"):
            LoRA(init=init)


def test_the_base_of_dora_can_be_quantized() -> None:
    """Its norms are those of the rounded weight: the output equals that of an adapter on the rounded layer."""
    model, rounded = (trained("dora", torch.float64) for _ in range(2))
    assert quantize_linears(model, Integer(8)) == ["first.base", "second.base"]
    for layer, other in ((rounded.first, model.first), (rounded.second, model.second)):
        layer.base.weight.data = other.base.weight
    assert (model(inputs()) - rounded(inputs())).abs().max() <= 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_rows_with_different_adapters_equal_each_alone(make_model, randomize_adapter, ids, variant: str) -> None:
    loras = {0: LoRA(2, 5.0), 2: LoRA(3, 6.5, TARGETS[:3], **VARIANTS[variant])}
    base, alone, rows = make_model().eval(), {}, AdapterRows(4, 3, torch.device("cpu"))
    mixed = AdaptedModel(make_model().eval(), rows)
    for slot, lora in loras.items():
        model = make_model().eval()
        add_lora(model, lora, seed=slot)
        randomize_adapter(model)
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
        weights = lora_weights(model)
        mixed.check(weights)
        mixed.prepare(weights)
        mixed.load(slot, weights)
        alone[slot] = model
    ids = torch.cat([ids, ids.flip(1)])
    rows.write([0, -1, 2, 0])
    found = mixed.model(ids)
    assert torch.equal(found[1], base(ids)[1])
    for row, slot in ((0, 0), (2, 2), (3, 0)):
        assert (found[row] - alone[slot](ids)[row]).abs().max() <= 1e-11
    mixed.load(2, weights_without_dora := lora_weights(alone[0]))  # a slot of DoRA that another adapter takes
    rows.write([2])
    assert weights_without_dora.rank == 2 and (mixed.model(ids) - alone[0](ids)).abs().max() <= 1e-11


CASES = {
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}, ("q_proj", "v_proj", "down_proj"), ["qkv_proj", "down_proj"]),
    "gpt2": (
        "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        ("q_proj", "v_proj", "up_proj"), ["c_attn", "c_fc"],
    ),
}  # fmt: skip
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    "name, variant", [("phi3", "dora, rslora, pissa"), ("phi3", "rslora"), ("gpt2", "dora"), ("gpt2", "pissa")]
)
def test_fused_layers_of_transformers(name: str, variant: str, tmp_path: Path) -> None:
    """Exported adapters in PEFT, and adapters of PEFT here; q, k and v are one layer there."""
    model_class, config, targets, their_targets = CASES[name]
    sizes = config if name == "gpt2" else SIZES | config
    pair = make_pair((model_class, sizes | {"vocab_size": 61}), tmp_path / "model")
    table = family(name).table(pair.ours.spec)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    base = pair.ours(ids)
    lora = LoRA(3, 6.5, targets, **VARIANTS[variant])
    add_lora(pair.ours, lora, seed=0)
    disturb(pair.ours)
    export_adapter(pair.ours, tmp_path / "adapter", table)
    adapted = peft.PeftModel.from_pretrained(pair.theirs, tmp_path / "adapter").eval()
    assert_close(adapted(ids).logits, pair.ours(ids), base)
    again = load(pair.folder)
    load_foreign_adapter(again, tmp_path / "adapter", table)
    assert_close(again(ids), pair.ours(ids), base)
    adapted.unload()
    theirs = make_pair((model_class, sizes | {"vocab_size": 61}), tmp_path / "model").theirs
    made = peft.get_peft_model(
        theirs,
        peft.LoraConfig(
            r=3, target_modules=their_targets, fan_in_fan_out=name == "gpt2", use_rslora=lora.rslora,
            use_dora=lora.dora, init_lora_weights="pissa" if lora.init == "pissa" else True,
            rank_pattern={} if lora.rslora and lora.dora else {their_targets[0]: 5},
        ),
    ).eval()  # fmt: skip
    disturb(made)
    made.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    again = load(pair.folder)
    load_foreign_adapter(again, tmp_path / "theirs", table)
    assert_close(again(ids), made(ids).logits, base)


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """In place of training: random changes of the matrices and magnitudes."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def assert_close(found: Tensor, expected: Tensor, base: Tensor) -> None:
    largest = max(1.0, expected.abs().max().item())
    assert (found - expected).abs().max() <= LIMIT * largest < 1e-2 < (expected - base).abs().max()
