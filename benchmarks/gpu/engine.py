"""Speed of the engine on one GPU, in bf16: `python -m benchmarks.gpu.engine [steps] [requests] [first-token] [kinds]
[invariant]`.

    steps         tokens/s of 1 and 16 requests to the shape of Llama 8B, greedy and sampled, beside transformers
    requests      output tokens/s of 256 requests with prompts of 100 to 1024 tokens to the shape of Qwen3 0.6B
    first-token   time to the first token of a prompt of 2,048 tokens, relative to one bare forward
    kinds         a decode step of windows, latents, experts, Mamba-2 and a hybrid: bytes read, and the share of
                  what the memory allows
    invariant     `batch_invariant` beside the ordinary engine: tokens/s of 1 and 16 requests to the shape of Llama 8B
                  and of 256 requests to that of Qwen3 0.6B, and how many requests differ alone and among others

All through `Engine(compile=True)` with the paged store. On a CPU the shapes are tiny, to try the script.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from regard.engine.engine import Engine
from regard.engine.request import Request, Sampling
from regard.kernels.attention.patterns.window import Window
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba2 import Mamba2

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
BANDWIDTH = 4.8e12  # bytes/s of an H200, from its data sheet
ATTENTION = Attention(32, kv_heads=8, head_dim=128, position=Rope(500000.0))
SETTINGS = {
    "greedy": Sampling(max_new=128, temperature=0),
    "temperature 1": Sampling(max_new=128, temperature=1, seed=0),
    "top-p 0.9": Sampling(max_new=128, temperature=1, top_p=0.9, seed=0),
}


def build(vocab: int, width: int, layers: int, *blocks: Block, tied: bool = False) -> DecoderModule:
    if not GPU:
        vocab, layers = 256, len(blocks)
    with torch.device(DEVICE):
        spec = Decoder(vocab, width, (Repeat(blocks, layers // len(blocks)),), tied=tied)
        torch.set_default_dtype(DTYPE)
        model = spec.build(seed=0)
        torch.set_default_dtype(torch.float32)
    return model.to(DTYPE).eval().requires_grad_(False)


def block(mixer: Any, feedforward: Any) -> Block:
    return Block((Sublayer(mixer), Sublayer(feedforward)))


def llama_8b() -> DecoderModule:
    if not GPU:
        return build(256, 64, 2, block(Attention(2, head_dim=32, position=Rope()), SwiGLU(128)))
    return build(128256, 4096, 32, block(ATTENTION, SwiGLU(14336)))


def qwen_600m() -> DecoderModule:
    if not GPU:
        return llama_8b()
    attention = Attention(16, kv_heads=8, head_dim=128, position=Rope(1e6), qk_norm=RMSNorm())
    return build(151936, 1024, 28, block(attention, SwiGLU(3072)), tied=True)


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def decode_rate(engine: Engine, batch: int, sampling: Sampling, length: int = 128) -> float:
    """Tokens/s of decoding after the prompts of all requests have been read."""
    for i in range(batch):
        engine.submit(prompt(length, engine.model.spec.vocab, i), sampling, salt=str(time.monotonic_ns()))
    while any(not request.new for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    synchronize()
    begin, count = time.perf_counter(), 0
    while not engine.idle:
        count += len(engine.step())
    synchronize()
    return count / (time.perf_counter() - begin)


def steps() -> None:
    model = llama_8b()
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embedding" not in name)
    engine = Engine(model, rows=16, capacity=1024, compile=True)
    engine.warm_up()
    peers = transformers_peers() if GPU else {}
    print(f"weights {weights / 1e9:.2f} GB: at most {BANDWIDTH / weights:.0f} steps/s")
    for batch in (1, 16):
        rates: dict[str, list[float]] = {}
        for _ in range(3):
            for name, sampling in SETTINGS.items():
                rates.setdefault(name, []).append(decode_rate(engine, batch, sampling))
            for name, run in peers.items():
                rates.setdefault(name, []).append(run(batch))
        for name, values in rates.items():
            print(f"batch {batch:2} {name:<24} {statistics.median(values):8.0f} tokens/s", flush=True)


def transformers_peers() -> dict[str, Callable[[int], float]]:
    """The shape of Llama 8B by transformers, its decode step compiled, with a static cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )  # fmt: skip
    with torch.device(DEVICE):
        torch.set_default_dtype(DTYPE)
        model: Any = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)

    def run(batch: int) -> float:
        ids = torch.tensor([prompt(128, 128256, i) for i in range(batch)], device=DEVICE)
        times = []
        for new in (8, 136):
            synchronize()
            begin = time.perf_counter()
            model.generate(
                ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, cache_implementation="static",
                pad_token_id=0,
            )  # fmt: skip
            synchronize()
            times.append(time.perf_counter() - begin)
        return batch * 128 / (times[1] - times[0])

    for batch in (1, 16):
        run(batch)
        run(batch)
    return {"transformers, compiled": run}


