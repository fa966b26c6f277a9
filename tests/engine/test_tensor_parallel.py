"""Tensor parallel engines of two processes with gloo: the tokens of one process, over every kind of layer."""

from collections.abc import Iterator

import pytest
import torch

from regard.adapt import AdapterError
from regard.adapt.lora_weights import LoraWeights
from regard.engine.beam import Beams
from regard.engine.engine import Engine
from regard.engine.ranks import Ranks
from regard.engine.request import Sampling
from regard.engine.tensor_parallel import local_states, shard_model
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba2 import Mamba2
from regard.spec import SpecError

GREEDY = Sampling(max_new=24, temperature=0)
GROUPED = Attention(4, kv_heads=2, position=Rope(), qk_norm=RMSNorm(), gate="head", bias=True)
LAYERS = (
    Block((Sublayer(GROUPED), Sublayer(FeedForward(48, bias=True)))),
    Block((Sublayer(Attention(4, kv_heads=4, position=Rope(), mask=Window(6))), Sublayer(SwiGLU(48)))),
    Block((Sublayer(LatentAttention(4, rank=8, nope_dim=8, rope_dim=4)), Sublayer(Experts(4, 2, SwiGLU(16))))),
    Block(
        (Sublayer(Mamba2(state=8, head_dim=8)), Sublayer(Experts(4, 2, FeedForward(16, bias=True), shared=SwiGLU(16))))
    ),
)


def build(device: torch.device, vocab: int = 60, layers: tuple[Block, ...] = LAYERS) -> DecoderModule:
    model = Decoder(vocab=vocab, width=32, layers=(Repeat(layers),), context=128).build(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4 if parameter.dim() > 1 else 1
    return model.double().to(device)


@pytest.fixture(scope="module")
def single() -> Engine:
    return Engine(build(torch.device("cpu")), rows=4)


@pytest.fixture(scope="module")
def parallel() -> Iterator[Engine]:
    """With blocks for 160 tokens only, so that four long requests do not fit."""
    threads = torch.get_num_threads()
    with Ranks(build, 2, "cpu") as ranks:
        yield ranks.open_engine(build(torch.device("cpu")), rows=4, chunk=32, blocks=10)
    torch.set_num_threads(threads)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(60, (length,), generator=generator).tolist() for length in lengths]


def run(engine: Engine, requests: list) -> list[list[int]]:
    while not engine.idle:
        engine.step()
    assert not any(request.error for request in requests)
    return [[token.id for token in request.new] for request in requests]


def alone(engine: Engine, ids: list[int], sampling: Sampling = GREEDY) -> list[int]:
    return [token.id for token in engine.generate(ids, sampling)]


@pytest.mark.slow
def test_tokens_of_ragged_batches_equal_those_of_one_process(parallel: Engine, single: Engine) -> None:
    ids = prompts(3, 17, 1, 40, 9, 33)
    sampled = Sampling(max_new=12, seed=5, top_logprobs=3)
    settings = [GREEDY if i % 2 else sampled for i in range(len(ids))]
    found = run(parallel, [parallel.submit(*pair) for pair in zip(ids, settings, strict=True)])
    assert found == [alone(single, *pair) for pair in zip(ids, settings, strict=True)]


@pytest.mark.slow
def test_preempted_requests_and_reused_prefixes_give_the_same_tokens(parallel: Engine, single: Engine) -> None:
    ids = prompts(30, 31, 32, 33)
    before = parallel.metrics()
    found = run(parallel, [parallel.submit(each, GREEDY) for each in ids])
    assert found == [alone(single, each) for each in ids]
    assert parallel.metrics()["preemptions"] > before["preemptions"]
    longer = [ids[3] + [7, 8], ids[3] + [9]]
    hits = parallel.metrics()["prefix_hit_tokens"]
    for each in (ids[3], *longer):
        assert run(parallel, [parallel.submit(each, GREEDY)]) == [alone(single, each)]
    assert parallel.metrics()["prefix_hit_tokens"] >= hits + 2 * 32


@pytest.mark.slow
def test_cancelled_requests_and_searches_leave_the_ranks_equal(parallel: Engine, single: Engine) -> None:
    first, second = (parallel.submit(each, GREEDY) for each in prompts(20, 21))
    for _ in range(3):
        parallel.step()
    parallel.cancel(first)
    assert run(parallel, [second]) == [alone(single, prompts(20, 21)[1])]
    ids, beams = prompts(12)[0], Beams(3)
    found, expected = (
        engine.beam_search(ids, beams, Sampling(max_new=8, temperature=0)) for engine in (parallel, single)
    )
    assert [beam.ids for beam in found] == [beam.ids for beam in expected]
    scored = Sampling(max_new=2, temperature=0, prompt_logprobs=1)
    requests = [engine.submit(ids, scored) for engine in (parallel, single)]
    for engine, request in zip((parallel, single), requests, strict=True):
        run(engine, [request])
    logprobs = [torch.tensor([token.logprob for token in request.prompt_logprobs]) for request in requests]
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_adapters_are_refused(parallel: Engine) -> None:
    with pytest.raises(AdapterError, match="this engine loads no adapters"):
        parallel.load_adapter("a", LoraWeights({}, 1, 1.0))


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="kv_heads=2 is not divisible by tensor=4; choose tensor from 1, 2"):
        shard_model(build(torch.device("cpu")), 0, 4)
    with pytest.raises(SpecError, match="hidden width 16 .* not divisible by tensor=3"):
        shard_model(build(torch.device("cpu"), layers=LAYERS[3:]), 0, 3)
    with pytest.raises(SpecError, match="no part of this model can be distributed"):
        shard_model(build(torch.device("cpu"), 61, (Block((Sublayer(Mamba2(state=8, head_dim=8)),)),)), 0, 2)
    with pytest.raises(ValueError, match="size=1; use at least 2"):
        Ranks(build, 1, "cpu")


def test_a_rank_has_half_of_the_matrices_and_of_the_keys() -> None:
    whole, half = build(torch.device("cpu")), build(torch.device("cpu"))
    split = shard_model(half, 1, 2)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (whole, half)]
    replicated = sum(p.numel() for i in (2, 3) for p in whole.stack.blocks[i].sublayers[0].parameters())
    assert 2 * sizes[1] < sizes[0] + replicated + 700  # norms, biases and routers
    states = local_states(half, split, half.spec.memory(), 2)
    heads = [states[i][0].arrays["k"][0] for i in range(2)]
    assert heads == [1, 2] and states[2] == half.spec.memory()[2] and states[3] == half.spec.memory()[3]
