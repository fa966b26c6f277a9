"""Weights of few bits, and drafts, on one GPU: `python -m benchmarks.gpu.quantized [matrices] [engine] [speculation]`.

    matrices      the four products of a layer of Llama 8B, for 1 to 32 tokens: microseconds in a CUDA graph, and the
                  largest error relative to float64
    engine        tokens/s of one request to the shape of Llama 8B by `Engine(compile=True)`, the time of its decode
                  graph, and the time to the first token of a prompt of 2,048 tokens
    speculation   tokens/s of one greedy request with a draft model of the first two layers, and without

Each number of bits stands beside bfloat16 in the same run. The weights are random. For the draft model to agree with
its target at a given rate, the outputs of the target's later layers are scaled down, by a factor that bisection finds.
On a CPU the shapes are tiny, to try the script.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.engine import ATTENTION, DEVICE, GPU, block, build, decode_rate, llama_8b, prompt, synchronize
from regard.adapt.gpu_quantized import gpu_weight
from regard.adapt.quantized import quantize_linears
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_model import DraftModel
from regard.formats.base import NumberFormat
from regard.formats.floats import Float
from regard.formats.integers import Integer
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

FORMATS: dict[str, NumberFormat] = {
    "int8": Integer(8),
    "fp8": Float("float8_e4m3fn"),
    "int4, groups of 64": Integer(4, False, 64, "float16"),
    "int4, groups of 128": Integer(4, False, 128, "float16"),
}
MATRICES = {  # outputs, columns, gated, with a norm
    "queries, keys and values": (6144, 4096, False, True),
    "output": (4096, 4096, False, False),
    "gate and up": (28672, 4096, True, True),
    "down": (4096, 14336, False, False),
}
TOKENS = (1, 2, 4, 8, 16, 32)
CACHE = 256 << 20  # bytes of weights that a graph reads before it reads one again: several times the L2 cache


def graph_time(call: Callable[[int], Any], count: int) -> float:
    """Microseconds of call(0) … call(count - 1) in a graph, per call; the median of 20 replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call(i) for i in range(count)]
    del kept
    return replay_time(graph) / count


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