def requests() -> None:
    model = qwen_600m()
    engine = Engine(model, rows=256 if GPU else 4, capacity=1600, compile=True)
    begin = time.perf_counter()
    engine.warm_up()
    print(f"256 requests: warm-up {time.perf_counter() - begin:.1f} s")
    for name, options in {"greedy": {"temperature": 0.0}, "top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}.items():
        for trial in range(2):
            rng = torch.Generator().manual_seed(trial)
            lengths = torch.randint(100, 1025, (256 if GPU else 6,), generator=rng).tolist()
            submitted: list[Request] = []
            for i, length in enumerate(lengths):
                sampling = Sampling(max_new=512 if GPU else 8, seed=i, **options)
                submitted.append(engine.submit(prompt(length, model.spec.vocab, 1000 * trial + i), sampling))
            synchronize()
            begin, first, slow = time.perf_counter(), 0.0, []
            while not engine.idle:
                at = time.perf_counter()
                engine.step()
                slow.append(time.perf_counter() - at)
                if not first and all(request.new for request in submitted):
                    first = time.perf_counter() - begin
            synchronize()
            total, new = time.perf_counter() - begin, sum(len(request.new) for request in submitted)
            engine.reset_prefix_cache()
            print(
                f"{name:<10} {new / total:8.0f} output tokens/s; all prompts read after {first:.2f} s; "
                f"{len(slow)} steps, median {1e3 * statistics.median(slow):.2f} ms",
                flush=True,
            )


@torch.inference_mode()
def first_token() -> None:
    model, length = llama_8b(), 2048 if GPU else 128
    engine = Engine(model, rows=4, capacity=2 * length, compile=True)
    engine.warm_up()
    ids = torch.tensor([prompt(length, model.spec.vocab, 0)], device=DEVICE)
    bare, served = [], []
    for trial in range(8):
        synchronize()
        begin = time.perf_counter()
        model.logits(model.hidden(ids, TokenLayout.padded([length], ids.device))[:, -1]).argmax(-1).tolist()
        bare.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        request = engine.submit(prompt(length, model.spec.vocab, trial), Sampling(max_new=2, temperature=0))
        while not request.new:
            engine.step()
        served.append(time.perf_counter() - begin)
        while not engine.idle:
            engine.step()
    print(
        f"first token of {length} tokens: {1e3 * statistics.median(served):.1f} ms; bare forward "
        f"{1e3 * statistics.median(bare):.1f} ms; ratio {statistics.median(served) / statistics.median(bare):.2f}"
    )


def kinds() -> None:
    small = GPU or None
    width = 4096 if small else 64
    heads = 32 if small else 2
    dense = SwiGLU(14336 if small else 128)
    window = Attention(
        heads, kv_heads=heads // 4 or 1, head_dim=128 if small else 32, position=Rope(), mask=Window(512)
    )
    latent = LatentAttention(heads, rank=512, nope_dim=128, rope_dim=64, v_dim=128) if small else LatentAttention(
        2, rank=16, nope_dim=16, rope_dim=16)  # fmt: skip
    experts = Experts(64 if small else 4, 8 if small else 2, SwiGLU(1024 if small else 32))
    mamba = Mamba2() if small else Mamba2(state=16, head_dim=32)
    full = ATTENTION if small else Attention(2, head_dim=32, position=Rope())
    shapes = {
        "window": (block(window, dense),),
        "latent": (block(latent, dense),),
        "experts": (block(full, experts),),
        "mamba-2": (block(mamba, dense),),
        "hybrid": (block(mamba, dense), block(mamba, dense), block(mamba, dense), block(full, dense)),
    }
    for name, blocks in shapes.items():
        model = build(32000, width, 16, *blocks)
        engine = Engine(model, rows=16 if GPU else 4, capacity=1024, compile=True)
        begin = time.perf_counter()
        engine.warm_up()
        print(f"{name:<8} warm-up {time.perf_counter() - begin:.1f} s", flush=True)
        for batch in (1, 16 if GPU else 4):
            sampling = Sampling(max_new=128 if GPU else 8, temperature=0)
            rate = statistics.median(decode_rate(engine, batch, sampling) for _ in range(3)) / batch
            size = bytes_read(model, batch) + cache_bytes(engine, batch, 128 + 64)
            print(
                f"{name:<8} batch {batch:2}: {1e3 / rate:6.2f} ms per step, {size / 1e9:6.2f} GB, "
                f"{100 * size * rate / BANDWIDTH:4.0f} % of the bandwidth",
                flush=True,
            )
        del engine, model
        if GPU:
            torch.cuda.empty_cache()


def invariant() -> None:
    """Two engines of one model, in turns; each takes a part of the memory."""
    for model, batches in ((llama_8b(), (1, 16)), (qwen_600m(), (256 if GPU else 6,))):
        options: dict[str, Any] = {"rows": max(batches), "capacity": 1600, "compile": True, "memory": 0.4}
        engines = {"ordinary": Engine(model, **options)}
        if GPU:  # a CPU has the ordinary engine only
            engines["invariant"] = Engine(model, batch_invariant=True, **options)
        for engine in engines.values():
            engine.warm_up()
        for batch in batches:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for trial in range(3):
                for name, engine in engines.items():
                    rates[name].append(workload_rate(engine, batch, trial))
            found = {name: statistics.median(values) for name, values in rates.items()}
            ratio = found["ordinary"] / found.get("invariant", found["ordinary"])
            listed = ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in found.items())
            print(f"{batch:3} requests: {listed}; ratio {ratio:.2f}", flush=True)
        for name, engine in engines.items():
            different, total = count_differences(engine)
            print(f"{name:<10} {different} of {total} requests differ in a bit alone and among others", flush=True)
            assert name == "ordinary" or not different, "batch_invariant is not invariant"
        del model, engines, engine
        if GPU:
            torch.cuda.empty_cache()


