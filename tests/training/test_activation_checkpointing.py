"""Activation checkpointing: modules run again in the backward; losses and gradients are bit-identical."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.presets import bert, transformer_2017
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.spec import SpecError
from regard.training.activation_checkpointing import checkpoint_activations
from regard.training.optimizer import AdamW
from regard.training.step import take_step
from tests.laws import random_ids
from tests.training.tiny import SETTINGS, SPEC, curve, loader, trainer

EXPERTS = Decoder(
    31, 16, (Repeat((Block((Sublayer(Attention(2)), Sublayer(Experts(4, 2, SwiGLU(24)))), dropout=0.1),), 2),)
)
MODELS: dict[str, tuple[Model, tuple]] = {
    "decoder": (SPEC, (random_ids(2, 9),)),
    "experts": (EXPERTS, (random_ids(2, 9),)),
    "encoder": (bert(vocab=31, width=16, heads=2, hidden=24, layers=2, length=16), (random_ids(2, 9),)),
    "encoder-decoder": (transformer_2017(31, 16, 2, 24, 2), (random_ids(2, 7), random_ids(2, 5))),
}


def loss_and_gradients(model: nn.Module, run: Callable, inputs: tuple) -> list[torch.Tensor]:
    torch.manual_seed(3)  # of dropout
    model.zero_grad()
    out = run(*inputs)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("pattern", ["*stack.blocks.*", "*.sublayers.*.body", "*stack.blocks.1"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_bit_identical(name: str, pattern: str) -> None:
    spec, inputs = MODELS[name]
    plain, model = (spec.build(0).double().train() for _ in range(2))
    names = checkpoint_activations(model, [pattern])
    calls = [0] * len(names)
    for i, module in enumerate(map(model.get_submodule, names)):
        inner = next(child for child in module.modules() if not list(child.children()))

        def count(module, arguments, i=i):
            calls[i] += 1

        inner.register_forward_pre_hook(count)
    expected = loss_and_gradients(plain, plain, inputs)
    results = loss_and_gradients(model, model, inputs)
    assert len(results) == len(expected) and all(map(torch.equal, results, expected))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert max(calls) >= 2
    calls[:] = [0] * len(calls)
    with torch.no_grad():
        model(*inputs)
    assert max(calls) == 1


def test_auxiliary_losses_are_counted_once() -> None:
    plain, model = (EXPERTS.build(0) for _ in range(2))
    checkpoint_activations(model, ["stack.blocks.*"])
    batch = next(loader())
    batch = type(batch)(**{**batch, "tokens": batch.tokens % 31, "targets": batch.targets % 31})
    values = []
    for built in (plain, model):
        torch.manual_seed(0)
        values.append(take_step(built, next_token, batch, AdamW().build(built, 1e-2)))
    assert values[0] == values[1] and len(values[0]) > 3
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_the_outer_of_two_matching_modules_is_checkpointed_once() -> None:
    model = SPEC.build(0)
    assert checkpoint_activations(model, ["stack.blocks*", "*.body"]) == ["stack.blocks.0", "stack.blocks.1"]
    forward = model.stack.blocks[0].forward
    assert checkpoint_activations(model, ["stack.blocks.0"]) == ["stack.blocks.0"]
    assert model.stack.blocks[0].forward is forward
    with pytest.raises(SpecError, match=r"checkpoint_activations: 'layers.\*' matches no module; names"):
        checkpoint_activations(model, ["layers.*"])


def test_a_run_has_the_same_curve(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=4, accumulate=2)
    checkpointed = replace(settings, checkpoint_activations=("stack.blocks.*",))
    trainer(tmp_path / "plain", settings).train()
    trainer(tmp_path / "checkpointed", checkpointed).train()
    assert curve(tmp_path / "plain") == curve(tmp_path / "checkpointed")


@pytest.mark.slow
def test_a_compiled_model_has_one_graph_and_the_same_gradients() -> None:
    """Dropout included, for which a compiled model draws other numbers than an eager one."""
    from regard.compat import share_derived_tensors

    share_derived_tensors()
    results = []
    for patterns in ([], ["stack.blocks.*"]):
        model = SPEC.build(0)
        checkpoint_activations(model, patterns)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        results.append(loss_and_gradients(model, compiled, (random_ids(2, 9),)))
    assert all(map(torch.equal, *results))
