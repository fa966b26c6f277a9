"""Weight decay and Muon by modules, layer-wise learning rates, frozen parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from regard.adapt import add_lora
from regard.adapt.lora import LoRA
from regard.models.decoder import Decoder
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.spec import SpecError
from regard.training.optimizer import SGD, AdamW, set_learning_rate
from regard.training.parameter_groups import (
    LRScale,
    decay_groups,
    decayed_parameters,
    freeze,
    hidden_matrices,
    learning_rate_scales,
    make_groups,
)
from tests.laws import GQA, MODELS, OTHERS, block
from tests.training.tiny import SETTINGS, SPEC, trainer

# Every parameter of the package by the class of its module, reviewed one by one. Biases (`*.bias`) are never decayed.
MATRICES = {  # decayed, and orthogonalized by Muon
    "Linear.weight",
    "GroupedLinear.weight",
    "BlockDiagonal.weight",
    "LatentAttentionModule.k_up",
    "LatentAttentionModule.v_up",
    "LinformerModule.k_length",
    "LinformerModule.v_length",
}
DECAYED = {  # decayed; filters and rows per channel are not matrices
    "Conv1d.weight",
    "ConvWeights.weight",
    "ShortConvolutionModule.weight",
    "S4Module.C",
    "S4Module.C_back",
    "S4DModule.C",
    "S4DModule.C_back",
}
NOT_DECAYED = {
    "Embedding.weight",  # tokens, learned positions, T5's buckets
    "RMSNormModule.weight",
    "LayerNorm.weight",
    "AdditiveModule.v",  # a vector per head
    "AttentionModule.sinks",
    "AttentionPoolingModule.query",
    "DualEncoderModule.scale",
    "Mix.share",
    "PatchesModule.cls",
    "PatchesModule.registers",
    "RGLRUModule.rate",
    "SublayerModule.scale",
    "Summary.places",  # a table of positions
    "TimeMixingModule.bonus",
    "TimeMixingModule.log_decay",
    *(f"{kind}.{name}" for kind in ("MambaModule", "Mamba2Module") for name in ("A_log", "D", "step_bias")),
    *(f"{kind}.{name}" for kind in ("S4Module", "S4DModule") for name in ("log_step", "log_decay", "turn", "skip")),
    "S4Module.B",
    "S4Module.P",
}
# The paths of linear layers that are decayed but no hidden matrices, and the embedding's table as a tied head.
OUTER = ("head", "vocab", "labels", "teacher", "input.proj", "head.proj")


@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_modules_decide_about_weight_decay_of_every_part(name: str) -> None:
    model = (MODELS | OTHERS)[name].build()
    decayed, matrices = decayed_parameters(model), hidden_matrices(model)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, module in model.named_modules():
        for parameter_name, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            key = f"{type(module).__name__}.{parameter_name}"
            known = key in MATRICES | DECAYED | NOT_DECAYED or key.endswith(".bias")
            assert known, f"{path}: is {key} the weight of a linear map? Add it to one of the sets"
            expected = key in MATRICES | DECAYED and p not in tables
            assert (p in decayed) == expected, f"{path}.{parameter_name}"
            assert (p in matrices) == (expected and key in MATRICES and not path.endswith(OUTER)), path


def test_adapters_are_decayed_and_routers_too() -> None:
    spec = Decoder(8, 8, (Repeat((block(GQA, Experts(4, 2, SwiGLU(8))),)),))
    model = spec.build(0)
    assert any(name.endswith("router.proj.weight") for name, _ in decay_groups(model)[0])
    add_lora(model, LoRA(rank=2, targets=("q_proj", "experts.up_proj")))
    decayed, not_decayed = decay_groups(model)
    assert {p.ndim for _, p in decayed} == {2, 3} and not not_decayed
    assert all(".lora_" in name for name, _ in decayed)


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_have_weight_decay(tied: bool) -> None:
    model = replace(SPEC, tied=tied).build(seed=0)
    decayed, not_decayed = ({name for name, _ in group} for group in decay_groups(model))
    assert decayed | not_decayed == {name for name, _ in model.named_parameters()}
    assert not decayed & not_decayed
    assert all(name.endswith("_proj.weight") or name == "head.weight" for name in decayed)
    assert all(name == "embedding.weight" or "norm" in name or name.endswith("bias") for name in not_decayed)
    assert ("head.weight" in decayed) == (not tied)


class UserPart(nn.Module):
    """A part with a map and rates as plain parameters, and a linear layer whose weight is not decayed."""

    weight_decay = ("map",)
    no_weight_decay = ("fixed",)

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.zeros(4, 3))
        self.map = nn.Parameter(torch.zeros(4, 3))
        self.proj = nn.Linear(4, 3)
        self.fixed = nn.Linear(4, 3)
        self.cell = nn.LSTMCell(4, 3)


def test_a_part_declares_its_weight_decay() -> None:
    decayed, _ = ([name for name, _ in group] for group in decay_groups(nn.Sequential(UserPart())))
    assert decayed == ["0.map", "0.proj.weight", "0.cell.weight_ih", "0.cell.weight_hh"]
    part = UserPart()
    part.no_weight_decay = ("rate",)
    with pytest.raises(
        AttributeError, match="UserPart.no_weight_decay names rate; its parameters are rates, map, proj"
    ):
        decay_groups(part)


def test_groups_have_one_weight_decay_and_one_share_of_the_rate() -> None:
    model = SPEC.build(0)
    groups = make_groups(model, 0.1, 0.3, {"embedding.weight": 0.5, "norm.weight": 0.5})
    found = {(g["weight_decay"], g["lr_scale"], g["lr"]): [name for name, _ in g["params"]] for g in groups}
    assert found[(0.0, 0.5, 0.05)] == ["embedding.weight", "norm.weight"]
    assert found.keys() == {(0.3, 1.0, 0.1), (0.0, 1.0, 0.1), (0.0, 0.5, 0.05)}
    optimizer = AdamW().build(model, 0.1, {"embedding.weight": 0.5})
    set_learning_rate(optimizer, 0.01)
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.005, 0.01, 0.01]


def test_learning_rates_decay_by_layer_from_the_last() -> None:
    spec = Decoder(8, 8, (Repeat((block(GQA),), 3),), tied=False, ahead=(block(GQA),))
    scales = learning_rate_scales(spec.build(0), 0.5, ())
    assert scales["embedding.weight"] == 0.5**4
    for i in range(3):
        layer = {scale for name, scale in scales.items() if name.startswith(f"stack.blocks.{i}.")}
        assert layer == {0.5 ** (3 - i)}
    rest = {name.partition(".")[0]: scale for name, scale in scales.items() if "stack" not in name}
    assert rest == {"embedding": 0.5**4, "ahead": 1.0, "norm": 1.0, "head": 1.0}


@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_layer_decay_is_lowest_before_the_stack_in_every_model(name: str) -> None:
    scales = learning_rate_scales((MODELS | OTHERS)[name].build(), 0.5, ())
    for parameter, scale in scales.items():
        if "stack.blocks." in parameter:
            assert scale < 1
        elif any(f".{part}" in f".{parameter}" for part in ("embedding", "input.", "position.", "widen.")):
            assert scale <= 0.25
        else:
            assert scale == 1


def test_each_stack_of_an_encoder_decoder_is_counted_on_its_own() -> None:
    model = transformer_2017(10, 8, 2, 16, 2).build(0)
    scales = learning_rate_scales(model, 0.5, ())
    for side in ("source", "target"):
        assert scales[f"{side}.stack.blocks.1.sublayers.0.body.q_proj.weight"] == 0.5
        assert scales[f"{side}.stack.blocks.0.sublayers.0.body.q_proj.weight"] == 0.25


def test_patterns_scale_the_learning_rate() -> None:
    model = SPEC.build(0)
    patterns = (LRScale("embedding*", 0.1), LRScale("*", 2.0))
    scales = learning_rate_scales(model, 1.0, patterns)
    assert scales["embedding.weight"] == pytest.approx(0.2) and scales["norm.weight"] == 2.0
    with pytest.raises(SpecError, match=r"lr_scales: 'embeding\*' matches no parameter; .*'embedding\.\*'"):
        learning_rate_scales(model, 1.0, (LRScale("embeding*", 0.1),))
    with pytest.raises(SpecError, match="scale=0.0 must be positive"):
        LRScale("embedding*", 0.0)


def test_lora_plus_is_a_larger_rate_of_b() -> None:
    """LoRA+ (Hayou et al. 2024) by `lr_scales`: the rates of PEFT's optimizer."""
    model = SPEC.build(0)
    add_lora(model, LoRA(rank=2))
    scales = learning_rate_scales(model, 1.0, (LRScale("*.lora_B.*", 16.0),))
    found = {n: group["lr"] for group in make_groups(model, 1e-3, 0.0, scales) for n, _ in group["params"]}
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert found == {name: rates[p] for name, p in model.named_parameters() if p.requires_grad}
    assert set(found.values()) == {1e-3, 16e-3}


