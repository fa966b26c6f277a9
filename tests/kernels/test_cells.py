"""Recurrent cells: steps and fused forms equal each other and PyTorch's cells, for packed and padded rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.kernels.recurrent.cells import CellStates, document_starts, unroll
from regard.kernels.recurrent.cells.documents import pack_documents, run_packed, split_documents
from regard.layout import TokenLayout
from regard.parts.recurrent import GRU, LSTM, RNN, RecurrentCell, RecurrentMixer
from regard.verification.trial import randomize_weights
from tests.laws import error

CELLS = {"rnn": RNN(), "relu": RNN(activation="relu"), "lstm": LSTM(), "gru": GRU(), "lstm, no bias": LSTM(bias=False)}
WIDTH, SIZE = 5, 7


def build_cell(spec: RecurrentMixer, width: int = WIDTH, size: int = SIZE) -> RecurrentCell:
    module = spec.cell(width, size).double()
    randomize_weights(module, seed=3)
    return module


def run_loop(module: RecurrentCell, x: Tensor, initial: CellStates, layout: TokenLayout) -> tuple[Tensor, CellStates]:
    return unroll(module.step, module.project_inputs(x), initial, layout.segments, layout.valid)


def draw(module: RecurrentCell, batch: int, length: int) -> tuple[Tensor, CellStates]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, tuple(torch.rand(batch, SIZE, generator=generator, dtype=torch.float64) for _ in module.states)


def assert_close(
    found: tuple[Tensor, CellStates], expected: tuple[Tensor, CellStates], valid: Tensor | None = None
) -> None:
    outputs, expected_outputs = (out if valid is None else out[valid] for out in (found[0], expected[0]))
    assert error(outputs, expected_outputs) <= 1e-12
    for state, expected_state in zip(found[1], expected[1], strict=True):
        assert error(state, expected_state) <= 1e-12


@pytest.mark.parametrize("name", CELLS)
def test_fused_equals_the_loop(name: str) -> None:
    module = build_cell(CELLS[name])
    x, initial = draw(module, 3, 11)
    assert_close(module.fused(x, None, initial), run_loop(module, x, initial, TokenLayout.whole(3, 11)))


DOCUMENTS = torch.tensor(  # the document of each token; -1 is padding
    [[0, 0, 0, 1, 1, 2, 2, 2, 2, -1, -1], [-1, -1, 4, 4, 4, 4, 4, 4, 4, 4, 4], [0, 1, -1, 1, 2, 2, 3, 3, 3, 3, 3]]
)
LAYOUTS = {
    "packed": TokenLayout(torch.zeros_like(DOCUMENTS), DOCUMENTS.clamp_min(0).cummax(1).values),
    "padded left, right, inside": TokenLayout(torch.zeros_like(DOCUMENTS), valid=DOCUMENTS >= 0),
    "packed and padded": TokenLayout(torch.zeros_like(DOCUMENTS), DOCUMENTS, DOCUMENTS >= 0),
    "a row without tokens": TokenLayout(
        torch.zeros_like(DOCUMENTS), valid=(DOCUMENTS >= 0) & torch.tensor([[True], [False], [True]])
    ),
    "no tokens": TokenLayout(torch.zeros_like(DOCUMENTS), valid=DOCUMENTS > 99),
}


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", CELLS)
def test_packed_documents_equal_the_loop(name: str, layout_name: str) -> None:
    module, layout = build_cell(CELLS[name]), LAYOUTS[layout_name]
    x, initial = draw(module, *DOCUMENTS.shape)
    packed = run_packed(module.fused, x, initial, pack_documents(layout))
    assert_close(packed, run_loop(module, x, initial, layout), layout.valid)


@pytest.mark.parametrize("name", CELLS)
def test_packed_gradients_equal_those_of_the_loop(name: str) -> None:
    module, layout = build_cell(CELLS[name]), LAYOUTS["packed and padded"]
    x, initial = draw(module, *DOCUMENTS.shape)
    x.requires_grad_()
    leaves = [x, *initial, *module.parameters()]
    for array in initial:
        array.requires_grad_()
    packed = run_packed(module.fused, x, initial, pack_documents(layout))
    gradients = []
    for outputs, states in (packed, run_loop(module, x, initial, layout)):
        loss = outputs.where(layout.valid.unsqueeze(-1), 0.0).sin().sum() + sum(state.sin().sum() for state in states)
        gradients.append(torch.autograd.grad(loss, leaves))
    for packed_gradient, loop_gradient in zip(*gradients, strict=True):
        assert (packed_gradient - loop_gradient).abs().max() <= 1e-11


def test_loop_equals_each_document_alone() -> None:
    layout, (x, _) = LAYOUTS["packed and padded"], draw(build_cell(LSTM()), *DOCUMENTS.shape)
    module = build_cell(LSTM())
    zeros = tuple(torch.zeros(3, SIZE, dtype=torch.float64) for _ in range(2))
    outputs, _ = run_loop(module, x, zeros, layout)
    for row in range(3):
        for document in DOCUMENTS[row].unique():
            if document >= 0:
                in_document = document == DOCUMENTS[row]
                alone, _ = run_loop(
                    module,
                    x[row, in_document][None],
                    tuple(z[:1] for z in zeros),
                    TokenLayout.whole(1, int(in_document.sum())),
                )
                assert (outputs[row, in_document] - alone[0]).abs().max() <= 1e-15
    assert document_starts(DOCUMENTS, DOCUMENTS >= 0)[2].nonzero().flatten().tolist() == [1, 4, 6]


def test_split_documents_merge_back() -> None:
    layout = LAYOUTS["packed and padded"]
    documents, document_layout = split_documents(layout)
    assert documents.rows.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert document_layout.valid.sum(1).tolist() == [3, 2, 4, 9, 1, 2, 2, 5]
    x = torch.randn(*DOCUMENTS.shape, 2)
    assert torch.equal(documents.merge(documents.split(x)), x * (DOCUMENTS >= 0).unsqueeze(-1))


def copy_weights(theirs: nn.RNNBase, ours: RecurrentCell, convert: Callable[[Tensor], Tensor]) -> None:
    """Copies the weights of PyTorch's module, which has one layer; the sum of its two biases is our bias."""
    with torch.no_grad():
        size = ours.size
        ours.x_proj.weight.copy_(convert(theirs.weight_ih_l0))
        if isinstance(theirs, nn.GRU):
            ours.h_proj.weight.copy_(convert(theirs.weight_hh_l0)[: 2 * size])
            ours.n_proj.weight.copy_(theirs.weight_hh_l0[2 * size :])
            recurrent_bias, n = theirs.bias_hh_l0.clone(), theirs.bias_hh_l0[2 * size :]
            recurrent_bias[2 * size :] = 0
            ours.bias.copy_(convert(theirs.bias_ih_l0 + recurrent_bias))
            ours.n_proj.bias.copy_(n)
        else:
            ours.h_proj.weight.copy_(theirs.weight_hh_l0)
            ours.bias.copy_(theirs.bias_ih_l0 + theirs.bias_hh_l0)


