"""A decode step reads all weights and the cache, however few tokens it generates."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.planning import plan
from tests.laws import MODELS, build


class RecordReads(TorchDispatchMode):
    """The storages of all tensors that operations have as arguments, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.storages.add(tensor.untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.ledger("inf.decode")
@pytest.mark.parametrize("name", ["grouped-query", "latent", "mamba2 and a window"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_decode_step_reads_all_weights_and_the_cache(name: str, batch: int) -> None:
    model = build(MODELS[name])
    engine = Engine(model, rows=4, capacity=64)
    requests = [engine.submit([i, 7, 3], Sampling(max_new=6, temperature=0)) for i in range(batch)]
    while not all(request.new for request in requests):
        engine.step()
    cache = storages(array for storage in engine.store.storages for array in storage.arrays.values())
    steps = 0
    while not engine.idle:
        with RecordReads() as reads:
            produced = engine.step()
        steps += 1
        assert storages(model.parameters()) <= reads.storages and cache <= reads.storages
        assert [len(request.new) for request, _ in produced] == [1 + steps] * batch  # one token per sequence
    assert steps == 5
    read = sum(parameter.nbytes for parameter in model.parameters())
    if not model.spec.tied:  # only the rows of its ids
        read -= (model.spec.vocab - 1) * model.spec.width * torch.float64.itemsize
    assert plan(model.spec, context=8, dtype="float32").weights_read * 2 == pytest.approx(read, rel=0.05)
