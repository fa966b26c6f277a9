"""Recorded, patched and differentiated activations equal plain hooks on models of `transformers`: GPT-2 and Llama."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from regard.lens import patch, record
from tests.laws import error
from tests.lens.their_hooks import IDS, LIMIT, blocks, edited_input, inputs_of, last_projection, their_softmax

if TYPE_CHECKING:
    from tests.families.pairs import Pair  # imports transformers, which takes seconds


@pytest.mark.ledger("lens.maps")
@torch.no_grad()
def test_recorded_activations_equal_theirs(pair: "Pair") -> None:
    with their_softmax() as theirs, inputs_of(map(last_projection, blocks(pair.theirs))) as neurons:
        states = pair.theirs(IDS, output_hidden_states=True).hidden_states
    with record(pair.ours, ["stack.blocks.?", "*.body.?*"]) as ours:
        pair.ours(IDS)
    allowed = torch.ones(13, 13, dtype=torch.bool).tril()
    assert len(theirs.patterns) == len(neurons) == len(blocks(pair.theirs))
    for layer, pattern in enumerate(theirs.patterns):
        attention, feed_forward = (f"stack.blocks.{layer}.sublayers.{i}.body" for i in (0, 1))
        assert error(ours[f"{attention}.pattern"], pattern) <= LIMIT
        scores = ours[f"{attention}.scores"]
        assert error(scores[..., allowed], theirs.scores[layer][..., allowed]) <= LIMIT
        assert (scores[..., ~allowed] == -torch.inf).all()
        assert error(ours[f"{feed_forward}.neurons"], neurons[layer]) <= LIMIT
        if layer + 1 < len(neurons):  # the last hidden state of transformers is normalized
            assert error(ours[f"stack.blocks.{layer}"], states[layer + 1]) <= LIMIT


@pytest.mark.ledger("lens.patching")
@torch.no_grad()
def test_patched_patterns_and_neurons_give_their_logits(pair: "Pair") -> None:
    def edit_pattern(pattern: Tensor) -> Tensor:
        """Head 1 attends only to the token itself, and the other heads half as much."""
        return torch.stack(
            [torch.eye(13).expand_as(head) if h == 1 else head / 2 for h, head in enumerate(pattern.unbind(1))], 1
        )

    with their_softmax(edit_pattern):
        theirs = pair.theirs(IDS).logits
    with patch(pair.ours, {"*.body.pattern": edit_pattern}):
        assert error(pair.ours(IDS), theirs) <= LIMIT
    assert error(pair.ours(IDS), theirs) > 0.01

    unused = torch.tensor([0, 5, 7])
    with edited_input(last_projection(blocks(pair.theirs)[1]), lambda h: h.index_fill(-1, unused, 0.0)):
        theirs = pair.theirs(IDS).logits
    with patch(pair.ours, {"stack.blocks.1.sublayers.1.body.neurons": lambda h: h.index_fill(-1, unused, 0.0)}):
        assert error(pair.ours(IDS), theirs) <= LIMIT


def test_gradients_of_recorded_patterns_and_scores_equal_theirs(pair: "Pair") -> None:
    def value(logits: Tensor) -> Tensor:
        return (logits[:, -1, 3] - logits[:, -1, 8]).sum()

    with their_softmax() as theirs:
        expected = torch.autograd.grad(value(pair.theirs(IDS).logits), [*theirs.patterns, *theirs.scores])
    with record(pair.ours, ["*.body.pattern", "*.body.scores"], grad=True) as ours:
        logits = pair.ours(IDS)
    for kind, of_layers in zip(("pattern", "scores"), torch.arange(len(expected)).chunk(2), strict=True):
        tensors = [tensor for name, tensor in ours.items() if name.endswith(kind)]
        found = torch.autograd.grad(value(logits), tensors, retain_graph=True)
        for gradient, i in zip(found, of_layers.tolist(), strict=True):
            assert error(gradient, expected[i]) <= LIMIT
            assert expected[i].abs().max() > 1e-3
