"""Effects along direct paths equal those of residual streams computed by hand."""

import pytest
import torch
from torch import Tensor

from regard.lens import activation_patching, logit_difference, patch, path_patching, record
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.position.rope import Rope
from tests.lens.conftest import attention_block

BODY = "stack.blocks.{}.sublayers.0.body"
METRIC = logit_difference(3, 8)


def build(layers: int) -> DecoderModule:
    return Decoder(vocab=31, width=16, layers=(Repeat((attention_block(2, Rope()),), layers),)).build(seed=1).double()


@pytest.fixture
def inputs(ids) -> tuple[Tensor, Tensor]:
    corrupted = ids[0].clone()
    corrupted[3] = (corrupted[3] + 5) % 31
    return ids[0], corrupted


def head_change(model: DecoderModule, inputs: tuple[Tensor, Tensor], layer: int, head: int) -> Tensor:
    """(1, L, D): what the head writes in the clean run minus what it writes in the corrupted one."""
    outputs = []
    for ids in inputs:
        with record(model, f"{BODY.format(layer)}.z") as recorded:
            model(ids[None])
        z = torch.zeros_like(recorded[f"{BODY.format(layer)}.z"])
        z[:, head] = recorded[f"{BODY.format(layer)}.z"][:, head]
        outputs.append(z.transpose(1, 2).flatten(-2) @ model.get_submodule(BODY.format(layer)).o_proj.weight.T)
    return outputs[0] - outputs[1]


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
def test_the_path_to_the_logits_adds_the_change_to_the_last_residual_stream(inputs, layer: int) -> None:
    model = build(3)
    found = path_patching(model, *inputs, METRIC)
    with record(model, "stack.blocks.2") as recorded:
        corrupted = METRIC(model(inputs[1][None]))
    clean = METRIC(model(inputs[0][None]))
    for head in range(4):
        x = recorded["stack.blocks.2"] + head_change(model, inputs, layer, head)
        exact = (METRIC(model.logits(model.final_norm(x))) - corrupted) / (clean - corrupted)
        assert found.effects[f"{BODY.format(layer)}.z"][head].item() == pytest.approx(exact.item(), abs=1e-9)


@torch.no_grad()
def test_the_path_to_queries_changes_only_them(inputs) -> None:
    model, receiver = build(3), f"{BODY.format(2)}.q"
    found = path_patching(model, *inputs, METRIC, receiver)
    changed = head_change(model, inputs, 0, 1)
    with record(model, receiver) as recorded, patch(model, {"stack.blocks.1": lambda x: x + changed}):
        model(inputs[1][None])
    with patch(model, dict(recorded)):
        value = METRIC(model(inputs[1][None]))
    exact = (value - found.corrupted) / (found.clean - found.corrupted)
    assert exact.abs() > 1e-6
    assert found.effects[f"{BODY.format(0)}.z"][1].item() == pytest.approx(exact.item(), abs=1e-9)
    assert found.effects[f"{BODY.format(2)}.z"].abs().max() < 1e-12  # the queries do not depend on later heads


def test_without_layers_in_between_it_equals_activation_patching(inputs) -> None:
    block = attention_block(2, Rope())
    model = Decoder(vocab=31, width=16, layers=(Repeat((type(block)(block.sublayers[:1]),)),)).build(seed=1).double()
    done: list[tuple[int, int]] = []
    paths = path_patching(model, *inputs, METRIC, progress=lambda *counts: done.append(counts))
    whole = activation_patching(model, *inputs, METRIC, "*.body.z", by="head")
    assert torch.allclose(paths.matrix, whole.matrix) and done == [(0, 1)]
