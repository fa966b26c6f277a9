"""Requests with different adapters in one engine: each gets the tokens that it gets alone with its adapter.

The expected tokens are those of an engine for one model with one adapter (LoRALinear), without other requests.
"""

import copy
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from regard.adapt import AdapterError, LoRA, add_lora, disable_adapters
from regard.adapt.lora_weights import lora_weights, without_gradients
from regard.adapt.targets import select_weights
from regard.engine.beam import Beams
from regard.engine.contrastive import ContrastiveOptions
from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.position.rope import Rope
from regard.parts.recurrent import LSTM
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from tests.laws import MODELS, OTHERS, VOCAB, WIDTH, block, build, decoder, random_ids

GREEDY = Sampling(max_new=7, temperature=0)
LINEARS = (
    "q_proj",
    "latent_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # of latent attention: no stacked ones
KINDS = {  # mixers and feed-forward, and the layers that have adapters
    "gqa": ([Attention(4, 2, position=Rope())], None, "all-linear"),
    "window and full": (
        [Attention(4, 2, mask=Window(5)), Attention(4, position=Rope())],
        None,
        ("v_proj", "down_proj"),
    ),
    "mla": ([LatentAttention(3, 8, 6, 4, position=Rope())], None, LINEARS),
    "experts": ([Attention(4, 2)], Experts(4, 2, SwiGLU(12), shared=SwiGLU(8)), "all-linear"),
    "mamba": ([Mamba(4)], None, "all-linear"),
    "mamba2 and full": ([Mamba2(4, 8), Attention(4, 2)], None, "all-linear"),
    "lstm": ([LSTM()], None, "all-linear"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, DecoderModule]:
    def body(mixer, ffn):
        return block(mixer) if ffn is None else block(mixer, ffn)

    return {name: build(decoder(*(body(m, ffn) for m in mixers))) for name, (mixers, ffn, _) in KINDS.items()}


def adapted(model: nn.Module, rank: int, targets="all-linear") -> nn.Module:
    """A copy of the model with one random adapter; the weights of the model are shared. Rank 3: DoRA, 8: rsLoRA."""
    version = without_gradients(model)
    dora = rank == 3 and not any(weight.stacked for weight in select_weights(version, targets).values())
    add_lora(version, LoRA(rank, 4.0 + rank, targets, rslora=rank == 8, dora=dora), seed=rank)
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in version.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.4, generator=generator)
        if "lora_magnitude_vector" in name:
            parameter.data *= torch.linspace(0.5, 1.5, len(parameter)).to(parameter)
    return version.eval()


def open_engine(model: nn.Module, rows: int = 3, blocks: int = 40, chunk: int = 8, **options) -> Engine:
    return Engine(model, rows=rows, capacity=60, store=partial(Paged, block=4, blocks=blocks), chunk=chunk, **options)


def run(engine: Engine, *requests: Request) -> None:
    while any(request.finish is None for request in requests):
        engine.step()


def tokens(request: Request) -> list[tuple[int, float]]:
    assert request.finish in ("length", "stop"), request.error
    return [(token.id, round(token.logprob, 9)) for token in request.new]


def generate(engine: Engine, ids: list[int], **options) -> list[tuple[int, float]]:
    request = engine.submit(ids, GREEDY, **options)
    run(engine, request)
    return tokens(request)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, seed=seed).tolist()


@pytest.mark.ledger("lora.multi")
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_adapters_equal_each_alone(models, kind: str) -> None:
    """With preemption, shared prefixes, chunks of prompts, requests that join, and more adapters than slots."""
    model, targets, rng = models[kind], KINDS[kind][2], random.Random(1)
    versions = {"none": model} | {f"rank {rank}": adapted(model, rank, targets) for rank in (3, 8, 9, 1)}
    alone = {name: open_engine(each, rows=1, prefix_cache=False) for name, each in versions.items()}
    engine = open_engine(model, rows=4, blocks=24, max_loras=3, queue=50)
    for name in list(versions)[1:]:
        engine.load_adapter(name, lora_weights(versions[name]))
    prefix = prompt(13)
    jobs = [
        (prefix[: rng.randrange(1, 14)] + prompt(rng.randrange(1, 9), seed), rng.choice(list(versions)))
        for seed in range(6 if kind == "experts" else 12)
    ]
    requests, waiting = [], list(jobs)
    while waiting or not engine.idle:
        for _ in range(min(rng.choice([0, 1, 3]), len(waiting))):
            ids, name = waiting.pop(0)
            requests.append(engine.submit(ids, GREEDY, adapter=None if name == "none" else name))
        engine.step()
        if rng.random() < 0.25 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    for request, (ids, name) in zip(requests, jobs, strict=True):
        assert tokens(request) == generate(alone[name], ids), (name, len(ids))
    assert engine.metrics()["prefix_hit_tokens"] > 0 and engine.metrics()["preemptions"] > 0
    assert len({tuple(generate(alone[name], prefix)) for name in versions}) == len(versions), "adapters have no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if spec.kind == "decoder"])