def negate_z(weight: Tensor) -> Tensor:
    """PyTorch's z is our 1 - z."""
    r, z, n = weight.chunk(3)
    return torch.cat([r, -z, n])


TORCH_CELLS = {
    "rnn": (RNN(), nn.RNN, lambda w: w),
    "lstm": (LSTM(), nn.LSTM, lambda w: w),
    "gru": (GRU(), nn.GRU, negate_z),
}


@pytest.mark.ledger("anc.rnn.cell", "anc.lstm.cell", "anc.gru.cell")
@pytest.mark.parametrize("name", TORCH_CELLS)
def test_cells_equal_those_of_pytorch(name: str) -> None:
    """Outputs, last states and input gradients of the loop and of the fused form, with copied weights."""
    torch.manual_seed(0)
    spec, torch_class, convert = TORCH_CELLS[name]
    theirs, ours = torch_class(WIDTH, SIZE, batch_first=True).double(), build_cell(spec)
    copy_weights(theirs, ours, convert)
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    expected, last_states = theirs(x)
    last_states = last_states if isinstance(last_states, tuple) else (last_states,)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    zeros = tuple(torch.zeros(2, SIZE, dtype=torch.float64) for _ in ours.states)
    for outputs, states in (ours.fused(x, None, zeros), run_loop(ours, x, zeros, TokenLayout.whole(2, 13))):
        assert (outputs - expected).abs().max() <= 1e-13
        for state, expected_state in zip(states, last_states, strict=True):
            assert (state - expected_state[0]).abs().max() <= 1e-13
        assert (torch.autograd.grad(outputs.square().sum(), x)[0] - gradient).abs().max() <= 1e-12


@pytest.mark.ledger("anc.lstm.cell")
def test_lstm_equals_its_equations() -> None:
    """The equations have one matrix on [h, x] per gate and no biases."""
    torch.manual_seed(0)
    module = build_cell(LSTM(bias=False))
    w = torch.cat([module.h_proj.weight, module.x_proj.weight], 1).chunk(4)  # (F, F + D) each
    x, (h, c) = draw(module, 1, 6)
    outputs, _ = module.fused(x, None, (h, c))
    for t in range(6):
        hx = torch.cat([h[0], x[0, t]])
        i, f, o = torch.sigmoid(w[0] @ hx), torch.sigmoid(w[1] @ hx), torch.sigmoid(w[3] @ hx)
        c = f * c + i * torch.tanh(w[2] @ hx)
        h = o * torch.tanh(c)
        assert (outputs[0, t] - h[0]).abs().max() <= 1e-14