def test_frozen_parameters_match_a_pattern() -> None:
    model = SPEC.build(0)
    freeze(model, ("embedding*", "stack.blocks.0.*"))
    for name, p in model.named_parameters():
        assert p.requires_grad != name.startswith(("embedding", "stack.blocks.0.")), name
    with pytest.raises(SpecError, match=r"freeze: 'layers\.0\.\*' matches no parameter; .*'stack\.blocks\.0\."):
        freeze(model, ("layers.0.*",))
    with pytest.raises(SpecError, match=r"'embedding\*', 'stack\*', 'norm\*'"):
        freeze(model, ("xyz",))


def test_training_applies_rates_and_freezes_layers(tmp_path: Path) -> None:
    rate = {"layer_decay": 0.5, "lr_scales": (LRScale("norm*", 0.25),), "freeze": ("embedding*",), "clip": 0.0}
    settings = replace(SETTINGS, steps=1, optimizer=SGD(momentum=0.0), **rate)
    plain = replace(settings, layer_decay=1.0, lr_scales=(), freeze=())
    start = {name: p.detach().clone() for name, p in SPEC.build(settings.seed).named_parameters()}
    changes = []
    for name, chosen in (("plain", plain), ("scaled", settings)):
        run = trainer(tmp_path / name, chosen, sample=None)
        run.train()
        changes.append({n: p.detach() - start[n] for n, p in run.model.named_parameters()})
    for name, change in changes[0].items():
        scale = 0.25 if name == "norm.weight" else 0.25 if "blocks.0" in name else 0.5
        expected = torch.zeros_like(change) if name == "embedding.weight" else scale * change
        assert torch.allclose(changes[1][name], expected, rtol=1e-3, atol=2e-7), name