def test_mixed_adapters_equal_each_alone_for_every_decoder(name: str) -> None:
    if name.startswith("latent"):
        pytest.skip("all-linear includes stacked parameters, which are refused by name")
    model = build(MODELS[name])
    versions = {None: model, "a": adapted(model, 3), "b": adapted(model, 9)}
    engine = Engine(model, rows=4, chunk=8, capacity=16)
    for each in ("a", "b"):
        engine.load_adapter(each, lora_weights(versions[each]))
    requests = [engine.submit(prompt(8 - i), GREEDY, adapter=each) for i, each in enumerate(("a", None, "b", "b"))]
    run(engine, *requests)
    for i, (request, each) in enumerate(zip(requests, ("a", None, "b", "b"), strict=True)):
        assert tokens(request) == generate(Engine(versions[each], rows=1, capacity=16), prompt(8 - i))


def test_float32_chooses_the_most_likely_token_up_to_near_ties(models) -> None:
    model = copy.deepcopy(models["gqa"]).float()
    versions = [model, adapted(model, 3), adapted(model, 8)]
    engine = open_engine(model, rows=6)
    engine.load_adapter("a", lora_weights(versions[1]))
    engine.load_adapter("b", lora_weights(versions[2]))
    requests = [engine.submit(prompt(5 + i, i), GREEDY, adapter=(None, "a", "b")[i % 3]) for i in range(9)]
    run(engine, *requests)
    for i, request in enumerate(requests):
        with torch.inference_mode():
            logits = versions[i % 3](torch.tensor([request.tokens[:-1]]))[0, len(request.ids) - 1 :]  # (new, V)
        chosen = logits.gather(-1, torch.tensor(request.tokens[len(request.ids) :]).unsqueeze(-1)).squeeze(-1)
        assert (logits.amax(-1) - chosen).max() < 1e-4


