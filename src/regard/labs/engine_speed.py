"""An engine that decodes requests in batches generates 5 to 10 times as many tokens per second as a plain loop.

The plain loop computes one request after another with a cache of keys and values, one token per forward; a second one
has no cache and computes the whole sequence for every token. The engine gets all requests at once. A decode step reads
all weights, for one row as for many, so the gain comes from the rows that share them: it is near 1 for one request and
grows until a step is bound by arithmetic. Prompts are included in the time. All ways alternate in each round, and the
texts that they generate are equal. Orca, Yu et al. 2022; vLLM, Kwon et al. 2023.
"""

# ledger: eng.5to10

import statistics
import time
from collections.abc import Callable

import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.stores.contiguous import Contiguous
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.labs.small_models import parameter_count
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

VOCAB = 4096
PROMPT, NEW = 32, 24
TokenLists = list[list[int]]


def run(bench: Bench) -> Findings:
    width, layers = bench.setting((512, 8), (32, 1))
    most = bench.setting(64, 4)
    counts = [n for n in (1, 4, 16, 64) if n <= most]
    block = Block((Sublayer(Attention(8, 2, position=Rope())), Sublayer(SwiGLU(3 * width))))
    model = Decoder(VOCAB, width, (Repeat((block,), layers),), context=PROMPT + NEW).build(seed=bench.seed).eval()
    prompts = torch.randint(VOCAB, (most, PROMPT), generator=generator(bench.seed)).tolist()
    sampled = prompts[: bench.setting(4, 1)]  # the speed of a loop does not depend on the number of requests
    ways: dict[str, Callable[[], TokenLists]] = {
        "loop without a cache": lambda: [loop_without_cache(model, prompt) for prompt in sampled[:1]],
        "loop": lambda: [loop(model, prompt) for prompt in sampled],
    }
    for count in counts:
        ways[f"engine, {count} at once"] = lambda count=count: generate(model, prompts[:count], count)
    speeds = tokens_per_second(bench, ways)
    base = speeds["loop"]
    gains = [(count, speeds[f"engine, {count} at once"] / base) for count in counts]
    table = [{"way": name, "tokens/s": speed, "times the loop": speed / base} for name, speed in speeds.items()]
    checks = [
        Check("one request at a time: within 1.5 times of the loop, in both directions",
              f"{gains[0][1]:.2f}x", 1 / 1.5 < gains[0][1] < 1.5),
        *(Check(f"{count} requests at once: 5 to 10 times the loop", f"{gain:.1f}x", 5 <= gain <= 10)
          for count, gain in gains[2:]),
        Check("the cache alone makes the loop at least 5 times as fast",
              f"{base / speeds['loop without a cache']:.1f}x", base >= 5 * speeds["loop without a cache"]),
    ]  # fmt: skip
    size = f"{parameter_count(model) / 1e6:.0f}M parameters"
    plots = [Plot("requests at once", "times the loop", {"engine": gains}, f"{size}, {PROMPT} + {NEW} tokens", "xy")]
    remark = (
        "The ratio is that of one model and machine: the number of rows until a step is bound by arithmetic is smaller "
        "on a CPU with few cores than on a GPU. Prompts, which cost the same in every way, lower it for short outputs."
    )
    return Findings(table, checks, plots, remark)


def tokens_per_second(bench: Bench, ways: dict[str, Callable[[], TokenLists]]) -> dict[str, float]:
    """Medians. All ways must generate the same tokens for the first prompt."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, TokenLists] = {}
    for _ in bench.each("rounds", range(bench.setting(3, 1) + 1)):  # the first is a warm-up
        for name, generate_all in ways.items():
            start = time.perf_counter()
            outputs[name] = generate_all()
            seconds[name].append(time.perf_counter() - start)
    assert len({tuple(found[0]) for found in outputs.values()}) == 1, "the ways generate different tokens"
    counts = {name: sum(map(len, found)) for name, found in outputs.items()}
    return {name: counts[name] / statistics.median(times[1:]) for name, times in seconds.items()}


@torch.inference_mode()
def loop(model: DecoderModule, prompt: list[int]) -> list[int]:
    store = Contiguous(model.spec.memory(), 1, PROMPT + NEW, torch.float32, "cpu")
    ids, output = torch.tensor([prompt]), []
    start = 0
    for _ in range(NEW):
        layout = TokenLayout(torch.arange(start, start + ids.shape[1]).unsqueeze(0))
        logits = model(ids, layout, store.begin_forward(layout))  # (1, L, V)
        start += ids.shape[1]
        ids = logits[:, -1:].argmax(-1)  # (1, 1)
        output.append(ids.item())
    return output


@torch.inference_mode()
def loop_without_cache(model: DecoderModule, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)  # (1, L)
    return ids[0, PROMPT:].tolist()


def generate(model: DecoderModule, prompts: list[list[int]], rows: int) -> TokenLists:
    engine = Engine(model, rows=rows, capacity=PROMPT + NEW, prefix_cache=False)
    requests = [engine.submit(prompt, Sampling(max_new=NEW, temperature=0)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return [[token.id for token in request.new] for request in requests]
