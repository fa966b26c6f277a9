"""Every model on a GPU equals the CPU in training and decoding, in float32, bfloat16 and compiled."""

from contextlib import nullcontext

import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from tests.laws import MODELS, build, error, random_ids

pytestmark = pytest.mark.gpu
every_model = pytest.mark.parametrize("name", MODELS)
LENGTH, CAPACITY = 24, 32


@pytest.fixture(autouse=True)
def exact_products():
    """Disable TF32, which would round the factors of float32 products to 10 bits."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    previous = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    torch._dynamo.reset()  # torch 2.11 compiles a function at most eight times; every engine compiles its step
    yield
    for backend, allowed in zip(backends, previous, strict=True):
        backend.allow_tf32 = allowed


@every_model
def test_logits_and_gradients_equal_those_of_the_cpu(name: str) -> None:
    tokens = random_ids(2, LENGTH)
    exact = build(MODELS[name]).requires_grad_()
    model = build(MODELS[name], torch.float32).cuda().requires_grad_()
    weights = torch.randn(2, LENGTH, exact.spec.vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected, found = exact(tokens), model(tokens.cuda())
    assert error(found.cpu().double(), expected) < 1e-4
    (expected * weights).sum().backward()
    (found * weights.cuda().float()).sum().backward()
    exact_parameters = dict(exact.named_parameters())
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert error(parameter.grad.cpu().double(), exact_parameters[path].grad) < 1e-3, path


@every_model
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_cached_equals_whole(name: str, kind: str) -> None:
    model = build(MODELS[name], torch.float32).cuda()
    limits = [s.body.max_exact_cache or LENGTH for block in model.spec.blocks for s in block.sublayers]
    tokens, memory = random_ids(2, min(LENGTH, *limits)).cuda(), model.spec.memory()
    store = (
        Contiguous(memory, 2, CAPACITY, torch.float32, "cuda")
        if kind == "contiguous"
        else Paged(memory, 2, CAPACITY, torch.float32, "cuda", block=4, blocks=16)
    )
    assert all(store.reserve(row, LENGTH) for row in range(2))
    steps = [
        model(
            token, layout := TokenLayout(torch.full((2, 1), t, device="cuda")), store.begin_forward(layout, check=False)
        )
        for t, token in enumerate(tokens.split(1, 1))
    ]
    assert error(torch.cat(steps, 1), model(tokens)) < 1e-4


@pytest.mark.parametrize("name", ["grouped-query", "hybrid", "experts", "window"])  # compiling each takes long
@pytest.mark.parametrize("store", ["contiguous", "paged"])
def test_a_compiled_engine_generates_the_same_tokens(name: str, store: str) -> None:
    """Greedy tokens of three concurrent requests, eager and compiled; float64 avoids near ties."""
    model = build(MODELS[name]).cuda()
    eager, compiled = (Engine(model, rows=4, capacity=64, store=store, compile=compile) for compile in (False, True))
    # In float64 the host reads how many rows each expert has, so the step cannot be captured.
    refused = pytest.warns(UserWarning, match="cannot be captured as a graph .*; decoding eagerly")
    with refused if name == "experts" else nullcontext():
        generated = generate(compiled)
    assert generated == generate(eager)


def generate(engine: Engine) -> list[list[int]]:
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    requests = [engine.submit(prompt, Sampling(max_new=12, temperature=0)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return [[token.id for token in request.new] for request in requests]


@every_model
def test_bfloat16_is_close_to_float32(name: str) -> None:
    tokens = random_ids(2, LENGTH)
    expected = build(MODELS[name])(tokens)
    model = build(MODELS[name], torch.float32).cuda().bfloat16()
    found = model(tokens.cuda()).cpu().double()
    assert found.isfinite().all()
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() < 0.2