def test_without_an_adapter_nothing_changes(models) -> None:
    """Bit for bit, also beside requests with adapters in one batch."""
    model = models["gqa"]
    plain, engine = open_engine(model), open_engine(model)
    expected = [token.logprob for token in plain.generate(prompt(9), GREEDY)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.load_adapter("a", lora_weights(adapted(model, 4)))
    assert [token.logprob for token in engine.generate(prompt(9), GREEDY)] == expected
    beside = engine.submit(prompt(9), GREEDY, adapter="a")
    request = engine.submit(prompt(9), GREEDY)
    two = [plain.submit(prompt(9), GREEDY), plain.submit(prompt(9), GREEDY, salt="other")]
    run(engine, beside, request)
    run(plain, *two)
    assert tokens(request) == tokens(two[0])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_prefix_is_not_shared_with_the_model_without_its_adapter(models) -> None:
    model = adapted(models["gqa"], 3)
    engine, expected = open_engine(model), generate(open_engine(models["gqa"]), prompt(20))
    with_adapter = generate(engine, prompt(20))
    with disable_adapters(model):
        assert generate(engine, prompt(20)) == expected != with_adapter
    assert generate(engine, prompt(20)) == with_adapter and engine.metrics()["prefix_hit_tokens"] > 0


def test_prefixes_of_different_adapters_are_not_shared(models) -> None:
    model = models["gqa"]
    engine, ids = open_engine(model), prompt(22)
    engine.load_adapter("a", lora_weights(adapted(model, 3)))
    engine.load_adapter("b", lora_weights(adapted(model, 4)))

    def hits(adapter: str | None) -> int:
        before = engine.metrics()["prefix_hit_tokens"]
        generate(engine, ids, adapter=adapter)
        return engine.metrics()["prefix_hit_tokens"] - before

    assert [hits(each) for each in (None, "a", "b", None, "a", "b")] == [0, 0, 0, 20, 20, 20]
    engine.unload_adapter("a")
    engine.load_adapter("a", lora_weights(adapted(model, 3)))  # the same weights, but this is not known
    assert [hits(each) for each in ("a", "a", "b")] == [0, 20, 20]


def test_requests_at_once_with_one_prompt_and_different_adapters(models) -> None:
    """The second does not wait for the first one's prompt, as it would with the same adapter."""
    model, ids = models["gqa"], prompt(20)
    versions = {"a": adapted(model, 3), "b": adapted(model, 4)}
    engine = open_engine(model)
    for name, each in versions.items():
        engine.load_adapter(name, lora_weights(each))
    requests = [engine.submit(ids, GREEDY, adapter=name) for name in ("a", "b", "a")]
    assert [request.leader for request in requests] == [None, None, requests[0]]
    run(engine, *requests)
    for request, name in zip(requests, ("a", "b", "a"), strict=True):
        assert tokens(request) == generate(open_engine(versions[name]), ids)


@pytest.mark.ledger("lora.bound")
def test_an_adapter_of_another_base_is_refused_with_both_shapes(models) -> None:
    small = models["gqa"]
    wide = (
        Decoder(vocab=31, width=16, layers=(Repeat((block(Attention(4, 2, position=Rope())),), 2),)).build(0).double()
    )
    engine = open_engine(wide)
    with pytest.raises(AdapterError, match=r"q_proj has A \(3, 24\) and B \(24, 3\), but this model needs \(3, 16\)"):
        engine.load_adapter("a", lora_weights(adapted(small, 3, ("q_proj",))))
    with pytest.raises(AdapterError, match="in_proj, for which requests of one batch cannot have different adapters"):
        engine.load_adapter("a", lora_weights(adapted(models["mamba"], 3, ("in_proj",))))
    assert engine.adapters == () and engine.loras.adapted is None


def test_layers_that_cannot_have_many_adapters_are_refused_by_name(models) -> None:
    with pytest.raises(AdapterError, match="k_up is a stacked parameter, whose adapter cannot be mixed"):
        lora_weights(adapted(models["mla"], 3))
    head = adapted(models["gqa"], 3, ("head",))
    with pytest.raises(AdapterError, match="the adapter changes head, for which requests of one batch cannot"):
        open_engine(models["gqa"]).load_adapter("a", lora_weights(head))


def test_beam_and_contrastive_search_with_adapters(models) -> None:
    model, ids = models["gqa"], prompt(9)
    versions = {"a": adapted(model, 5), "b": adapted(model, 4)}
    engine = open_engine(model, rows=5, blocks=60, max_loras=1)
    for name, each in versions.items():
        engine.load_adapter(name, lora_weights(each))
    running = engine.submit(ids, GREEDY, adapter="a")
    engine.step()
    for name, each in versions.items():
        alone = open_engine(each, rows=4)
        found = engine.beam_search(ids, Beams(3), GREEDY, adapter=name)
        assert [beam.ids for beam in found] == [beam.ids for beam in alone.beam_search(ids, Beams(3), GREEDY)]
        options = ContrastiveOptions(3, 0.4)
        search = engine.contrastive_search(ids, options, GREEDY, adapter=name)
        expected = alone.contrastive_search(ids, options, GREEDY)
        assert [token.id for token in search] == [token.id for token in expected]
        assert [token.logprob for token in search] == pytest.approx([token.logprob for token in expected], abs=1e-12)
    run(engine, running)
    assert tokens(running) == generate(open_engine(versions["a"]), ids)


def test_n_samples_and_prompt_logprobs(models) -> None:
    model, ids = models["gqa"], prompt(9)
    engine, alone = open_engine(model), open_engine(adapted(model, 3))
    engine.load_adapter("a", lora_weights(adapted(model, 3)))
    sampling = Sampling(max_new=4, seed=3, prompt_logprobs=0)
    for found, expected in zip(
        engine.submit_n(ids, sampling, 2, adapter="a"), alone.submit_n(ids, sampling, 2), strict=True
    ):
        run(engine, found)
        run(alone, expected)
        assert tokens(found) == tokens(expected)
        logprobs = [[token.logprob for token in request.prompt_logprobs] for request in (found, expected)]
        assert torch.allclose(*map(torch.tensor, logprobs), atol=1e-9)


def test_an_encoder_decoder_with_adapters() -> None:
    name, spec = next((name, spec) for name, spec in OTHERS.items() if isinstance(spec, EncoderDecoder))
    model, source = build(spec), [[5, 6, 7, 8], [9, 3]]
    versions = {None: model, "a": adapted(model, 3)}
    engine = Engine(model, rows=3, capacity=12, source_capacity=12)
    engine.load_adapter("a", lora_weights(versions["a"]))
    requests = [engine.submit([1], GREEDY, source[i], adapter=each) for i in (0, 1) for each in versions]
    run(engine, *requests)
    for request, (i, each) in zip(requests, [(i, each) for i in (0, 1) for each in versions], strict=True):
        alone = Engine(versions[each], rows=1, capacity=12, source_capacity=12)
        assert [t.id for t in request.new] == [t.id for t in alone.generate([1], GREEDY, source[i])], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_decode_step() -> None:
    model = build(Decoder(VOCAB, WIDTH, (Repeat((block(Attention(4, 2, position=Rope())),)),)))
    versions = {None: model, "a": adapted(model, 3), "b": adapted(model, 4)}
    engine = open_engine(model, compile=True)
    if engine.runner.compiled is None:
        pytest.skip("torch cannot compile here")
    engine.load_adapter("a", lora_weights(versions["a"]))
    assert engine.loras.runner.compiled is None  # it would take long while the engine runs
    engine.warm_up()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine.load_adapter("b", lora_weights(versions["b"]))
    requests = [engine.submit(prompt(5, i), GREEDY, adapter=each) for i, each in enumerate(versions)]
    run(engine, *requests)
    assert engine.loras.runner.compiled is not None
    for i, (request, each) in enumerate(zip(requests, versions.values(), strict=True)):
        assert tokens(request) == generate(open_engine(each), prompt(5, i))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    engine.load_adapter("c", lora_weights(adapted(model, 9)))
    assert engine.loras.runner.compiled is None
    with pytest.warns(UserWarning, match="decoded eagerly: .* a higher rank"):
        assert generate(engine, prompt(5), adapter="c") == generate(open_engine(adapted(model, 9)), prompt(5))


def test_requests_with_adapters_that_are_decoded_eagerly_warn_once(models) -> None:
    engine = open_engine(models["gqa"])
    engine.runner.compiled = engine.runner.decode_step  # as if it were compiled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_adapter("a", lora_weights(adapted(models["gqa"], 3)))
        generate(engine, prompt(5))
    with pytest.warns(UserWarning, match="decoded eagerly.*--lora-modules.*warm_up"):
        expected = generate(engine, prompt(5), adapter="a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(engine, prompt(5), adapter="a") == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gqa", "window and full", "mla", "experts", "mamba2 and full"])
