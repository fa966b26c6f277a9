"""Adapters of an engine that are loaded, unloaded and copied into slots while requests run."""

import pytest
import torch
from torch import nn

from regard.adapt import AdapterError
from regard.adapt.lora_weights import LoraWeights, lora_weights
from regard.engine import adapters as engine_adapters
from tests.engine.test_adapters import GREEDY, adapted, generate, open_engine, prompt, run, tokens


def test_adapters_are_loaded_and_unloaded_while_requests_run(tiny) -> None:
    model, ids = tiny(), prompt(6)
    old, new, other = adapted(model, 3), adapted(model, 4), adapted(model, 20)
    engine = open_engine(model, max_loras=1)
    engine.load_adapter("a", lora_weights(old))
    first = engine.submit(ids, GREEDY, adapter="a")
    for _ in range(3):
        engine.step()
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match="there is no adapter 'a'; no adapter is loaded"):
        engine.submit(ids, GREEDY, adapter="a")
    engine.load_adapter("a", lora_weights(new))
    engine.load_adapter("b", lora_weights(other))  # of a higher rank: new tensors for all slots
    assert engine.adapters == ("a", "b")
    second, third = (engine.submit(ids, GREEDY, adapter=name) for name in ("a", "b"))
    run(engine, first, second, third)
    for request, version in ((first, old), (second, new), (third, other)):
        assert tokens(request) == generate(open_engine(version), ids)


def test_requests_wait_for_a_slot(tiny) -> None:
    model = tiny()
    engine = open_engine(model, rows=4, chunk=32, max_loras=2)
    for rank in (1, 2, 3):
        engine.load_adapter(f"{rank}", lora_weights(adapted(model, rank)))
    requests = [engine.submit(prompt(5, i), GREEDY, adapter=name) for i, name in enumerate(("1", "2", "3", None))]
    engine.step()
    assert [request.row is not None for request in requests] == [True, True, False, True]  # the last needs no slot
    copied = []
    load = engine.loras.adapted.load
    engine.loras.adapted.load = lambda slot, weights: (copied.append(weights.rank), load(slot, weights))
    run(engine, *requests)
    assert copied == [3]  # the running ones kept their slots
    for name in ("2", "1", "2", "3"):  # 1 was the least recently used when 3 was copied, 3 when 1 was
        generate(engine, prompt(5), adapter=name)
    assert copied == [3, 1, 3]


def test_a_request_that_waits_for_a_slot_is_not_starved(tiny) -> None:
    """While requests of other kinds keep arriving, it starts when those that ran before it have ended."""
    engine = open_engine(tiny(), rows=3, max_loras=1, queue=100)
    for name, rank in (("a", 1), ("b", 2)):
        engine.load_adapter(name, lora_weights(adapted(tiny(), rank)))
    first = engine.submit(prompt(3), GREEDY, adapter="a")
    waits = engine.submit(prompt(4), GREEDY, adapter="b")
    later: list = []
    while waits.finish is None:
        later += [engine.submit(prompt(3, len(later)), GREEDY, adapter=name) for name in ("a", None)]
        engine.step()
        if first.finish is None:
            assert waits.row is None and not any(request.row is not None for request in later if request.adapter)
    assert any(request.finish for request in later if request.adapter is None)  # they passed it
    assert not any(request.new for request in later if request.adapter is not None)


def test_the_limit_of_loaded_adapters(tiny) -> None:
    engine = open_engine(tiny(), max_cpu_loras=2)
    weights = lora_weights(adapted(tiny(), 3))
    engine.load_adapter("a", weights)
    with pytest.raises(AdapterError, match="an adapter named 'a' is loaded already; unload it first"):
        engine.load_adapter("a", weights)
    engine.load_adapter("b", weights)
    with pytest.raises(AdapterError, match="2 adapters are loaded, the most allowed"):
        engine.load_adapter("c", weights)
    with pytest.raises(AdapterError, match="there is no adapter 'bb'; did you mean 'b'"):
        engine.unload_adapter("bb")
    engine.unload_adapter("a")
    engine.load_adapter("c", weights)
    for name in ("", "a\n", 3, "x" * 257):
        with pytest.raises(AdapterError, match="is not a name for an adapter"):
            engine.load_adapter(name, weights)


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize("failing", ["the memory of layers", "the copy on the host", "the runner"])
def test_an_adapter_that_fails_to_load_changes_nothing(tiny, failing: str, monkeypatch) -> None:
    model, ids = tiny(), prompt(6)
    engine = open_engine(model)
    engine.load_adapter("a", lora_weights(adapted(model, 3, ("q_proj", "up_proj"))))
    expected = generate(engine, ids, adapter="a")
    loras, larger = engine.loras, lora_weights(adapted(model, 20))

    def state() -> tuple:
        tensors = {path: (id(layer.a), id(layer.b)) for path, layer in loras.adapted.layers.items()}
        types = [type(module) for module in loras.adapted.model.modules()]
        return engine.adapters, loras.runner, dict(loras.slot_of), tensors, types

    before = state()
    with monkeypatch.context() as patched:
        if failing == "the memory of layers":
            pad, calls = nn.functional.pad, []
            patched.setattr(
                nn.functional, "pad", lambda *args: calls.append(0) or (pad if len(calls) < 4 else out_of_memory)(*args)
            )
        elif failing == "the copy on the host":
            patched.setattr(engine_adapters, "on_host", out_of_memory)
        else:
            patched.setattr(loras, "open_runner", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.load_adapter("b", larger)
    assert state() == before
    assert generate(engine, ids, adapter="a") == expected
    engine.load_adapter("b", larger)
    assert generate(engine, ids, adapter="b") == generate(open_engine(adapted(model, 20)), ids)
    assert generate(engine, ids, adapter="a") == expected


def test_weights_on_the_host_are_copies(tiny) -> None:
    """A trained adapter may change after it was loaded."""
    model = tiny()
    source = adapted(model, 3)
    engine, expected = open_engine(model), generate(open_engine(source), prompt(5))
    weights: LoraWeights = lora_weights(source)
    engine.load_adapter("a", weights)
    for a, b, gain in weights.layers.values():
        assert gain is not None  # of DoRA
        a.zero_(), b.zero_(), gain.zero_()
    assert generate(engine, prompt(5), adapter="a") == expected