def workload_rate(engine: Engine, batch: int, trial: int) -> float:
    """Up to 16 requests: tokens/s of decode steps; more: output tokens/s with prompts of 100 to 1024 tokens."""
    if batch <= 16 and GPU:
        return decode_rate(engine, batch, SETTINGS["greedy"])
    lengths = torch.randint(100, 1025, (batch,), generator=torch.Generator().manual_seed(trial)).tolist()
    sampling = Sampling(max_new=512 if GPU else 8, temperature=0)
    submitted = [engine.submit(prompt(n, engine.model.spec.vocab, i), sampling) for i, n in enumerate(lengths)]
    synchronize()
    begin = time.perf_counter()
    while not engine.idle:
        engine.step()
    synchronize()
    total = time.perf_counter() - begin
    engine.reset_prefix_cache()
    return sum(len(request.new) for request in submitted) / total


def count_differences(engine: Engine) -> tuple[int, int]:
    """Requests whose ids or log-probabilities differ in a bit alone and among others, and how many were compared."""
    generator, count = torch.Generator().manual_seed(7), min(engine.store.rows, 16)
    lengths = torch.randint(1, 1025, (count,), generator=generator).tolist()
    prompts = [prompt(length, engine.model.spec.vocab, 100 + i) for i, length in enumerate(lengths)]
    sampling = Sampling(max_new=64 if GPU else 8, temperature=0)
    alone = [[(token.id, token.logprob) for token in engine.generate(ids, sampling)] for ids in prompts]
    engine.reset_prefix_cache()
    together = [engine.submit(ids, sampling) for ids in prompts]
    while not engine.idle:
        engine.step()
    found = [[(token.id, token.logprob) for token in request.new] for request in together]
    engine.reset_prefix_cache()
    return sum(a != b for a, b in zip(alone, found, strict=True)), count


def bytes_read(model: DecoderModule, batch: int) -> float:
    """Weights that a step reads, the chosen experts only, if each token chooses independently."""
    total = 0.0
    for name, parameter in model.named_parameters():
        if "embedding" in name and not model.spec.tied:
            continue
        share = 1.0
        for path, module in model.named_modules():
            spec = getattr(module, "spec", None)
            if isinstance(spec, Experts) and name.startswith(path) and parameter.shape[0] == spec.count:
                share = 1 - (1 - spec.top_k / spec.count) ** batch
        total += share * parameter.nbytes
    return total


def cache_bytes(engine: Engine, batch: int, length: int) -> float:
    """Keys and values that a step reads after `length` tokens, and recurrent states that it reads and writes."""
    total, rows = 0.0, engine.store.rows
    for storage in engine.store.storages:
        for array in storage.arrays.values():
            if storage.placer is None:
                total += 2 * batch * array.nbytes / rows
            else:
                total += batch * length * array[0].nbytes
    return total


PARTS = {"steps": steps, "requests": requests, "first-token": first_token, "kinds": kinds, "invariant": invariant}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        print(f"# {name}", flush=True)
        PARTS[name]()
        if GPU:
            torch.cuda.empty_cache()
