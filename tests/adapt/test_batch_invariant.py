"""The batch-invariant copy equals the model; on a GPU a request gets bitwise the same logits beside any others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from regard.adapt.batch_invariant import check_batch_invariant, keep_all_tokens, make_batch_invariant
from regard.adapt.lora_weights import LoraWeights
from regard.engine.adapters import Adapters
from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling, Token
from regard.engine.runner import Runner
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import Gated, SwiGLU
from regard.parts.norm import LayerNorm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba2 import Mamba2
from tests.kernels.triton_device import DEVICE

LLAMA = Attention(4, kv_heads=2, head_dim=32, position=Rope())
FEEDFORWARD = SwiGLU(96)
WINDOW = Attention(4, kv_heads=2, head_dim=32, position=Rope(), qk_norm=RMSNorm(), bias=True, mask=Window(5))


def spec_of(*mixers: Any, feedforward: Any = FEEDFORWARD, vocab: int = 64, width: int = 48, times: int = 1) -> Decoder:
    blocks = tuple(Block((Sublayer(mixer), Sublayer(feedforward))) for mixer in mixers)
    return Decoder(vocab, width, (Repeat(blocks, times),))


def build(spec: Decoder, dtype: torch.dtype = torch.float32) -> DecoderModule:
    with torch.device(DEVICE):
        model = spec.build(seed=0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval().requires_grad_(False)


@torch.inference_mode()
def test_prompts_and_decode_steps_equal_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = build(spec_of(WINDOW, feedforward=Gated(96, "gelu_tanh", bias=True)))
    lengths = [11, 1, 6]
    prompts = torch.randint(64, (3, max(lengths)), device=DEVICE)
    results = []
    for network in (model, make_batch_invariant(model)):
        store = Paged(keep_all_tokens(model.spec.memory()), 3, 40, torch.float32, DEVICE)
        for row in range(3):
            store.reserve(row, 40)
        layout = TokenLayout.padded(lengths, DEVICE)
        logits = network(prompts, layout, store.begin_forward(layout))
        parts = [logits[b, :length] for b, length in enumerate(lengths)]
        valid = torch.tensor([[True], [False], [True]], device=DEVICE)
        layout = TokenLayout(torch.tensor(lengths, device=DEVICE).unsqueeze(1), valid=valid)
        step = network(prompts[:, :1], layout, store.begin_forward(layout, check=False))
        parts.append(step[[0, 2], 0])
        results.append(torch.cat(parts))
    assert (results[0] - results[1]).abs().max() <= 1e-5


UNSUPPORTED = {  # what the error names
    r"stack.blocks.1.sublayers.0 \(Mamba2Module\)": spec_of(LLAMA, Mamba2(head_dim=32, state=8)),
    r"stack.blocks.0.sublayers.1 \(ExpertsModule\)": spec_of(LLAMA, feedforward=Experts(4, 2, SwiGLU(32))),
    r"stack.blocks.0.sublayers.0 \(AttentionModule\)": spec_of(replace(LLAMA, softcap=30.0)),
    r"norm \(LayerNorm\)": replace(spec_of(LLAMA), norm=LayerNorm()),
    r"embedding_norm \(RMSNormModule\)": replace(spec_of(LLAMA), embedding_norm=RMSNorm()),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_parts_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {name} of this model; it supports decoders like Llama"):
        make_batch_invariant(UNSUPPORTED[name].build(seed=0))


def test_adapters_other_stores_and_other_devices_are_refused() -> None:
    model = spec_of(LLAMA).build(seed=0)
    with pytest.raises(ValueError, match="batch_invariant needs a CUDA GPU, not cpu: on a CPU, libraries"):
        Engine(model, rows=1, capacity=32, batch_invariant=True)
    with pytest.raises(ValueError, match=r"supports bfloat16 and float16, not torch.float32"):
        check_batch_invariant(model, fake_weight(torch.float32))
    check_batch_invariant(model, fake_weight(torch.bfloat16))
    store = Contiguous(model.spec.memory(), 1, 32, torch.float32, "cpu")
    with pytest.raises(ValueError, match="needs the paged store, not Contiguous"):
        Runner(model, None, store, batch_invariant=True)
    runner = Runner(model, None, Paged(model.spec.memory(), 1, 32, torch.float32, "cpu"), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant does not support adapters beside the model"):
        Adapters(model, runner, 1, 1, compile=False).load("pirate", LoraWeights({}, 1, 1.0))


def fake_weight(dtype: torch.dtype) -> Any:
    """The device and dtype of a weight on a GPU that this machine need not have."""
    return type("Weight", (), {"device": torch.device("cuda"), "dtype": dtype})()


def generate(engine: Engine, prompts: list[list[int]], chosen: list[int], together: bool) -> dict[int, list[Token]]:
    """The tokens of the chosen requests by number, submitted together or one after another."""
    requests: dict[int, Request] = {}
    for i in chosen:
        options: dict[str, Any] = {} if i % 2 else {"temperature": 0.0}
        if i % 4 == 2:
            options |= {"top_logprobs": 3, "repetition_penalty": 1.1}
        requests[i] = engine.submit(prompts[i], Sampling(max_new=40, seed=i, prompt_logprobs=2, **options))
        while not together and not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    assert all(request.error is None for request in requests.values())
    return {i: [*request.prompt_logprobs, *request.new] for i, request in requests.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [True, False])
def test_requests_are_bitwise_the_same_alone_and_beside_others(compile: bool) -> None:
    attention = Attention(8, kv_heads=2, head_dim=64, position=Rope(), qk_norm=RMSNorm())
    window = replace(attention, mask=Window(100))
    model = build(spec_of(attention, window, feedforward=SwiGLU(1024), vocab=1500, width=384, times=2), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 7, 16, 17, 33, 64, 100, 200, 333, 500, 700]
    prompts = [torch.randint(1500, (length,), generator=generator).tolist() for length in lengths]
    every = list(range(len(prompts)))

    def open_engine(rows: int = 12, **options: Any) -> Engine:
        return Engine(model, rows=rows, capacity=800, compile=compile, batch_invariant=True, memory=None, **options)

    alone = generate(open_engine(1, prefix_cache=False), prompts, every, together=False)
    runs: dict[str, Callable[[], dict[int, list[Token]]]] = {
        "together": lambda: generate(open_engine(prefix_cache=False), prompts, every, together=True),
        "chunks": lambda: generate(open_engine(chunk=48, prefix_cache=False), prompts, every, together=True),
        "other rows": lambda: generate(open_engine(5), prompts, every[::-1], together=True),
        "preempted": partial(preempted, open_engine, prompts, every),
    }
    for name, run in runs.items():
        assert run() == alone, name


def preempted(open_engine: Callable[..., Engine], prompts: list[list[int]], every: list[int]) -> dict[int, list[Token]]:
    engine = open_engine(store=partial(Paged, blocks=60), chunk=96)
    tokens = generate(engine, prompts, every, together=True)
    assert engine.metrics()["preemptions"] > 0
    return tokens


@pytest.mark.gpu
def test_a_cached_prefix_changes_no_bit() -> None:
    model = build(spec_of(LLAMA, feedforward=SwiGLU(256), vocab=512, width=128, times=2), torch.bfloat16)
    prompt = torch.randint(512, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = Sampling(max_new=30, temperature=0)
    plain = Engine(model, rows=2, capacity=800, prefix_cache=False, batch_invariant=True)
    cached = Engine(model, rows=2, capacity=800, batch_invariant=True, compile=True)
    for length in (600, 600, 337, 599):
        assert cached.generate(prompt[:length], sampling) == plain.generate(prompt[:length], sampling)
    assert cached.metrics()["prefix_hit_tokens"] >= 1500
