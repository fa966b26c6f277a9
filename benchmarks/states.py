"""One State interface, three ways to decode: `python -m benchmarks.states` (a GPU gets a Llama-8B shape in bf16).

Two mixers × two stores × eager, compiled without graph breaks and, on a GPU, one captured CUDA graph. On a CPU the
cached logits are held against the whole forward in float64; in bf16 equal greedy tokens say little more than "close".
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float64)
WIDTH, HEADS, KV_HEADS, HIDDEN, DEPTH, VOCAB = (4096, 32, 8, 14336, 32, 128256) if GPU else (256, 8, 2, 512, 4, 512)
CAPACITY, PROMPT, NEW = (1024, 64, 128) if GPU else (256, 33, 32)

Step = Callable[[Tensor, Tensor], Tensor]


def build(mixer: Body) -> DecoderModule:
    block = Block((Sublayer(mixer), Sublayer(SwiGLU(HIDDEN))))
    with torch.device(DEVICE):
        model = Decoder(VOCAB, WIDTH, (Repeat((block,), DEPTH),)).build(seed=0)
    return model.to(DTYPE).eval().requires_grad_(False)


def open_store(kind: str, model: DecoderModule) -> Contiguous | Paged:
    memory = model.spec.memory()
    if kind == "contiguous":
        return Contiguous(memory, 1, CAPACITY, DTYPE, DEVICE)
    store = Paged(memory, 1, CAPACITY, CAPACITY // 16, DTYPE, DEVICE)
    store.reserve(0, CAPACITY)
    return store


def stepper(model: DecoderModule, store: Contiguous | Paged, way: str) -> Step:
    """A greedy step that puts the next id and position in place."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        logits = model(ids, now := TokenLayout(positions), store.begin_forward(now, check=False))[:, -1]
        ids.copy_(logits.argmax(-1, keepdim=True))
        positions.add_(1)
        return logits

    if way == "eager":
        return step
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, mode="max-autotune-no-cudagraphs" if GPU else None)


def captured(step: Step, ids: Tensor, positions: Tensor) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(ids, positions)

    def replay(ids: Tensor, positions: Tensor) -> Tensor:
        graph.replay()
        return logits

    return replay


@torch.no_grad()
def measure(model: DecoderModule, kind: str, way: str) -> str:
    store = open_store(kind, model)
    prompt = torch.randint(VOCAB, (1, PROMPT), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    step = stepper(model, store, way)
    ids, positions = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.full((1, 1), PROMPT, device=DEVICE)
    for _ in range(3):  # compile and warm up; what it leaves in the store is overwritten by the prompt
        step(ids, positions)
    if way == "graph":
        step = captured(step, ids, positions)
    first = model(
        prompt,
        now := TokenLayout(torch.arange(PROMPT, device=DEVICE).expand(1, PROMPT)),
        store.begin_forward(now, check=False),
    )[:, -1]
    ids.copy_(first.argmax(-1, keepdim=True))
    positions.fill_(PROMPT)
    said, logits = [ids.clone()], []
    synchronize()
    start = time.perf_counter()
    for _ in range(NEW):
        logits.append(step(ids, positions).clone())
        said.append(ids.clone())
    synchronize()
    seconds = time.perf_counter() - start
    tokens = torch.cat([prompt, *said[:-1]], 1)
    whole = model(tokens)[:, PROMPT:]
    gap = (whole - torch.stack(logits, 1)).abs().max().item()
    same = (whole.argmax(-1) == torch.cat(said[1:], 1)).float().mean().item()
    rate = NEW / seconds
    read = sum(p.numel() * p.element_size() for p in model.parameters()) * rate
    return f"{rate:8.1f} tokens/s  {read / 1e12:6.3f} TB/s of weights  gap {gap:.1e}  same tokens {same:.3f}"


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def main() -> None:
    ways = ("eager", "compiled", "graph") if GPU else ("eager", "compiled")
    for name, mixer in {
        "attention": Attention(HEADS, KV_HEADS, position=Rope()),
        "linear": LinearAttention(HEADS),
    }.items():
        model = build(mixer)
        for kind in ("contiguous", "paged"):
            for way in ways:
                print(f"{name:10} {kind:11} {way:9} {measure(model, kind, way)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
