"""Ablated heads, neurons and layers equal plain hooks on `transformers`; errors name the valid indices."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.lens import ablate, record
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from tests.laws import error
from tests.lens.their_hooks import IDS, LIMIT, blocks, edited_input, head_projection, last_projection

if TYPE_CHECKING:
    from tests.families.pairs import Pair  # imports transformers, which takes seconds

OTHER_IDS = IDS.flip(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("mean", [False, True])
def test_ablated_heads_and_neurons_equal_plain_hooks(pair: "Pair", mean: bool) -> None:
    """Heads 1 and 2 of layer 1, head 0 of layer 0, and neuron 9 of layer 1."""
    heads, theirs = pair.ours.stack.blocks[0].sublayers[0].body.heads, blocks(pair.theirs)

    def set_to(x: Tensor, means: Tensor, columns: list[int]) -> Tensor:
        new = x.clone()
        new[..., columns] = means[columns] if mean else 0.0
        return new

    def columns(module: torch.nn.Module, *numbers: int) -> list[int]:
        size = means[module].shape[0] // heads
        return [number * size + i for number in numbers for i in range(size)]

    places = [head_projection(theirs[0]), head_projection(theirs[1]), last_projection(theirs[1])]
    means, handles = {}, []
    for module in places:
        hook = lambda module, inputs: means.update({module: inputs[0].mean((0, 1))})  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook))
    pair.theirs(OTHER_IDS)
    for handle in handles:
        handle.remove()
    first, second, mlp = places
    with (
        edited_input(first, lambda x: set_to(x, means[first], columns(first, 0))),
        edited_input(second, lambda x: set_to(x, means[second], columns(second, 1, 2))),
        edited_input(mlp, lambda x: set_to(x, means[mlp], [9])),
    ):
        expected = pair.theirs(IDS).logits
    with ablate(pair.ours, [(1, 2), (0, 0), (1, 1)], [(1, 9)], mean_over=OTHER_IDS if mean else None):
        assert error(pair.ours(IDS), expected) <= LIMIT
    assert error(pair.ours(IDS), expected) > 0.01


@torch.no_grad()
def test_an_ablated_layer_returns_its_input(pair: "Pair") -> None:
    handle = blocks(pair.theirs)[1].register_forward_hook(
        lambda _, args, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
    )
    expected = pair.theirs(IDS).logits
    handle.remove()
    with ablate(pair.ours, layers=[1]):
        assert error(pair.ours(IDS), expected) <= LIMIT


@torch.no_grad()
def test_heads_of_global_tokens_are_ablated_too() -> None:
    layers = (Repeat((Block((Sublayer(GlobalAttention(2, mask=Longformer(2))),)),)),)
    model = Encoder(Tokens(97), 16, layers).build(seed=0).eval()
    with ablate(model, heads=[(0, 0), (0, 1)]), record(model, "*.body") as recorded:
        model(IDS)
    assert all(output.count_nonzero() == 0 for output in recorded.values())


def test_unknown_heads_neurons_and_layers_are_refused(make_model) -> None:
    model = make_model()
    for options, message in [
        ({"heads": [(0, 4)]}, "no head in layer 0: 4; choose 0 to 3"),
        ({"heads": [(1, 0)]}, "no head in layer 1: 0; there are none"),
        ({"heads": [(3, 0)]}, "no layer 3; choose 0 to 2"),
        ({"neurons": [(0, 24)]}, "no channel in .*neurons: 24; choose 0 to 23"),
        ({"layers": [-1]}, "no layer -1"),
    ]:
        with pytest.raises(ValueError, match=message), ablate(model, **options):
            model(torch.tensor([[1, 2]]))
    body = Experts(4, 2, SwiGLU(8))
    experts = Encoder(Tokens(9), 16, (Repeat((Block((Sublayer(Attention(2, mask=Full())), Sublayer(body))),)),)).build()
    with pytest.raises(ValueError, match="has 0 feed-forward layers"), ablate(experts, neurons=[(0, 0)]):
        pass
