"""The compiled decode step generates the same tokens as the eager one."""

import warnings

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, without_repeats
from regard.parts.attention import Attention
from tests.laws import MODELS, block, build, random_ids


@pytest.mark.slow
@pytest.mark.ledger("eng.fused")
@pytest.mark.parametrize(
    ("name", "store", "rows"),
    [
        pytest.param("grouped-query", "paged", 3, marks=pytest.mark.oldest),
        ("grouped-query", "contiguous", 3),
        ("grouped-query", "paged", 1),
        ("hybrid", "paged", 3),
        ("hybrid", "contiguous", 3),
        ("short convolution", "paged", 3),
        ("mamba", "contiguous", 3),
        ("mamba2 and a window", "paged", 3),
        ("rnn, gru", "contiguous", 3),
        ("s4", "paged", 3),
        ("lstm, wide, then attention", "paged", 3),
    ],
)
def test_compiled_equals_eager(name: str, store: str, rows: int) -> None:
    torch._dynamo.reset()  # dynamo stops compiling a function after a limited number of variants
    model = build(without_repeats(MODELS[name]))  # repeated layers would only be compiled again
    samplings = [Sampling(max_new=6 + i, temperature=i % 2, seed=i) for i in range(5)]
    jobs = [(random_ids(3 + 4 * i, seed=i).tolist(), sampling) for i, sampling in enumerate(samplings)]
    reference = Engine(model, rows=1, capacity=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns on its first compile
        engine = Engine(model, rows=rows, capacity=64, store=store, compile=True)
        requests = [engine.submit(*job) for job in jobs]
        while not engine.idle:
            engine.step()
    for request, job in zip(requests, jobs, strict=True):
        assert [token.id for token in request.new] == [token.id for token in reference.generate(*job)]


@pytest.mark.slow
def test_the_warm_up_compiles_all_spans() -> None:
    """Without it, requests would wait for torch.compile when the first of them gets longer than 256 tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Decoder(31, 16, (Repeat((block(Attention(2)),)),), context=1024).build(0)
        engine = Engine(model, rows=1, compile=True)
    engine.warm_up()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (250, 500, 1000):
        engine.generate([1] * length, Sampling(max_new=20, temperature=0))
    assert engine.runner.compiled is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_without_a_compiler_the_engine_warns_and_decodes_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.warns(UserWarning, match="C\\+\\+ compiler"):
        engine = Engine(build(MODELS["multi-head"]), capacity=64, compile=True)
    assert engine.generate([1, 2], Sampling(max_new=2, temperature=0))


def test_a_step_that_torch_cannot_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit  # imported here: it takes seconds

    def fail(*rows: object) -> None:
        raise FailOnRecompileLimitHit("recompile_limit reached\nand more")

    monkeypatch.setattr(torch, "compile", lambda *step, **options: fail)
    monkeypatch.setattr("regard.engine.runner.cannot_compile", lambda device: None)
    with pytest.warns(UserWarning, match=r"step \(recompile_limit reached\); decoding eagerly"):
        engine = Engine(build(MODELS["multi-head"]), capacity=64, compile=True)
    assert engine.runner.compiled is None