def test_mixed_adapters_in_cuda_graphs(models, kind: str) -> None:
    """Log-probabilities are as close to those of the model with one adapter, in float64, as without graphs."""
    if kind == "experts":  # torch's grouped product can be captured in bfloat16, and needs aligned rows
        model = build(decoder(block(Attention(4, 2), Experts(4, 2, SwiGLU(16), shared=SwiGLU(8)))), torch.bfloat16)
    else:
        model = copy.deepcopy(models[kind]).float()
    slack = 1e-4 if model.embedding.weight.dtype == torch.float32 else 0.02
    versions = [each.cuda() for each in (model, *(adapted(model, rank, KINDS[kind][2]) for rank in (3, 9)))]
    exact, errors = [copy.deepcopy(each).double() for each in versions], []
    for compile in (False, True):
        engine = open_engine(model, rows=6, blocks=96, compile=compile)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "requests with adapters are decoded by CUDA graphs of the ordinary")
            for name, version in zip("ab", versions[1:], strict=True):
                engine.load_adapter(name, lora_weights(version))
        engine.loras.warm_up()  # only the graphs with adapters: every batch below has some
        chosen, requests = (1, 2, 0, 1, 2, 0, 1, 2), []
        for i, version in enumerate(chosen):
            requests.append(engine.submit(prompt(5 + i, i), GREEDY, adapter=(None, "a", "b")[version]))
            engine.step()
        run(engine, *requests)
        graphs = engine.loras.runner.graphs
        assert graphs is not None and graphs.graphs if compile else graphs is None
        errors.append(max(largest_error(exact[v], request) for v, request in zip(chosen, requests, strict=True)))
    assert errors[1] <= 2 * errors[0] + slack


@torch.inference_mode()
def largest_error(exact: nn.Module, request: Request) -> float:
    """Of the log-probabilities of the new tokens."""
    ids = torch.tensor([request.tokens], device="cuda")
    logprobs = exact(ids[:, :-1])[0, len(request.ids) - 1 :].log_softmax(-1)  # (new, V)
    expected = logprobs.gather(-1, ids[0, len(request.ids) :, None])[:, 0].cpu()
    return (torch.tensor([token.logprob for token in request.new]) - expected).abs().max().item()
