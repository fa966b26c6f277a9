"""`begin_forward`: a layout can be used again, and tokens that do not continue their rows are refused."""

import pytest
import torch

import regard
from regard.engine.stores import STORES

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
    assert not any(array.any() for storage in store.storages for array in storage.arrays.values())


def test_a_paged_row_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call reserve\(0, 3\) first"):
        open_store("paged").begin_forward(regard.TokenLayout(torch.arange(3).unsqueeze(0)))
