"""Decoding by CUDA graphs generates what eager decoding does."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.compat import COMPILE_OPTIONS, allow_recompiles
from regard.engine.decode_graphs import DecodeGraphs, decode_size
from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.runner import Runner
from regard.engine.speculation.draft_model import DraftModel
from regard.engine.speculation.lookahead import Lookahead
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba2 import Mamba2
from tests.engine.drafters import METHODS

MIXERS: dict[str, tuple[Any, ...]] = {
    "attention": (Attention(4, kv_heads=2, head_dim=32, position=Rope(), qk_norm=RMSNorm()),),
    "window": (Attention(2, head_dim=32, position=Rope(), mask=Window(5)), Attention(2, head_dim=32)),
    "latent": (LatentAttention(2, rank=16, nope_dim=16, rope_dim=16, v_dim=16, position=Rope()),),
    "mamba": (Mamba2(head_dim=32, state=8),),
    "hybrid": (Mamba2(head_dim=32, state=8), Attention(4, kv_heads=2, head_dim=32, position=Rope())),
}


def build(name: str, device: str, dtype: torch.dtype) -> DecoderModule:
    blocks = tuple(Block((Sublayer(mixer), Sublayer(SwiGLU(128)))) for mixer in MIXERS[name])
    with torch.device(device):
        model = Decoder(96, 64, (Repeat(blocks, 2),)).build(seed=1)
    return model.to(dtype).eval().requires_grad_(False)


def generate(engine: Engine, greedy: bool = False) -> list[tuple[list[int], str | None]]:
    """Requests of several lengths that join and leave, so that the rows of the batches change."""
    generator = torch.Generator().manual_seed(0)
    requests: list[Request] = []
    for i in range(14):
        prompt = torch.randint(96, (1 + 5 * i % 17,), generator=generator).tolist()
        sampling = Sampling(max_new=3 + 7 * i % 12, temperature=0.0 if greedy or i % 3 else 1.0, seed=i)
        requests.append(engine.submit(prompt, sampling))
        for _ in range(i % 4):
            engine.step()
    engine.cancel(requests[7])
    while not engine.idle:
        engine.step()
    return [([token.id for token in request.new], request.finish) for request in requests]


class RepeatedStep:
    """In place of a CUDA graph where there is no GPU: it runs the step again, with the tensors of the capture."""

    def __init__(self, step: Callable[[], Tensor]):
        self.step, self.logits = step, step()

    def replay(self) -> None:
        self.logits.copy_(self.step())


def repeat_step(graphs: DecodeGraphs, rows: int, span: int, length: int) -> tuple[Any, Tensor]:
    tokens, positions, valid = graphs.empty_inputs(rows, length)
    repeated = RepeatedStep(lambda: graphs.step(tokens, positions, valid.bool(), span))
    return repeated, repeated.logits


@pytest.mark.parametrize("name", MIXERS)
def test_steps_with_kept_inputs_equal_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "record", repeat_step)
    model = build(name, "cpu", torch.float64)
    eager, prepared = Engine(model, rows=5, capacity=64), Engine(model, rows=5, capacity=64)
    prepared.runner.graphs = DecodeGraphs(prepared.runner.decode_step, 5, torch.device("cpu"))
    assert generate(prepared) == generate(eager)
    assert {rows for rows, _, _ in prepared.runner.graphs.graphs} == {1, 2, 4, 5}


@pytest.mark.parametrize("name", ["attention", "window", "hybrid"])
@pytest.mark.parametrize("kind", ["lookahead", "draft model"])
def test_drafts_are_verified_by_graphs(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "record", repeat_step)
    model = build(name, "cpu", torch.float64)
    drafter = Lookahead() if kind == "lookahead" else DraftModel(perturbed(model))
    engine = Engine(model, rows=3, capacity=64, speculation=drafter, draft_tokens=6)
    runners = [engine.runner, *([drafter.runner] if isinstance(drafter, DraftModel) else [])]
    for runner in runners:
        runner.graphs = DecodeGraphs(runner.decode_step, 3, torch.device("cpu"))
    greedy = kind == "draft model"  # drafts that are drawn give other tokens with the same distribution
    assert generate(engine, greedy) == generate(Engine(model, rows=3, capacity=64), greedy)
    for runner in runners:
        assert runner.graphs is not None and any(length > 1 for _, length, _ in runner.graphs.graphs)
    assert 0 < engine.metrics()["accepted_draft_tokens"] < engine.metrics()["draft_tokens"]


def perturbed(model: DecoderModule) -> DecoderModule:
    """A draft model that often agrees with this one."""
    copy = deepcopy(model)
    for i, parameter in enumerate(copy.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i), dtype=parameter.dtype)
        parameter.data += 0.1 * parameter.std() * noise
    return copy


def test_drafts_are_verified_eagerly_if_they_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(graphs: DecodeGraphs, rows: int, span: int, length: int) -> tuple[Any, Tensor]:
        if length > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return repeat_step(graphs, rows, span, length)

    monkeypatch.setattr(DecodeGraphs, "record", record)
    model = build("attention", "cpu", torch.float64)
    engine = Engine(model, rows=3, capacity=64, speculation=Lookahead())
    engine.runner.graphs = DecodeGraphs(engine.runner.decode_step, 3, torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"capturing\); drafts are verified eagerly"):
        tokens = generate(engine)
    assert tokens == generate(Engine(model, rows=3, capacity=64)) and engine.runner.graphs is not None


def test_drafters_that_read_hidden_states_run_eagerly_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(runner: Runner) -> None:
        runner.graphs = DecodeGraphs(runner.decode_step, 3, torch.device("cpu"))

    monkeypatch.setattr(Runner, "compile", compile)
    model = build("attention", "cpu", torch.float64)
    with pytest.warns(UserWarning, match="compile has no effect with a drafter that reads hidden states"):
        engine = Engine(model, rows=3, capacity=64, compile=True, speculation=METHODS["medusa"](model))
    assert engine.runner.graphs is None
    assert generate(engine, greedy=True) == generate(Engine(model, rows=3, capacity=64), greedy=True)


def test_graphs_of_several_tokens_have_a_limit() -> None:
    graphs = DecodeGraphs(lambda *arguments: torch.zeros(1), 64, torch.device("cpu"))
    assert graphs.fits(64, 1) and graphs.fits(8, 8) and graphs.fits(3, 16)
    assert not graphs.fits(9, 8) and not graphs.fits(1, 17)


def test_prompts_in_chunks_of_one_token_are_no_decode_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "record", repeat_step)
    engine = Engine(build("attention", "cpu", torch.float64), rows=2, capacity=64, chunk=1)
    engine.runner.graphs = DecodeGraphs(engine.runner.decode_step, 2, torch.device("cpu"))
    request = engine.submit([5, 6, 7, 8], Sampling(max_new=3, temperature=0, prompt_logprobs=0))
    while not engine.idle:
        engine.step()
    assert request.error is None and len(request.new) == 3 and len(request.prompt_logprobs) == 3


@pytest.mark.parametrize("warm", [True, False])
def test_a_step_that_cannot_be_captured_runs_eagerly(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graphs: DecodeGraphs, rows: int, span: int, length: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(DecodeGraphs, "record", fail)
    model = build("attention", "cpu", torch.float64)
    engine = Engine(model, rows=5, capacity=64)
    engine.runner.graphs = DecodeGraphs(engine.runner.decode_step, 5, torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"not permitted when stream is capturing\); decoding eagerly"):
        if warm:
            engine.warm_up()
        tokens = generate(engine)
    assert engine.runner.graphs is None and tokens == generate(Engine(model, rows=5, capacity=64))


def test_sizes_are_powers_of_two_and_all_rows() -> None:
    graphs = DecodeGraphs(lambda *arguments: torch.zeros(1), 12, torch.device("cpu"))
    assert graphs.sizes == [1, 2, 4, 8, 12]
    assert [decode_size(rows, 12) for rows in (1, 3, 8, 9, 12)] == [1, 4, 8, 12, 12]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_graphs_equal_eager_steps_on_a_gpu(name: str) -> None:
    model = build(name, "cuda", torch.float32)
    prepared = Engine(model, rows=5, capacity=64, compile=True)
    done: list[tuple[int, int]] = []
    prepared.warm_up(lambda count, total: done.append((count, total)))
    assert done[0] == (0, 4) and done[-1] == (4, 4)
    assert generate(prepared) == generate(Engine(model, rows=5, capacity=64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_graphs_in_bfloat16_are_as_close_to_float64_as_eager_steps(name: str) -> None:
    model, exact = build(name, "cuda", torch.bfloat16), build(name, "cuda", torch.float64)
    exact.load_state_dict(model.state_dict())
    prompt, errors = list(range(9)), []
    for compile in (True, False):
        tokens = Engine(model, rows=2, capacity=64, compile=compile).generate(
            prompt, Sampling(max_new=20, temperature=0)
        )
        ids = torch.tensor([[*prompt, *(token.id for token in tokens)]], device="cuda")
        with torch.inference_mode():
            logprobs = exact(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs[range(20), ids[0, len(prompt) :]]
        errors.append((torch.tensor([token.logprob for token in tokens], device="cuda") - expected).abs().max())
    assert errors[0] <= 2 * errors[1] + 0.01


def test_sublayers_of_many_kinds_may_be_compiled() -> None:
    """All sublayers of a model share one compiled function; torch would run those beyond its limit eagerly."""
    kinds = 12
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    def add(x: torch.Tensor, kind: int) -> torch.Tensor:
        return x + kind

    call = torch.compile(add, backend=backend, dynamic=False, **COMPILE_OPTIONS)
    with allow_recompiles():
        for kind in range(kinds):
            call(torch.ones(2), kind)
    assert len(traced) == kinds
