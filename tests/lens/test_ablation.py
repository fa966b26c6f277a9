"""Ablated heads, neurons and layers equal plain hooks on `transformers`; errors name the valid indices."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.longformer import Longformer
from regard.lens import ablate, patch, record
from regard.lens.expert_neurons import ExpertNeurons
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.global_attention import GlobalAttention
from regard.parts.input import Tokens
from tests.laws import MODELS, OTHERS, build, error, random_ids
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
    for neurons, message in [
        ([(0, 0)], "has 0 feed-forward layers.* of experts give"),
        ([(0, 4, 0)], "no expert 4; choose 0 to 3"),
        ([(1, 0, 0)], "no layer 1"),
        ([(0, 0, 8)], "no neuron 8; choose 0 to 7"),
        ([(0,)], "neither .layer, index. nor"),
    ]:
        with pytest.raises(ValueError, match=message), ablate(experts, neurons=neurons):
            experts(torch.tensor([[1, 2]]))


@torch.no_grad()
@pytest.mark.parametrize("mean", [False, True])
def test_a_removed_neuron_of_an_expert_equals_a_changed_weight(mean: bool) -> None:
    """Without the neuron, its column of the last matrix of that expert has no effect; its mean adds a constant."""
    spec = Decoder(97, 16, (Repeat((Block((Sublayer(Attention(2)), Sublayer(Experts(4, 2, SwiGLU(8))))),), 2),))
    model = spec.build(seed=0).double().eval()
    experts = model.stack.blocks[1].sublayers[1].body.experts
    with ablate(model, neurons=[(1, 2, 5), (1, 0, 3)], mean_over=OTHER_IDS if mean else None):
        found = model(IDS)
    if not mean:
        for expert, neuron in ((2, 5), (0, 3)):
            experts.down_proj.weight[expert, :, neuron] = 0
        assert error(found, model(IDS)) <= 1e-12
        return
    rows = []
    handle = experts.register_forward_pre_hook(lambda _, args, kwargs: rows.append(kwargs["ends"][0]), with_kwargs=True)
    with record(model, "stack.blocks.1.*.experts.neurons") as recorded:
        model(OTHER_IDS)
    handle.remove()
    (h,), bounds = recorded.values(), [0, *rows[0].tolist()]
    weight = experts.down_proj.weight
    bias = torch.zeros(4, 16, dtype=torch.float64)
    for expert, neuron in ((2, 5), (0, 3)):
        bias[expert] = weight[expert, :, neuron] * h[bounds[expert] : bounds[expert + 1], neuron].mean()
        weight[expert, :, neuron] = 0
    experts.down_proj.bias = torch.nn.Parameter(bias)
    assert error(found, model(IDS)) <= 1e-12


def test_means_of_bfloat16_neurons_are_summed_in_float32() -> None:
    """A bfloat16 sum of ones stops at 256."""
    model = Decoder(9, 8, (Repeat((Block((Sublayer(Experts(2, 1, SwiGLU(4))),)),)),)).build(seed=0)
    module = model.stack.blocks[0].sublayers[0].body.experts
    module.forward = lambda x, ends: module.neurons(x)
    neurons = ExpertNeurons("", model.stack.blocks, [(0, 1, 2)])
    ones, ends = torch.ones(1000, 4, dtype=torch.bfloat16), torch.tensor([100, 1000])
    with neurons.averaging():
        module(ones, ends=(ends,))
    with neurons.removed():
        replaced = module(2 * ones, ends=(ends,))
    assert replaced.dtype == torch.bfloat16 and replaced[100:, 2].unique().tolist() == [1]
    assert replaced[:100].unique().tolist() == replaced[:, 3].unique().tolist() == [2]


@torch.no_grad()
def test_heads_and_layers_of_an_encoder_decoder_are_ablated() -> None:
    model, source, ids = build(OTHERS["encoder-decoder"]), random_ids(2, 7, seed=3), random_ids(2, 5)
    expected = model(source, ids)
    with pytest.raises(ValueError, match="choose stack='source' or stack='target'"), ablate(model, heads=[(0, 0)]):
        pass
    with pytest.raises(ValueError, match="stack='encoder' is not a stack"), ablate(model, stack="encoder"):
        pass
    cross = "target.stack.blocks.1.sublayers.1.body.z"
    for mean_over in (None, (source.flip(0, 1), ids)):
        with record(model, cross) as recorded:
            model(*(mean_over or (source, ids)))
        value = 0.0 if mean_over is None else recorded[cross].mean((0, 2), keepdim=True)[:, 3]
        with patch(model, {cross: lambda z, value=value: z.index_copy(1, torch.tensor([3]), 0 * z[:, 3:] + value)}):
            changed = model(source, ids)
        with ablate(model, heads=[(1, 3)], stack="target", to_source=True, mean_over=mean_over):
            assert error(model(source, ids), changed) <= 1e-12
        assert error(changed, expected) > 1e-3
    with ablate(model, heads=[(0, 1)], layers=[1], stack="source"), record(model, "source.stack.blocks.?") as recorded:
        model(source, ids)
    assert torch.equal(recorded["source.stack.blocks.1"], recorded["source.stack.blocks.0"])


@torch.no_grad()
def test_heads_of_linear_attention_are_ablated_and_channels_are_not_heads() -> None:
    model = build(MODELS["linear"])
    with ablate(model, heads=[(0, h) for h in range(4)]), record(model, "stack.blocks.0.sublayers.0.body") as recorded:
        model(random_ids(1, 5))
    assert recorded["stack.blocks.0.sublayers.0.body"].count_nonzero() == 0
    with pytest.raises(ValueError, match=r"Mamba. has no heads.*body.z"), ablate(build(MODELS["mamba"]), [(0, 0)]):
        pass
