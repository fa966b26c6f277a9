"""Weights of fewer bytes make decoding faster, because a step reads all of them and computes little.

A decoder of 54M parameters in its blocks decodes one token, and reads a prompt of 128, with its linear layers in
float32, in integers of 8 bits, and of 4 bits with a scale and a zero point for 32 weights. A kernel multiplies the
integers as they are stored. Measured: bytes of the weights and processor time of a forward, and for comparison the time
of adding up the float32 weights, which reads as many bytes. Two controls have the same few bytes: a prompt, which is
bound by arithmetic, and a step without the kernel, in which weights are first expanded in memory. All alternate.

Frantar et al. 2022 and Lin et al. 2023 report the speed of weights of few bits.
"""

# ledger: q.faster

import statistics
import time
from collections import defaultdict
from copy import deepcopy

import torch
from torch import nn

from regard.adapt.quantized import QuantizedLinear, pack_weights, quantize_linears
from regard.engine.stores.contiguous import Contiguous
from regard.formats.integers import Integer
from regard.kernels.packed import why_no_packed_kernel
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope

FLOAT, EXPANDED = "float32", "8 bits, expanded"
FORMATS = {"8 bits": Integer(8), "4 bits": Integer(4, symmetric=False, group=32, scale_dtype="float16")}
CACHED, VOCAB = 32, 256  # tokens before those that are timed


def run(bench: Bench) -> Findings:
    width, layers = bench.setting((1024, 4), (64, 1))
    block = Block((Sublayer(Attention(8, position=Rope())), Sublayer(SwiGLU(3 * width))))
    model = Decoder(VOCAB, width, (Repeat((block,), layers),)).build(seed=bench.seed).eval()
    missing = why_no_packed_kernel()
    models = {FLOAT: model} | {name: deepcopy(model) for name in (*FORMATS, EXPANDED)}
    for name, format in (FORMATS | {EXPANDED: FORMATS["8 bits"]}).items():
        quantize_linears(models[name].stack, format)
        if name != EXPANDED and missing is None:
            pack_weights(models[name])
    sizes = {name: weight_bytes(of) for name, of in models.items()}
    tokens = {"decode": 1, "prompt": bench.setting(128, 16)}
    seconds = measure(bench, models, tokens)
    gain = {(name, work): seconds[FLOAT, work] / seconds[name, work] for name in models for work in tokens}
    observed = ", ".join(f"{name} {gain[name, 'decode']:.2f}x" for name in FORMATS)
    prompts = ", ".join(f"{name} {gain[name, 'prompt']:.2f}x" for name in FORMATS)
    adding = seconds[FLOAT, "decode"] / seconds["adding up the weights"]
    checks = [
        Check("a decode step in float32 is bound by bandwidth: it takes at most twice as long as adding up its weights",
              f"{adding:.2f} times", adding <= 2),
        Check("decoding with 8 bits is more than 1.5 times as fast as in float32", missing or observed,
              missing is None and gain["8 bits", "decode"] > 1.5),
        Check("with 4 bits it is faster than with 8", missing or observed,
              missing is None and gain["4 bits", "decode"] > gain["8 bits", "decode"]),
        Check("prompts, bound by arithmetic, gain less than half of what decoding gains", missing or prompts,
              missing is None and all(gain[name, "prompt"] < gain[name, "decode"] / 2 for name in FORMATS)),
        Check("without the kernel few bytes do not help: a step is slower than in float32",
              f"{gain[EXPANDED, 'decode']:.2f}x", gain[EXPANDED, "decode"] < 1),
    ]  # fmt: skip
    table = [
        {"weights": name, "MB": sizes[name] / 1e6, "ms per token": 1000 * seconds[name, "decode"],
         "decode, times float32": gain[name, "decode"], "prompt, times float32": gain[name, "prompt"]}
        for name in models
    ]  # fmt: skip
    stored = [FLOAT, *FORMATS]
    plots = [
        Plot("MB of weights", "ms per token", {
            "decode step": [(round(sizes[name] / 1e6), 1000 * seconds[name, "decode"]) for name in stored[::-1]],
        }, "4 bits, 8 bits, float32"),
        Plot("", "times as fast as float32", {
            "decode step": [(i, gain[name, "decode"]) for i, name in enumerate(models)],
            f"prompt of {tokens['prompt']}": [(i, gain[name, "prompt"]) for i, name in enumerate(models)],
        }, groups=(FLOAT, *FORMATS, "8 bits,\nexpanded")),
    ]  # fmt: skip
    remark = "Of one processor and its kernels, with one thread. Seeds draw other weights, and measure again."
    return Findings(table, checks, plots, remark)


def weight_bytes(model: DecoderModule) -> int:
    """Of the linear layers of the blocks, with their scales."""
    layers = [layer for layer in model.stack.modules() if isinstance(layer, nn.Linear | QuantizedLinear)]
    return sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))


@torch.inference_mode()
def measure(bench: Bench, models: dict[str, DecoderModule], tokens: dict[str, int]) -> dict:
    """Median processor time by (model, work), and of adding up all weights. Single forwards alternate."""
    weights = torch.cat([weight.flatten() for weight in models[FLOAT].stack.parameters()])
    seconds: defaultdict[object, list[float]] = defaultdict(list)
    for number in bench.each("rounds", range(bench.setting(21, 2))):
        start = time.process_time()
        weights.sum()
        seconds["adding up the weights"].append(time.process_time() - start)
        for work, count in tokens.items():
            if work == "prompt" and number % 5:
                continue  # they are long
            layout = TokenLayout(torch.arange(CACHED, CACHED + count).unsqueeze(0))
            for name, model in models.items():
                store = Contiguous(model.spec.memory(), 1, CACHED + count, torch.float32)
                ids = torch.zeros(1, count, dtype=torch.int64)
                start = time.process_time()
                model(ids, layout, store.begin_forward(layout, check=False))
                seconds[name, work].append(time.process_time() - start)
    return {key: statistics.median(times[1:] or times) for key, times in seconds.items()}  # the first is a warm-up
