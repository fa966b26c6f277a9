"""Training steps on one GPU, in bfloat16 autocast and compiled: `python -m benchmarks.gpu.train`.

    gpt2-124m    12 layers, width 768, 12 heads, vocabulary 50304, 32 rows of 1024 tokens; beside transformers' GPT-2
    llama-124m   the same sizes with RoPE, RMSNorm and SwiGLU
    llama-1.2b   16 layers, width 2048, 32 heads, 8 kv heads, hidden 8192, vocabulary 128256, rows of 2048 tokens

Prints tokens/s, TFLOP/s with 6 FLOPs per parameter and token plus attention, and peak memory; the candidates of a
shape run in turns. `--profile` lists the kernels that take the most time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from regard.data.batch import Batch
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.training.optimizer import AdamW
from regard.training.step import autocast, take_step

PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16


@dataclass(frozen=True)
class Shape:
    vocab: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    rows: int
    length: int
    gpt2: bool = False

    def spec(self) -> Decoder:
        if self.gpt2:
            attention = Sublayer(Attention(self.heads, bias=True), LayerNorm())
            block = Block((attention, Sublayer(FeedForward(self.hidden, "gelu_tanh"), LayerNorm())))
            position, norm = Learned(self.length), LayerNorm()
            return Decoder(self.vocab, self.width, (Repeat((block,), self.layers),), position=position, norm=norm)
        attention = Attention(self.heads, kv_heads=self.kv_heads, position=Rope())
        block = Block((Sublayer(attention), Sublayer(SwiGLU(self.hidden))))
        return Decoder(self.vocab, self.width, (Repeat((block,), self.layers),))

    def flops(self, parameters: int) -> float:
        """Of one step; the causal mask halves the products of attention."""
        tokens = self.rows * self.length
        return 6 * parameters * tokens + 6 * self.layers * self.width * self.length * tokens


SHAPES = {
    "gpt2-124m": Shape(50304, 768, 12, 12, 3072, 12, 32, 1024, gpt2=True),
    "llama-124m": Shape(50304, 768, 12, 12, 2048, 12, 32, 1024),
    "llama-1.2b": Shape(128256, 2048, 32, 8, 8192, 16, 16, 2048),
}


def random_batch(shape: Shape) -> Batch:
    tokens = torch.randint(shape.vocab, (shape.rows, shape.length + 1), device="cuda")
    positions = torch.arange(shape.length, device="cuda").expand(shape.rows, -1)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        weights=torch.ones(shape.rows, shape.length, device="cuda"),
        positions=positions.contiguous(),
        segments=torch.zeros_like(positions),
    )


def regard_step(shape: Shape) -> tuple[Callable[[], object], int]:
    model = shape.spec().build(seed=0).cuda()
    optimizer, batch = AdamW().build(model, lr=1e-4), random_batch(shape)
    compiled, precision = torch.compile(model), autocast("auto", torch.device("cuda"))

    def step() -> object:
        return take_step(compiled, next_token, batch, optimizer, clip=1.0, precision=precision)

    return step, sum(parameter.numel() for parameter in model.parameters())


def transformers_step(shape: Shape) -> tuple[Callable[[], object], int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=shape.length, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled, tokens = torch.compile(model), random_batch(shape).tokens

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in model.parameters())


def measure(name: str, rounds: int, profile: bool) -> None:
    shape = SHAPES[name]
    builders = {"regard": regard_step} | ({"transformers": transformers_step} if shape.gpt2 else {})
    steps, seconds, peaks = {}, {}, {}
    for candidate, build in builders.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[candidate] = build(shape)
        for _ in range(3):
            steps[candidate][0]()
        torch.cuda.synchronize()
        peaks[candidate] = torch.cuda.max_memory_allocated() - before
        seconds[candidate] = []
    for _ in range(rounds):
        for candidate, (step, _) in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            seconds[candidate].append((time.perf_counter() - start) / 5)
    for candidate, (step, parameters) in steps.items():
        duration = statistics.median(seconds[candidate])
        rate, tokens = shape.flops(parameters) / duration, shape.rows * shape.length
        print(
            f"{name:11} {candidate:13} {tokens / duration:9,.0f} tokens/s  {duration * 1e3:6.1f} ms  "
            f"{rate / 1e12:4.0f} TFLOP/s ({rate / PEAK:.1%})  peak {peaks[candidate] / 2**30:5.1f} GiB",
            flush=True,
        )
        if profile and candidate == "regard":
            print_kernels(step)


def print_kernels(step: Callable[[], object], count: int = 20) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"  kernels: {sum(row.self_device_time_total for row in kernels) / 1e3:.1f} ms")
    for row in kernels[:count]:
        print(f"  {row.self_device_time_total / 1e3:7.2f} ms {row.count:5} × {row.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=f"some of {', '.join(SHAPES)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for name in options.shapes:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        measure(name, options.rounds, options.profile)


if __name__ == "__main__":
    main()
