"""Recurrent mixers equal torch's stacked layers; any length, adapters, FLOPs, weights and clipped gradients."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from regard.adapt import LoRA, add_lora
from regard.data.batch import Batch
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, Stack
from regard.objectives.next_token import next_token
from regard.parts.bidirectional import Bidirectional
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.norm import NoNorm
from regard.parts.recurrent import GRU, LSTM, RNN, RecurrentCell, RecurrentMixer
from regard.parts.state import FinalState
from regard.planning.parameters import count_parameters
from regard.spec import Spec, SpecError
from regard.training.step import take_step
from tests.laws import build, error, layout_with_padding

WIDTH = 6
KINDS = {"rnn": (RNN(), nn.RNN), "lstm": (LSTM(), nn.LSTM), "gru": (GRU(), nn.GRU)}


def without_residuals(*bodies: Body) -> tuple[Repeat, ...]:
    """Layers without norms and residual connections."""
    return (Repeat(tuple(Block((Sublayer(body, NoNorm()),), keep=0.0) for body in bodies)),)


@torch.no_grad()
def copy_weights(ours: RecurrentCell, theirs: nn.RNNBase, layer: str) -> None:
    w_x, w_h, b_x, b_h = (
        getattr(theirs, f"{name}_{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    if isinstance(theirs, nn.GRU):  # its z is our 1 - z; the second bias of n is inside the reset gate
        sign = torch.ones(3, 1, ours.size).double()
        sign[1] = -1
        signs = sign.flatten()
        ours.x_proj.weight.copy_(w_x * signs.unsqueeze(-1))
        ours.h_proj.weight.copy_((w_h * signs.unsqueeze(-1))[: 2 * ours.size])
        ours.n_proj.weight.copy_(w_h[2 * ours.size :])
        ours.n_proj.bias.copy_(b_h[2 * ours.size :])
        hidden_bias = torch.cat([b_h[: 2 * ours.size], torch.zeros_like(b_h[2 * ours.size :])])
        ours.bias.copy_((b_x + hidden_bias) * signs)
    else:
        ours.x_proj.weight.copy_(w_x)
        ours.h_proj.weight.copy_(w_h)
        ours.bias.copy_(b_x + b_h)


@pytest.mark.ledger("anc.rnn.cell", "anc.lstm.cell", "anc.gru.cell")
@pytest.mark.parametrize("name", KINDS)
def test_a_stack_equals_torch(name: str) -> None:
    """Three layers: outputs and final states of all layers, and outputs of a padded batch."""
    torch.manual_seed(0)
    spec, torch_class = KINDS[name]
    theirs = torch_class(WIDTH, WIDTH, 3, batch_first=True).double()
    stack = Stack(without_residuals(spec, spec, spec), WIDTH).double()
    for i, block in enumerate(stack.blocks):
        copy_weights(block.sublayers[0].body.recurrence, theirs, f"l{i}")
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    final_states = tuple((FinalState(),) for _ in range(3))
    outputs, _ = stack(x, TokenLayout.whole(2, 9), final_states)
    expected, their_states = theirs(x)
    assert error(outputs, expected) <= 1e-14
    for i, (final_state,) in enumerate(final_states):
        for state, expected_state in zip(
            final_state.arrays.values(),
            their_states if isinstance(their_states, tuple) else (their_states,),
            strict=True,
        ):
            assert error(state, expected_state[i]) <= 1e-14
    padded_outputs, _ = stack(x, layout_with_padding([9, 4], 9))
    assert error(padded_outputs[1, :4], theirs(x[1:, :4])[0][0]) <= 1e-14


@pytest.mark.parametrize("name", KINDS)
def test_bidirectional_equals_torch(name: str) -> None:
    torch.manual_seed(0)
    spec, torch_class = KINDS[name]
    theirs = torch_class(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True).double()
    ours = Bidirectional(spec).build(WIDTH).double()
    copy_weights(ours.ahead, theirs, "l0")
    copy_weights(ours.back, theirs, "l0_reverse")
    x, final_state = torch.randn(2, 7, WIDTH, dtype=torch.float64), FinalState()
    expected, their_states = theirs(x)
    assert error(ours(x, TokenLayout.whole(2, 7), final_state), expected) <= 1e-14
    for state, expected_state in zip(
        final_state.arrays.values(), their_states if isinstance(their_states, tuple) else (their_states,), strict=True
    ):
        assert error(state, torch.cat([expected_state[0], expected_state[1]], -1)) <= 1e-14
    for left in (False, True):
        layout = layout_with_padding([7, 3], 7, left)
        padded = x.clone()
        padded[1, layout.valid[1]] = x[1, :3]
        assert error(ours(padded, layout)[1, layout.valid[1]], theirs(x[1:, :3])[0][0]) <= 1e-14


@pytest.mark.ledger("anc.rnn.shared")
def test_the_same_weights_apply_to_any_length() -> None:
    spec = Decoder(11, WIDTH, without_residuals(RNN()))
    model = build(spec)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(11, (1, 1000), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    for length in (1, 2, 3, 10, 100, 1000):
        assert error(model(tokens[:, :length]), whole[:, :length]) <= 1e-12
        assert parameters == count_parameters(spec).total == sum(p.numel() for p in model.parameters())
    cell = model.stack.blocks[0].sublayers[0].body.recurrence
    embeddings = model.embed(tokens[:, :3])
    h = torch.zeros(1, WIDTH, dtype=torch.float64)
    for t in range(3):  # three applications of one step are h1, h2, h3
        (h,) = cell.step(cell.project_inputs(embeddings[:, t]), h)
        assert error(cell(embeddings, TokenLayout.whole(1, 3))[:, t], h) <= 1e-14


@pytest.mark.ledger("anc.gru.params")
def test_a_gru_has_three_quarters_of_the_weights_of_an_lstm() -> None:
    def count_weights(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    gru, lstm = count_weights(GRU(bias=False).build(512)), count_weights(LSTM(bias=False).build(512))
    assert gru == 1_572_864 == count_weights(nn.GRU(512, 512, bias=False))
    assert lstm == 2_097_152 == count_weights(nn.LSTM(512, 512, bias=False))
    assert gru * 4 == lstm * 3


def test_the_initial_forget_bias_is_one() -> None:
    model = Decoder(11, WIDTH, without_residuals(LSTM())).build(seed=0)
    bias = model.stack.blocks[0].sublayers[0].body.recurrence.bias
    assert bias.chunk(4)[1].tolist() == [1.0] * WIDTH and bias.sum() == WIDTH


@pytest.mark.parametrize("spec", [RNN(), LSTM(), GRU(), GRU(reset="before")], ids=str)
def test_adapted_projections_change_the_output(spec: RecurrentMixer) -> None:
    """LoRA on any projection has an effect, although the fused operation has weights as arguments, not modules."""
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    for target in [name for name, module in spec.build(WIDTH).recurrence.named_children()]:
        torch.manual_seed(0)
        module = spec.build(WIDTH)
        without_adapter = module(x, TokenLayout.whole(1, 5))
        add_lora(module, LoRA(rank=2, targets=(target,)))
        assert error(module(x, TokenLayout.whole(1, 5)), without_adapter) <= 1e-6
        with torch.no_grad():
            getattr(module.recurrence, target).lora_B.default.weight.normal_()
        assert error(module(x, TokenLayout.whole(1, 5)), without_adapter) > 1e-2


@pytest.mark.parametrize("make", [lambda: LSTM(0), lambda: RNN(activation="gelu"), lambda: GRU(reset="never")])
def test_invalid_specs_are_refused(make) -> None:
    with pytest.raises(SpecError):
        make()


def test_bidirectional_is_refused_in_a_decoder() -> None:
    with pytest.raises(SpecError, match="attend to later ones"):
        Decoder(11, WIDTH, without_residuals(Bidirectional(LSTM())))
    with pytest.raises(SpecError, match="width=\\d+ is odd"):
        Bidirectional(LSTM()).build(5)


@pytest.mark.parametrize("spec", [RNN(4), LSTM(), GRU(9), Bidirectional(GRU(5))], ids=str)
def test_flops_equal_those_of_the_matrix_products(spec: Spec) -> None:
    """Every weight matrix is used once per token."""
    weights = sum(p.numel() for p in spec.build(WIDTH).parameters() if p.dim() == 2)
    assert spec.flops(WIDTH, tokens=3, keys=3) == 2 * 3 * weights


@pytest.mark.ledger("anc.rnn.clip")
def test_clipping_an_exploding_gradient_keeps_its_direction_and_the_model_learns() -> None:
    """The gradient passes 40 steps of a matrix with norm above 1; with clipping the loss still decreases."""
    layers = without_residuals(RNN(activation="relu"))
    model = Decoder(11, WIDTH, layers, norm=NoNorm(), tied=False).build(seed=0).double()
    with torch.no_grad():
        model.stack.blocks[0].sublayers[0].body.recurrence.h_proj.weight.copy_(1.2 * torch.eye(WIDTH))
    tokens = torch.randint(11, (4, 41), generator=torch.Generator().manual_seed(0))
    layout = TokenLayout.whole(4, 40)
    batch = Batch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=torch.ones(4, 40, dtype=torch.float64),
        positions=layout.positions, segments=torch.zeros_like(layout.positions),
    )  # fmt: skip

    def update(clip: float) -> tuple[torch.Tensor, dict[str, float]]:
        copied = deepcopy(model)
        before = nn.utils.parameters_to_vector(copied.parameters()).clone()
        metrics = take_step(copied, next_token, batch, torch.optim.SGD(copied.parameters(), lr=1.0), clip)
        return nn.utils.parameters_to_vector(copied.parameters()) - before, metrics

    unclipped, metrics = update(0.0)
    clipped, _ = update(1.0)
    assert metrics["grad_norm"] > 1e3 and abs(unclipped.norm().item() / metrics["grad_norm"] - 1) <= 1e-12
    assert error(clipped, unclipped / metrics["grad_norm"]) <= 1e-12
    assert error(update(1e9)[0], unclipped) <= 1e-12
    losses = [
        take_step(model, next_token, batch, torch.optim.SGD(model.parameters(), lr=0.05), 1.0)["loss"]
        for _ in range(60)
    ]
    assert losses[0] > 10 and losses[-1] < 3