class Product:
    """One matrix of a layer in one format, with the operations around it; several copies, so that none is cached."""

    def __init__(self, name: str, format: NumberFormat | None):
        self.outputs, self.columns, gated, normed = MATRICES[name]
        self.activation = "silu" if gated else None
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.weight = torch.randn(self.outputs, self.columns, device=DEVICE, generator=generator) / self.columns**0.5
        self.weight = self.weight.bfloat16()
        self.norm = torch.rand(self.columns, device=DEVICE, generator=generator).bfloat16() if normed else None
        self.format = format
        if format is None:
            stored: Any = self.weight
            size = stored.nbytes
            self.copies = [stored.clone() for _ in range(max(1, CACHE // size))]
        else:
            stored = format.quantize(self.weight.float())
            size = sum(tensor.nbytes for tensor in stored.values())
            count = max(1, CACHE // size)
            self.copies = [gpu_weight(format, {k: v.clone() for k, v in stored.items()}) for _ in range(count)]
            self.weight = format.dequantize(stored, torch.float32)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        generator = torch.Generator(DEVICE).manual_seed(1)
        x = torch.randn(tokens, self.columns, device=DEVICE, generator=generator).bfloat16()
        plain = self.activation is None and self.norm is None
        outputs = self.outputs if self.activation is None else self.outputs // 2
        residual = torch.randn(tokens, outputs, device=DEVICE, generator=generator).bfloat16() if plain else None
        return x, residual

    def run(self, tokens: int, tiles: Any = None) -> Callable[[int], Tensor]:
        from regard.kernels.triton_decode_linear import launch
        from regard.kernels.triton_quantized_linear import launch_quantized

        x, residual = self.inputs(tokens)
        multiply: Any = launch if self.format is None else launch_quantized
        return lambda i: multiply(x, self.copies[i], self.norm, 1e-5, None, residual, self.activation, tiles)

    def error(self, tokens: int, tiles: Any = None) -> float:
        """The norm of the error, relative to that of the result in float64."""
        x, residual = self.inputs(tokens)
        wide = x.double()
        if self.norm is not None:
            wide = torch.nn.functional.rms_norm(wide, wide.shape[-1:], self.norm.double(), 1e-5)
        y = wide @ self.weight.double().T
        if self.activation is not None:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        y = y if residual is None else y + residual.double()
        return float((self.run(tokens, tiles)(0).double() - y).norm() / y.norm())

    def time(self, tokens: int, tiles: Any = None) -> float:
        return graph_time(self.run(tokens, tiles), len(self.copies))


def matrices() -> None:
    if not GPU:
        return print("needs a GPU")
    totals: dict[str, dict[int, float]] = {}
    for format_name, format in {"bfloat16": None, **FORMATS}.items():
        for name in MATRICES:
            product = Product(name, format)
            times = {tokens: product.time(tokens) for tokens in TOKENS}
            errors = {tokens: product.error(tokens) for tokens in TOKENS}
            for tokens in TOKENS:
                totals.setdefault(format_name, dict.fromkeys(TOKENS, 0.0))[tokens] += times[tokens]
            shown = " ".join(f"{times[tokens]:7.1f}" for tokens in TOKENS)
            print(f"{format_name:<20} {name:<25} {shown}   errors {errors[1]:.1e} {errors[16]:.1e}", flush=True)
            del product
            torch.cuda.empty_cache()
    print(f"all four, for {TOKENS} tokens: microseconds, and how many times as fast as bfloat16")
    for name, times in totals.items():
        ratios = " ".join(f"{time:6.1f} ({totals['bfloat16'][tokens] / time:4.2f})" for tokens, time in times.items())
        print(f"{name:<20} {ratios}", flush=True)


@torch.inference_mode()
def engine() -> None:
    found: dict[str, list[float]] = {}
    length = 2048 if GPU else 64
    for name, format in {"bfloat16": None, **FORMATS}.items():
        model = llama_8b()
        if format is not None:
            quantize_linears(model, format)
        served = Engine(model, rows=2, capacity=length + 256, compile=True)
        served.warm_up()
        sampling = Sampling(max_new=128 if GPU else 8, temperature=0)
        rate = statistics.median(decode_rate(served, 1, sampling) for _ in range(5))
        graph = 0.0
        if GPU and served.runner.graphs is not None:
            graph = replay_time(served.runner.graphs.graphs[1, 1, served.store.max_span][0])
        first = []
        for trial in range(8):
            ids = prompt(length, model.spec.vocab, trial)
            synchronize()
            begin = time.perf_counter()
            served.generate(ids, Sampling(max_new=1, temperature=0))
            first.append(time.perf_counter() - begin)
        found[name] = [rate, 1e6 / graph if graph else 0.0, 1 / statistics.median(first)]
        ratios = [
            f"{value / base:.2f}" if base else "-" for value, base in zip(found[name], found["bfloat16"], strict=True)
        ]
        print(
            f"{name:<20} {rate:6.1f} tokens/s ({ratios[0]}); decode graph {graph / 1e3:.3f} ms ({ratios[1]}); "
            f"first token of {length} {1e3 * statistics.median(first):.1f} ms ({ratios[2]})",
            flush=True,
        )
        del model, served
        if GPU:
            torch.cuda.empty_cache()


DRAFT_LAYERS = 2 if GPU else 1


def scale_later_layers(model: DecoderModule, factor: float) -> None:
    """Multiply what the layers after those of the draft add to the residual stream."""
    for layer in list(model.stack.blocks)[DRAFT_LAYERS:]:
        attention, feedforward = (sublayer.body for sublayer in layer.sublayers)
        attention.o_proj.weight.data *= factor
        feedforward.down_proj.weight.data *= factor


@torch.inference_mode()
def agreement(target: DecoderModule, draft: DecoderModule) -> float:
    """The share of positions of random tokens at which both have the same most likely next token."""
    ids = torch.randint(target.spec.vocab, (1, 1024), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    layout = TokenLayout.padded([1024], ids.device)
    first, second = (m.logits(m.hidden(ids, layout)[0]).argmax(-1) for m in (target, draft))
    return float((first == second).float().mean())


def pair_of_models(rate: float) -> tuple[DecoderModule, DecoderModule]:
    """A target, and a draft model of its first layers that agrees with it at about this rate on random tokens."""
    target = llama_8b()
    one = block(ATTENTION, SwiGLU(14336)) if GPU else block(Attention(2, head_dim=32, position=Rope()), SwiGLU(128))
    draft = build(128256 if GPU else 256, 4096 if GPU else 64, DRAFT_LAYERS, one)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    low, high, now = 0.0, 1.0, 1.0
    for _ in range(9):
        middle = (low + high) / 2
        scale_later_layers(target, middle / now)
        now = middle
        low, high = (middle, high) if agreement(target, draft) > rate else (low, middle)
    print(f"outputs of the later layers times {now:.4f}: {agreement(target, draft):.2f} agree on random tokens")
    return target, draft


def speculation() -> None:
    sampling = Sampling(max_new=128 if GPU else 16, temperature=0)
    for rate in (0.7, 0.85) if GPU else (0.7,):
        target, draft = pair_of_models(rate)
        engines = {"plain": Engine(target, rows=1, capacity=1024 if GPU else 128, compile=True, memory=0.2)}
        for tokens in (3, 7):
            engines[f"{tokens} draft tokens"] = Engine(
                target, rows=1, capacity=1024 if GPU else 128, compile=True, memory=0.2,
                speculation=DraftModel(draft, compile=True, memory=0.1), draft_tokens=tokens,
            )  # fmt: skip
        rates: dict[str, list[float]] = {name: [] for name in engines}
        outputs: dict[str, list[list[int]]] = {name: [] for name in engines}
        for trial in range(7):
            for name, served in engines.items():
                ids = prompt(128 if GPU else 16, target.spec.vocab, trial)
                request = served.submit(ids, sampling)
                while not request.new:
                    served.step()
                synchronize()
                begin, before = time.perf_counter(), len(request.new)
                while request.finish is None:
                    served.step()
                synchronize()
                if trial:  # graphs are captured in the first one
                    rates[name].append((len(request.new) - before) / (time.perf_counter() - begin))
                outputs[name].append([token.id for token in request.new])
        plain = statistics.harmonic_mean(rates["plain"])
        for name, served in engines.items():
            mean = statistics.harmonic_mean(rates[name])
            same = sum(a == b for a, b in zip(outputs[name], outputs["plain"], strict=True))
            line = f"{name:<15} {mean:6.1f} tokens/s ({mean / plain:.2f}); {same} of {len(outputs[name])} outputs equal"
            if served.speculation is not None:
                facts, rounds = served.metrics(), served.speculation.statistics.drafts
                share = facts["accepted_draft_tokens"] / facts["draft_tokens"]
                line += f"; {share:.2f} of the draft tokens accepted, {facts['tokens_per_draft']:.2f} tokens per round"
                line += f"; draft {1e3 * facts['draft_seconds'] / rounds:.2f} ms and verification "
                line += f"{1e3 * facts['verify_seconds'] / rounds:.2f} ms per round, captures included"
                if GPU:
                    drafter: Any = served.speculation.drafter
                    for label, runner in (("target", served.runner), ("draft", drafter.runner)):
                        graphs = {k[1]: replay_time(g[0]) / 1e3 for k, g in runner.graphs.graphs.items()}
                        line += f"; {label}'s graphs " + ", ".join(f"{n} tokens {t:.2f} ms" for n, t in graphs.items())
            print(line, flush=True)
        del engines, served, target, draft
        if GPU:
            torch.cuda.empty_cache()


PARTS = {"matrices": matrices, "engine": engine, "speculation": speculation}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        print(f"# {name}", flush=True)
        PARTS[name]()