@pytest.mark.ledger("anc.gru.cell")
@pytest.mark.parametrize("reset", ["before", "after"])
def test_gru_equals_its_equations(reset: str) -> None:
    module = build_cell(GRU(bias=False, reset=reset))
    w = torch.cat([torch.cat([module.h_proj.weight, module.n_proj.weight]), module.x_proj.weight], 1).chunk(3)
    x, (h,) = draw(module, 1, 6)
    outputs, _ = module.run(x, (h,), TokenLayout.whole(1, 6))
    h = h[0]
    for t in range(6):
        r, z = (torch.sigmoid(gate @ torch.cat([h, x[0, t]])) for gate in w[:2])
        if reset == "before":
            n = torch.tanh(w[2] @ torch.cat([r * h, x[0, t]]))
        else:
            n = torch.tanh(r * (w[2][:, :SIZE] @ h) + w[2][:, SIZE:] @ x[0, t])
        h = (1 - z) * h + z * n
        assert (outputs[0, t] - h).abs().max() <= 1e-14


@pytest.mark.ledger("anc.rnn.bptt")
def test_gradient_through_time_is_a_product_of_jacobians() -> None:
    """From step 50 to step 1 there are 49 factors diag(1 - h²) W_h; the norm is at most the product of their norms."""
    module = build_cell(RNN())
    with torch.no_grad():
        module.h_proj.weight.mul_(0.6)
    x = torch.randn(1, 50, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    projected = module.project_inputs(x)
    (first,) = module.step(projected[:, 0], torch.zeros(1, SIZE, dtype=torch.float64))

    def last_state(h: Tensor) -> Tensor:
        return unroll(module.step, projected[:, 1:], (h.unsqueeze(0),))[1][0][0]

    jacobian = torch.autograd.functional.jacobian(last_state, first[0].detach())
    outputs, _ = unroll(module.step, projected[:, 1:], (first,))
    factors = [(1 - h.square()).unsqueeze(-1) * module.h_proj.weight for h in outputs[0]]
    assert len(factors) == 49
    product = torch.eye(SIZE, dtype=torch.float64)
    for factor in factors:
        product = factor @ product
    assert (jacobian - product).abs().max() <= 1e-12 * product.abs().max()
    norms = torch.stack([torch.linalg.matrix_norm(factor, 2) for factor in factors])
    assert torch.linalg.matrix_norm(jacobian, 2) <= norms.prod() * (1 + 1e-9)


@pytest.mark.ledger("anc.lstm.highway")
def test_open_forget_gates_carry_the_cell_unchanged() -> None:
    module = build_cell(LSTM())
    with torch.no_grad():
        module.x_proj.weight.zero_()
        module.h_proj.weight.zero_()
        module.bias.copy_(torch.cat([torch.full((SIZE,), value) for value in (-800.0, 40.0, 0.5, 0.0)]))
    x, (h, c) = draw(module, 2, 1000)
    _, (_, carried) = module.fused(x, None, (h, c))
    assert torch.equal(carried, c)  # sigmoid(40) rounds to 1, sigmoid(-800) to 0


@pytest.mark.ledger("anc.lstm.path")
def test_gradient_along_the_lstm_cell_is_the_product_of_forget_gates() -> None:
    """This holds if the gates are constants; the full gradient has more terms, because the gates depend on h."""
    module = build_cell(LSTM())
    x, (h, c) = draw(module, 1, 20)
    projected, forgets, cell, hidden = module.project_inputs(x), [], c.clone().requires_grad_(), h
    initial_cell = cell
    for t in range(20):
        i, f, g, o = (gate.detach() for gate in (projected[:, t] + module.h_proj(hidden)).chunk(4, -1))
        forgets.append(f.sigmoid())
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    (gradient,) = torch.autograd.grad(cell.sum(), initial_cell)
    product = torch.stack(forgets).prod(0)
    assert (gradient - product).abs().max() <= 1e-15
    c = c.clone().requires_grad_()
    (_, whole) = unroll(module.step, projected, (h, c))[1]
    assert (whole - cell).abs().max() <= 1e-14
    (full_gradient,) = torch.autograd.grad(whole.sum(), c)
    assert (full_gradient - product).abs().max() > 1e-3


@pytest.mark.ledger("anc.lstm.path")
def test_gradient_along_the_gru_state_is_the_product_of_one_minus_z() -> None:
    """This holds if the gates and the candidate n are constants."""
    module = build_cell(GRU())
    x, (h,) = draw(module, 1, 20)
    projected, retained = module.project_inputs(x), []
    initial_state = state = h.clone().requires_grad_()
    for t in range(20):
        gates, x_n = projected[:, t].tensor_split([2 * SIZE], -1)
        r, z = (gates + module.h_proj(state)).sigmoid().detach().chunk(2, -1)
        n = torch.tanh(x_n + r * module.n_proj(state)).detach()
        retained.append(1 - z)
        assert ((z > 0) & (z < 1)).all()
        state = (1 - z) * state + z * n
    (gradient,) = torch.autograd.grad(state.sum(), initial_state)
    assert (gradient - torch.stack(retained).prod(0)).abs().max() <= 1e-15
    assert (state - unroll(module.step, projected, (h,))[1][0]).abs().max() <= 1e-14
