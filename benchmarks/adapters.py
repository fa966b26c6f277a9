"""Output tokens per second of 16 requests with 0, 1, 4 and 16 LoRA adapters, and with one merged into the weights.

python -m benchmarks.adapters [--small]

On a GPU the model has the shape of Llama 8B, in bf16, and decodes by CUDA graphs; on a CPU it is that of decode.py in
float32. The adapters have rank 16 and change all linear layers. All candidates run once per round, in the same process.
"""

import argparse
import json
import warnings

import torch
from torch import nn

from benchmarks.decode import CONFIG
from benchmarks.timing import interleave
from regard.adapt import LoRA, add_lora, merge_lora
from regard.adapt.lora_weights import LoraWeights, lora_weights, without_gradients
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.families import llama
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

GPU = torch.cuda.is_available()
REQUESTS, RANK = 16, 16
PROMPT, NEW, ROUNDS = (128, 128, 3) if GPU else (16, 16, 3)


def build(small: bool) -> nn.Module:
    if small:  # to try the script out
        block = Block((Sublayer(Attention(4, 2, position=Rope())), Sublayer(SwiGLU(128))))
        spec = Decoder(512, 64, (Repeat((block,), 2),), context=512)
    elif GPU:
        block = Block((Sublayer(Attention(32, 8, position=Rope(500_000.0))), Sublayer(SwiGLU(14336))))
        spec = Decoder(128256, 4096, (Repeat((block,), 32),), context=2048, tied=False)
    else:
        spec = llama.spec(CONFIG.to_dict())
    with torch.device("cuda" if GPU else "cpu"):
        model = spec.build(seed=0)
    return model.to(torch.bfloat16 if GPU else torch.float32).eval().requires_grad_(False)


def random_adapter(model: nn.Module, seed: int) -> nn.Module:
    """The model with an adapter; all weights are shared."""
    adapted = without_gradients(model)
    add_lora(adapted, LoRA(RANK, 16.0, "all-linear"), seed=seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return adapted


def run(engine: Engine, names: list[str | None], vocab: int) -> None:
    generator = torch.Generator().manual_seed(len(names))
    prompts = torch.randint(vocab, (len(names), PROMPT), generator=generator).tolist()
    sampling = Sampling(max_new=NEW, temperature=0)
    requests = [engine.submit(ids, sampling, adapter=name) for ids, name in zip(prompts, names, strict=True)]
    while not engine.idle:
        engine.step()
    assert all(len(request.new) == NEW for request in requests)


def measure(small: bool) -> dict[str, float]:
    model = build(small)
    options = {"rows": REQUESTS, "capacity": PROMPT + NEW, "prefix_cache": False, "compile": GPU, "memory": 0.3}
    engine = Engine(model, max_loras=REQUESTS, **options)
    for index in range(REQUESTS):
        weights: LoraWeights = lora_weights(random_adapter(model, index))
        engine.load_adapter(f"{index}", weights)
    merged_model = random_adapter(model, 0)
    merge_lora(merged_model)
    merged = Engine(merged_model, **options)
    for each in (engine, merged):
        each.warm_up()
    engine.loras.warm_up()
    vocab = engine.model.spec.vocab
    candidates = {
        "none": lambda: run(engine, [None] * REQUESTS, vocab),
        "one, merged": lambda: run(merged, [None] * REQUESTS, vocab),
    }
    for count in (1, 4, 16):
        names: list[str | None] = [f"{index % count}" for index in range(REQUESTS)]
        candidates[f"{count} of {count}"] = lambda names=names: run(engine, names, vocab)
    half: list[str | None] = [None if index % 2 else f"{index}" for index in range(REQUESTS)]
    candidates["8, and 8 requests without"] = lambda: run(engine, half, vocab)
    return interleave(candidates, ROUNDS, REQUESTS * NEW)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokens per second with many adapters in a batch.")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script out")
    warnings.simplefilter("once")
    found = measure(parser.parse_args().small)
    device = torch.cuda.get_device_name() if GPU else "CPU"
    ratios = {name: round(speed / found["none"], 3) for name, speed in found.items()}
    print(json.dumps({"device": device, "tokens/s": found, "relative to none": ratios}, indent=1))
