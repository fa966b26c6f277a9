"""The size of a store follows from the device's memory, and memory on a CPU is used only as it is written."""

from functools import partial
from pathlib import Path

import pytest
import torch

from regard.engine import memory
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.arrays import zeros
from regard.engine.stores.paged import Paged
from regard.parts.attention import Attention
from regard.parts.linear_attention import LinearAttention
from tests.laws import block, decoder

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch):
    return lambda size: monkeypatch.setattr(memory, "memory_of", lambda device: size)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_an_empty_store_uses_no_memory() -> None:
    before = resident()
    array = zeros((64, MIB), torch.float32, "cpu")  # 256 MiB
    assert resident() - before < 32 * MIB
    assert array.data_ptr() % 64 == 0 and not array[::7, ::100_001].any()
    array[0] = 1
    assert 0 < resident() - before < 64 * MIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_zeros_of_any_dtype(dtype: torch.dtype) -> None:
    found = zeros((3, 0, 2), dtype, "cpu"), zeros((2, 5), dtype, "cpu")
    assert [array.shape for array in found] == [(3, 0, 2), (2, 5)]
    assert all(array.dtype is dtype and not array.any() for array in found)


def test_32_requests_run_at_once_by_default(tiny) -> None:
    engine = Engine(tiny())
    requests = [engine.submit([i, 1], Sampling(max_new=2, temperature=0)) for i in range(33)]
    engine.step()
    assert [request.row is not None for request in requests] == [True] * 32 + [False]


def test_blocks_fill_the_budget(available) -> None:
    """Four layers of two arrays of 2 · 8 numbers in float64: a block of 16 tokens takes 16 KiB."""
    model = decoder(block(Attention(4, 2, head_dim=8)), block(Attention(4, 2, head_dim=8))).build(seed=0).double()
    available(4 * MIB)
    assert Engine(model, capacity=2048).metrics()["blocks"] == 64  # a quarter of the memory
    assert Engine(model, capacity=2048, memory=0.5).metrics()["blocks"] == 128
    assert Engine(model, capacity=2048, memory=0.5).capacity == 2048
    assert Engine(model, capacity=2048).capacity == 1024  # 64 blocks
    assert Engine(model, capacity=16, rows=3).metrics()["blocks"] == 6  # twice what the rows can fill


def test_large_states_leave_fewer_rows(available) -> None:
    model = decoder(block(LinearAttention(4)), block(Attention(4, 2))).build(seed=0)
    states = sum(
        array.nbytes
        for storage in Engine(model, rows=1, capacity=64).store.storages
        if not hasattr(storage.placer, "pool")
        for array in storage.arrays.values()
    )
    available(4 * 2 * 5 * 7 * states)  # a quarter of it, half of that, for a row's states and four copies
    engine = Engine(model, capacity=64)
    assert engine.store.rows == 7 and engine.store.pool.max_states == 28
    available(1)
    assert Engine(model, capacity=64).store.rows == 1


def test_a_contiguous_store_has_as_many_rows_as_fit(tiny, available) -> None:
    one = memory.bytes_of(Engine(tiny(), rows=1, store="contiguous").store)
    available(20 * one)
    assert Engine(tiny(), store="contiguous").store.rows == 5
    assert Engine(tiny(), store="contiguous", rows=9).store.rows == 9


def test_wrong_shares_are_refused(tiny) -> None:
    for share in (0, -1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="must be a share of the device's memory, above 0 and at most 1"):
            Engine(tiny(), memory=share)
    with pytest.raises(ValueError, match="memory sets the size of a store that is given by its name"):
        Engine(tiny(), memory=0.5, store=partial(Paged, blocks=8))


def test_the_memory_of_this_machine_is_known() -> None:
    assert memory.memory_of(torch.device("cpu")) > 64 * MIB


def test_engines_divide_a_share_in_equal_parts() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [memory.divided_share(0.6, i, 3, cpu) for i in range(3)] == pytest.approx([0.2] * 3)
    assert memory.divided_share(None, 1, 2, cpu) == memory.SHARES["cpu"] / 2
    free, taken = 100.0, []
    for i in range(4):  # each takes its share of what the earlier ones left
        taken.append(memory.divided_share(None, i, 4, gpu) * free)
        free -= taken[-1]
    assert taken == pytest.approx([20.0] * 4)
