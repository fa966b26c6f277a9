"""`begin_forward`: a layout can be used again, and tokens that do not continue their rows are refused."""

import pytest
import torch

import regard
from regard.engine.stores import STORES
from regard.engine.stores.base import CannotRewind

WINDOW = regard.Attention(2, mask=regard.Window(4))
BLOCK = regard.Block((regard.Sublayer(regard.Attention(2, position=regard.Rope())), regard.Sublayer(WINDOW)))
SPEC = regard.Decoder(31, 16, (regard.Repeat((BLOCK,)),))


def open_store(kind: str, rows: int = 2, capacity: int = 64) -> regard.Contiguous | regard.Paged:
    return STORES[kind](SPEC.memory(), rows, capacity, torch.float64, torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
def test_one_layout_can_be_used_in_two_forwards(kind: str) -> None:
    model, store, layout = (
        SPEC.build(seed=0).double(),
        open_store(kind),
        regard.TokenLayout(torch.arange(6).expand(2, 6)),
    )
    for row in range(2):
        assert store.reserve(row, 6)
    for seed in (1, 2):
        tokens = torch.randint(31, (2, 6), generator=torch.Generator().manual_seed(seed))
        found = model(tokens, layout, store.begin_forward(layout))
        assert (found - model(tokens)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[3, 4]], "has 0 tokens, so the next position is 0, not 3"),
        ([[0, 2]], "are not consecutive"),
        ([[3, 0, 2, 1]], r"positions \[3, 0, 2, 1\] are not consecutive from 0 or more; sort its tokens"),
        ([[0, 0, 3, 3]], "are not consecutive"),
        ([list(range(65))], "does not fit into the store's capacity"),
    ],
)
def test_positions_that_do_not_continue_a_row_are_refused(kind: str, positions: list, message: str) -> None:
    store = open_store(kind)
    assert store.reserve(0, 64)
    with pytest.raises(ValueError, match=message):
        store.begin_forward(regard.TokenLayout(torch.tensor(positions)))


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
def test_a_row_can_be_reserved_token_by_token(kind: str) -> None:
    """The scheduler reserves in this way; 40 tokens need more than one block."""
    model, store = SPEC.build(seed=0).double(), open_store(kind)
    tokens = torch.randint(31, (1, 40), generator=torch.Generator().manual_seed(1))
    steps = []
    for t in range(40):
        assert store.reserve(1, t + 1)
        layout = regard.TokenLayout(torch.tensor([[t]]), rows=torch.tensor([1]))
        steps.append(model(tokens[:, t : t + 1], layout, store.begin_forward(layout)))
    assert (torch.cat(steps, 1) - model(tokens)).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
def test_reserving_past_the_capacity_fails_and_a_released_row_is_zero(kind: str) -> None:
    spec = regard.Decoder(31, 16, (regard.Repeat((regard.Block((regard.Sublayer(regard.Attention(2)),)),)),))
    model, layout = spec.build(seed=0).double(), regard.TokenLayout(torch.arange(6).unsqueeze(0))
    store = STORES[kind](spec.memory(), 2, 64, torch.float64)
    assert not store.reserve(0, store.capacity + 1)
    assert store.reserve(0, 6)
    model(torch.arange(6).unsqueeze(0), layout, store.begin_forward(layout))
    assert all(array.any() for storage in store.storages for array in storage.arrays.values())
    store.release(0)
    store.upload()  # blocks are cleared before the next forward
    assert not any(array.any() for storage in store.storages for array in storage.arrays.values())


def test_a_paged_row_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call reserve\(0, 3\) first"):
        open_store("paged").begin_forward(regard.TokenLayout(torch.arange(3).unsqueeze(0)))


MIXERS = {
    "full": regard.Attention(2, position=regard.Rope()),
    "window": WINDOW,
    "linear": regard.LinearAttention(2),
}


def make_model(mixer: regard.Body) -> torch.nn.Module:
    block = regard.Block((regard.Sublayer(mixer), regard.Sublayer(regard.SwiGLU(16))))
    return regard.Decoder(31, 16, (regard.Repeat((block,), 2),)).build(seed=0).double()


def random_tokens(seed: int) -> torch.Tensor:
    return torch.randint(31, (1, 60), generator=torch.Generator().manual_seed(seed))


