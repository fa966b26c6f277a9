"""Speed and exactness of decoding with two mixers and two stores: `python -m benchmarks.states`.

On a GPU the model has the shape of Llama 8B, in bf16. Each step runs eagerly, compiled without graph breaks and, on a
GPU, as a captured CUDA graph. Cached logits are compared with those of one forward over the whole sequence. This is a
strict test only on a CPU, in float64: in bf16 rounding can change a greedy token.
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
    store = Paged(memory, 1, CAPACITY, DTYPE, DEVICE, blocks=CAPACITY // 16)
    store.reserve(0, CAPACITY)
    store.upload()  # a compiled step does not
    return store


def make_step(model: DecoderModule, store: Contiguous | Paged, mode: str) -> Step:
    """A greedy step that updates ids and positions in place."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        layout = TokenLayout(positions)
        logits = model(ids, layout, store.begin_forward(layout, check=False))[:, -1]
        ids.copy_(logits.argmax(-1, keepdim=True))
        positions.add_(1)
        return logits

    if mode == "eager":
        return step
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, mode="max-autotune-no-cudagraphs" if GPU else None)


def capture(step: Step, ids: Tensor, positions: Tensor) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(ids, positions)

    def replay(ids: Tensor, positions: Tensor) -> Tensor:
        graph.replay()
        return logits

    return replay


@torch.no_grad()
def measure(model: DecoderModule, kind: str, mode: str) -> str:
    store = open_store(kind, model)
    prompt = torch.randint(VOCAB, (1, PROMPT), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    step = make_step(model, store, mode)
    ids, positions = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.full((1, 1), PROMPT, device=DEVICE)
    for _ in range(3):  # compile and warm up; the prompt overwrites these entries of the store
        step(ids, positions)
    if mode == "graph":
        step = capture(step, ids, positions)
    layout = TokenLayout(torch.arange(PROMPT, device=DEVICE).expand(1, PROMPT))
    first = model(prompt, layout, store.begin_forward(layout, check=False))[:, -1]
    ids.copy_(first.argmax(-1, keepdim=True))
    positions.fill_(PROMPT)
    generated, logits = [ids.clone()], []
    synchronize()
    start = time.perf_counter()
    for _ in range(NEW):
        logits.append(step(ids, positions).clone())
        generated.append(ids.clone())
    synchronize()
    seconds = time.perf_counter() - start
    tokens = torch.cat([prompt, *generated[:-1]], 1)
    whole = model(tokens)[:, PROMPT:]
    error = (whole - torch.stack(logits, 1)).abs().max().item()
    same = (whole.argmax(-1) == torch.cat(generated[1:], 1)).float().mean().item()
    rate = NEW / seconds
    bandwidth = sum(p.numel() * p.element_size() for p in model.parameters()) * rate
    return f"{rate:8.1f} tokens/s  {bandwidth / 1e12:6.3f} TB/s of weights  error {error:.1e}  same tokens {same:.3f}"


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def main() -> None:
    modes = ("eager", "compiled", "graph") if GPU else ("eager", "compiled")
    for name, mixer in {
        "attention": Attention(HEADS, KV_HEADS, position=Rope()),
        "linear": LinearAttention(HEADS),
    }.items():
        model = build(mixer)
        for kind in ("contiguous", "paged"):
            for mode in modes:
                print(f"{name:10} {kind:11} {mode:9} {measure(model, kind, mode)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
