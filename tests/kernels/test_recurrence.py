"""Steps against torch's cells, the fused and the plain form against each other, in every cut and packing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.kernels.recurrent.cells import CellStates, document_starts, unroll
from regard.kernels.recurrent.cells.documents import pack_documents, run_packed, split_documents
from regard.layout import TokenLayout
from regard.parts.recurrent import GRU, LSTM, RNN, RecurrentCell, RecurrentMixer
from regard.verification.trial import draw_wide
from tests.laws import error

CELLS = {"rnn": RNN(), "relu": RNN(activation="relu"), "lstm": LSTM(), "gru": GRU(), "no biases": LSTM(bias=False)}
WIDTH, SIZE = 5, 7


def built(spec: RecurrentMixer, width: int = WIDTH, size: int = SIZE) -> RecurrentCell:
    module = spec.cell(width, size).double()
    draw_wide(module, seed=3)
    return module


def plain(module: RecurrentCell, x: Tensor, past: CellStates, layout: TokenLayout) -> tuple[Tensor, CellStates]:
    return unroll(module.step, module.project_inputs(x), past, layout.segments, layout.valid)


def drawn(module: RecurrentCell, batch: int, length: int) -> tuple[Tensor, CellStates]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, tuple(torch.rand(batch, SIZE, generator=generator, dtype=torch.float64) for _ in module.states)


def close(found: tuple[Tensor, CellStates], expected: tuple[Tensor, CellStates], valid: Tensor | None = None) -> None:
    said, wanted = (out if valid is None else out[valid] for out in (found[0], expected[0]))
    assert error(said, wanted) <= 1e-12
    for state, other in zip(found[1], expected[1], strict=True):
        assert error(state, other) <= 1e-12


@pytest.mark.parametrize("name", CELLS)
def test_fused_equals_the_loop(name: str) -> None:
    module = built(CELLS[name])
    x, past = drawn(module, 3, 11)
    close(module.fused(x, None, past), plain(module, x, past, TokenLayout.whole(3, 11)))


ROWS = torch.tensor(
    [[0, 0, 0, 1, 1, 2, 2, 2, 2, -1, -1], [-1, -1, 4, 4, 4, 4, 4, 4, 4, 4, 4], [0, 1, -1, 1, 2, 2, 3, 3, 3, 3, 3]]
)
WHERE = {
    "packed": TokenLayout(torch.zeros_like(ROWS), ROWS.clamp_min(0)),
    "padded left, right, inside": TokenLayout(torch.zeros_like(ROWS), valid=ROWS >= 0),
    "packed and padded": TokenLayout(torch.zeros_like(ROWS), ROWS, ROWS >= 0),
    "a row of nothing": TokenLayout(
        torch.zeros_like(ROWS), valid=(ROWS >= 0) & torch.tensor([[True], [False], [True]])
    ),
    "nothing at all": TokenLayout(torch.zeros_like(ROWS), valid=ROWS > 99),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CELLS)
def test_documents_equal_the_loop(name: str, where: str) -> None:
    module, layout = built(CELLS[name]), WHERE[where]
    x, past = drawn(module, *ROWS.shape)
    close(run_packed(module.fused, x, past, pack_documents(layout)), plain(module, x, past, layout), layout.valid)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_of_both_forms_are_the_same(name: str) -> None:
    module, layout = built(CELLS[name]), WHERE["packed and padded"]
    x, past = drawn(module, *ROWS.shape)
    x.requires_grad_()
    weights = [x, *past, *module.parameters()]
    for array in past:
        array.requires_grad_()
    found = []
    for said, states in (run_packed(module.fused, x, past, pack_documents(layout)), plain(module, x, past, layout)):
        loss = said.where(layout.valid.unsqueeze(-1), 0.0).sin().sum() + sum(state.sin().sum() for state in states)
        found.append(torch.autograd.grad(loss, weights))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-11


def test_the_loop_resets_at_documents_and_skips_padding() -> None:
    """Against each document by itself."""
    layout, (x, _) = WHERE["packed and padded"], drawn(built(LSTM()), *ROWS.shape)
    module = built(LSTM())
    zeros = tuple(torch.zeros(3, SIZE, dtype=torch.float64) for _ in range(2))
    said, _ = plain(module, x, zeros, layout)
    for row in range(3):
        for document in ROWS[row].unique():
            if document >= 0:
                mine = document == ROWS[row]
                alone, _ = plain(
                    module, x[row, mine][None], tuple(z[:1] for z in zeros), TokenLayout.whole(1, int(mine.sum()))
                )
                assert (said[row, mine] - alone[0]).abs().max() <= 1e-15
    assert document_starts(ROWS, ROWS >= 0)[2].nonzero().flatten().tolist() == [1, 4, 6]


def test_documents_go_apart_and_back() -> None:
    layout = WHERE["packed and padded"]
    documents, where = split_documents(layout)
    assert documents.rows.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert where.valid.sum(1).tolist() == [3, 2, 4, 9, 1, 2, 2, 5]
    x = torch.randn(*ROWS.shape, 2)
    assert torch.equal(documents.merge(documents.split(x)), x * (ROWS >= 0).unsqueeze(-1))


def copied(module: nn.RNNBase, ours: RecurrentCell, turn: Callable[[Tensor], Tensor] = lambda w: w) -> None:
    """Torch's weights of its one layer into ours; it has two biases where one is enough."""
    with torch.no_grad():
        size = ours.size
        ours.x_proj.weight.copy_(turn(module.weight_ih_l0))
        if isinstance(module, nn.GRU):
            ours.h_proj.weight.copy_(turn(module.weight_hh_l0)[: 2 * size])
            ours.n_proj.weight.copy_(module.weight_hh_l0[2 * size :])
            both, n = module.bias_hh_l0.clone(), module.bias_hh_l0[2 * size :]
            both[2 * size :] = 0
            ours.bias.copy_(turn(module.bias_ih_l0 + both))
            ours.n_proj.bias.copy_(n)
        else:
            ours.h_proj.weight.copy_(module.weight_hh_l0)
            ours.bias.copy_(module.bias_ih_l0 + module.bias_hh_l0)