def run_chunk(model, store, tokens: torch.Tensor, start: int, stop: int, row: int = 0) -> torch.Tensor:
    assert store.reserve(row, stop)
    layout = regard.TokenLayout(torch.arange(start, stop).unsqueeze(0), rows=torch.tensor([row]))
    return model(tokens[:, start:stop], layout, store.begin_forward(layout))


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", MIXERS)
def test_tokens_that_start_within_a_row_rewind_it_or_are_refused(name: str, kind: str) -> None:
    model, tokens = make_model(MIXERS[name]), random_tokens(1)
    store = STORES[kind](model.spec.memory(), 1, 64, torch.float64)
    run_chunk(model, store, tokens, 0, 50)
    whole = model(tokens)
    if name == "full":
        assert (run_chunk(model, store, tokens, 20, 30) - whole[:, 20:30]).abs().max() < 1e-12
        assert store.table.lengths.tolist() == [30]
    else:
        with pytest.raises(CannotRewind, match="from 50 to 20 tokens: .* rewind with a snapshot of 20 tokens"):
            run_chunk(model, store, tokens, 20, 30)
        assert (run_chunk(model, store, tokens, 50, 60) - whole[:, 50:]).abs().max() < 1e-12  # nothing has changed
    store.rewind(0, 0)
    assert (run_chunk(model, store, tokens, 0, 9) - whole[:, :9]).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", MIXERS)
def test_a_restarted_row_refuses_its_old_snapshots(name: str, kind: str) -> None:
    model, old, new = make_model(MIXERS[name]), random_tokens(1), random_tokens(2)
    store, other_store = (STORES[kind](model.spec.memory(), 2, 64, torch.float64) for _ in range(2))
    run_chunk(model, store, old, 0, 20)
    snapshot = store.snapshot(0)
    run_chunk(model, store, new, 0, 30)
    with pytest.raises(CannotRewind, match="take a new snapshot"):
        store.rewind(0, 20, snapshot)
    run_chunk(model, other_store, old, 0, 20)
    with pytest.raises(CannotRewind, match="the snapshot is of another store"):
        store.rewind(0, 20, other_store.snapshot(0))
    with pytest.raises(CannotRewind, match="the snapshot is of another store"):
        store.fork(0, 1, other_store.snapshot(0))
    assert (run_chunk(model, store, new, 30, 40) - model(new)[:, 30:40]).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("start", [0, 8, 20])
def test_overwriting_a_row_leaves_its_fork_unchanged(start: int, kind: str) -> None:
    """The rows share blocks of 16 tokens in the paged store."""
    model, old, new = make_model(MIXERS["full"]), random_tokens(1), random_tokens(2)
    store = STORES[kind](model.spec.memory(), 2, 64, torch.float64)
    run_chunk(model, store, old, 0, 32)
    assert store.reserve(0, 48) and store.fork(0, 1, store.snapshot(0))
    mixed = torch.cat([old[:, :start], new[:, start:]], 1)
    assert (run_chunk(model, store, mixed, start, 32) - model(mixed)[:, start:32]).abs().max() < 1e-12
    assert (run_chunk(model, store, old, 32, 40, row=1) - model(old)[:, 32:40]).abs().max() < 1e-12
    layout = regard.TokenLayout(torch.arange(32, 48).unsqueeze(0))  # the space reserved before is still reserved
    found = model(mixed[:, 32:48], layout, store.begin_forward(layout))
    assert (found - model(mixed)[:, 32:48]).abs().max() < 1e-12
    store.release(0)
    store.release(1)
    if isinstance(store, regard.Paged):
        store.check()
        assert len(store.pool.free) == 8


@torch.no_grad()
def test_a_shared_row_cannot_be_overwritten_without_free_blocks() -> None:
    model, tokens = make_model(MIXERS["full"]), random_tokens(1)
    store = regard.Paged(model.spec.memory(), 2, 64, torch.float64, block=16, blocks=2)
    run_chunk(model, store, tokens, 0, 32)
    assert store.fork(0, 1, store.snapshot(0))
    with pytest.raises(CannotRewind, match="row 0 shares 2 blocks .* but 0 are free"):
        run_chunk(model, store, tokens, 0, 32)
    assert store.table.lengths.tolist() == [32, 32] and store.owned[0] == store.owned[1]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 0}, "rows=0 must be an integer of at least 1"),
        ({"capacity": 0}, "capacity=0 must be an integer of at least 1"),
        ({"capacity": 6.5}, "capacity=6.5 must be an integer of at least 1"),
        ({"slack": -1}, "slack=-1 must be an integer of at least 0"),
    ],
)
def test_impossible_sizes_are_refused(kind: str, sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        STORES[kind](SPEC.memory(), **({"rows": 2, "capacity": 8} | sizes), dtype=torch.float64)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("row", [-1, 2])
def test_rows_that_do_not_exist_are_refused(kind: str, row: int) -> None:
    store = open_store(kind)
    snapshot = store.snapshot(0)
    for operation in (
        lambda: store.snapshot(row),
        lambda: store.rewind(row, 0),
        lambda: store.fork(0, row, snapshot),
        lambda: store.fork(row, 0, snapshot),
        lambda: store.release(row),
    ):
        with pytest.raises(ValueError, match=f"row {row} does not exist; choose one from 0 to 1"):
            operation()