def negated(weight: Tensor) -> Tensor:
    """Torch's z is our 1 - z."""
    r, z, n = weight.chunk(3)
    return torch.cat([r, -z, n])


TORCH = {
    "rnn": (RNN(), nn.RNN, lambda w: w),
    "lstm": (LSTM(), nn.LSTM, lambda w: w),
    "gru": (GRU(), nn.GRU, negated),
}


@pytest.mark.ledger("anc.rnn.cell", "anc.lstm.cell", "anc.gru.cell")
@pytest.mark.parametrize("name", TORCH)
def test_equal_to_torch(name: str) -> None:
    """Outputs, last states and gradients of the input, with copied weights: by the loop and by the fused form."""
    torch.manual_seed(0)
    spec, kind, turn = TORCH[name]
    theirs, ours = kind(WIDTH, SIZE, batch_first=True).double(), built(spec)
    copied(theirs, ours, turn)
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    expected, last = theirs(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    zeros = tuple(torch.zeros(2, SIZE, dtype=torch.float64) for _ in ours.states)
    for said, states in (ours.fused(x, None, zeros), plain(ours, x, zeros, TokenLayout.whole(2, 13))):
        assert (said - expected).abs().max() <= 1e-13
        for state, other in zip(states, last if isinstance(last, tuple) else (last,), strict=True):
            assert (state - other[0]).abs().max() <= 1e-13
        assert (torch.autograd.grad(said.square().sum(), x)[0] - gradient).abs().max() <= 1e-12


@pytest.mark.ledger("anc.lstm.cell")
def test_lstm_as_the_book_writes_it() -> None:
    """One matrix on [h, x] a gate, no biases."""
    torch.manual_seed(0)
    module = built(LSTM(bias=False))
    w = torch.cat([module.h_proj.weight, module.x_proj.weight], 1).chunk(4)  # (F, F + D) each
    x, (h, c) = drawn(module, 1, 6)
    said, _ = module.fused(x, None, (h, c))
    for t in range(6):
        hx = torch.cat([h[0], x[0, t]])
        i, f, o = torch.sigmoid(w[0] @ hx), torch.sigmoid(w[1] @ hx), torch.sigmoid(w[3] @ hx)
        c = f * c + i * torch.tanh(w[2] @ hx)
        h = o * torch.tanh(c)
        assert (said[0, t] - h[0]).abs().max() <= 1e-14


@pytest.mark.ledger("anc.gru.cell")
@pytest.mark.parametrize("reset", ["before", "after"])
def test_gru_as_the_book_writes_it(reset: str) -> None:
    module = built(GRU(bias=False, reset=reset))
    w = torch.cat([torch.cat([module.h_proj.weight, module.n_proj.weight]), module.x_proj.weight], 1).chunk(3)
    x, (h,) = drawn(module, 1, 6)
    said, _ = module.run(x, (h,), TokenLayout.whole(1, 6))
    h = h[0]
    for t in range(6):
        r, z = (torch.sigmoid(gate @ torch.cat([h, x[0, t]])) for gate in w[:2])
        if reset == "before":
            n = torch.tanh(w[2] @ torch.cat([r * h, x[0, t]]))
        else:
            n = torch.tanh(r * (w[2][:, :SIZE] @ h) + w[2][:, SIZE:] @ x[0, t])
        h = (1 - z) * h + z * n
        assert (said[0, t] - h).abs().max() <= 1e-14


@pytest.mark.ledger("anc.rnn.bptt")
def test_the_gradient_through_time_is_a_product_of_jacobians() -> None:
    """From step 50 to step 1: 49 factors diag(1 - h²) W_h; its norm is at most the product of theirs."""
    module = built(RNN())
    with torch.no_grad():
        module.h_proj.weight.mul_(0.6)
    x = torch.randn(1, 50, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    entered = module.project_inputs(x)
    (first,) = module.step(entered[:, 0], torch.zeros(1, SIZE, dtype=torch.float64))

    def last(h: Tensor) -> Tensor:
        return unroll(module.step, entered[:, 1:], (h.unsqueeze(0),))[1][0][0]

    jacobian = torch.autograd.functional.jacobian(last, first[0].detach())
    said, _ = unroll(module.step, entered[:, 1:], (first,))
    factors = [(1 - h.square()).unsqueeze(-1) * module.h_proj.weight for h in said[0]]
    assert len(factors) == 49
    product = torch.eye(SIZE, dtype=torch.float64)
    for factor in factors:
        product = factor @ product
    assert (jacobian - product).abs().max() <= 1e-12 * product.abs().max()
    norms = torch.stack([torch.linalg.matrix_norm(factor, 2) for factor in factors])
    assert torch.linalg.matrix_norm(jacobian, 2) <= norms.prod() * (1 + 1e-9)


@pytest.mark.ledger("anc.lstm.highway")
def test_open_forget_gates_carry_the_cell_unchanged() -> None:
    module = built(LSTM())
    with torch.no_grad():
        module.x_proj.weight.zero_()
        module.h_proj.weight.zero_()
        module.bias.copy_(torch.cat([torch.full((SIZE,), value) for value in (-800.0, 40.0, 0.5, 0.0)]))
    x, (h, c) = drawn(module, 2, 1000)
    _, (_, carried) = module.fused(x, None, (h, c))
    assert torch.equal(carried, c)  # sigmoid(40) rounds to 1, sigmoid(-800) to 0


@pytest.mark.ledger("anc.lstm.path")
def test_along_the_cell_the_gradient_is_the_product_of_forget_gates() -> None:
    """With gates that are not differentiated; the whole gradient has further terms, since gates read h."""
    module = built(LSTM())
    x, (h, c) = drawn(module, 1, 20)
    entered, forgets, cell, said = module.project_inputs(x), [], c.clone().requires_grad_(), h
    start = cell
    for t in range(20):
        i, f, g, o = (gate.detach() for gate in (entered[:, t] + module.h_proj(said)).chunk(4, -1))
        forgets.append(f.sigmoid())
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        said = o.sigmoid() * cell.tanh()
    (gradient,) = torch.autograd.grad(cell.sum(), start)
    product = torch.stack(forgets).prod(0)
    assert (gradient - product).abs().max() <= 1e-15
    again = c.clone().requires_grad_()
    (_, whole) = unroll(module.step, entered, (h, again))[1]
    assert (whole - cell).abs().max() <= 1e-14
    (full,) = torch.autograd.grad(whole.sum(), again)
    assert (full - product).abs().max() > 1e-3


@pytest.mark.ledger("anc.lstm.path")
def test_a_gru_blends_its_state_with_news() -> None:
    """Likewise: with gates and news that are not differentiated, what is kept of the start is the product of 1 - z."""
    module = built(GRU())
    x, (h,) = drawn(module, 1, 20)
    entered, kept = module.project_inputs(x), []
    start = state = h.clone().requires_grad_()
    for t in range(20):
        gates, news = entered[:, t].tensor_split([2 * SIZE], -1)
        r, z = (gates + module.h_proj(state)).sigmoid().detach().chunk(2, -1)
        n = torch.tanh(news + r * module.n_proj(state)).detach()
        kept.append(1 - z)
        assert ((z > 0) & (z < 1)).all()
        state = (1 - z) * state + z * n
    (gradient,) = torch.autograd.grad(state.sum(), start)
    assert (gradient - torch.stack(kept).prod(0)).abs().max() <= 1e-15
    assert (state - unroll(module.step, entered, (h,))[1][0]).abs().max() <= 1e-14
