"""The crossing matrix: features of different axes in one engine. Each pair equals its reference, or is refused.

    weights      few bits per weight                 the reference has the dequantized weights
    adapter      LoRA of the model or of a request   … the merged weights
    cache        fewer keys, or fewer bits           … the same cache, whose own law is in `regard verify`
    drafts, store, feature                           … one request after the other, a contiguous store, no drafts

Everything is computed in float64, so tokens are equal and log-probabilities differ by rounding only. `python -m
tests.crossings` runs all pairs of features and prints the table of docs/topics/verify.md.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from regard.adapt import LoRA, add_lora, merge_lora, quantize_linears, replace_modules
from regard.adapt.lora_weights import LoraWeights, lora_weights
from regard.adapt.quantized import QuantizedLinear
from regard.adapt.w8a8 import W8A8Linear
from regard.engine.beam import Beams
from regard.engine.contrastive import ContrastiveOptions
from regard.engine.engine import Engine
from regard.engine.grammar import GrammarCompiler
from regard.engine.inputs import decoder_of
from regard.engine.request import Sampling
from regard.engine.speculation.speculation import Drafter
from regard.engine.stores.paged import Paged
from regard.formats.integers import Integer
from regard.formats.names import format_named
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import without_repeats
from regard.parts.attention import Attention
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.parts.ssm.mamba import Mamba
from regard.verification.trial import randomize_weights
from tests.engine.drafters import METHODS, RANDOM
from tests.laws import CROSS_BLOCK, ENCODER, VOCAB, block, decoder

WIDTH, HIDDEN, CAPACITY, NEW = 64, 256, 40, 10
TOLERANCE = 1e-9
ROTARY = Attention(4, 2, position=Rope())
FFN = SwiGLU(HIDDEN)
Outputs = list[tuple[list[int], list[float]]]  # per request, the new tokens and their log-probabilities or scores


def model_of(*bodies: Any) -> Any:
    """A decoder of two layers."""
    layers = bodies if len(bodies) == 2 else bodies * 2
    spec = decoder(*(block(*body) if isinstance(body, tuple) else block(body, FFN) for body in layers), tied=False)
    return without_repeats(replace(spec, width=WIDTH))


CROSS = EncoderDecoder(
    replace(ENCODER, width=WIDTH), without_repeats(replace(decoder(CROSS_BLOCK, CROSS_BLOCK), width=WIDTH))
)
MIXERS: dict[str, Any] = {
    "multi-head": model_of(Attention(4, position=Rope())),
    "grouped": model_of(ROTARY),
    "window": model_of(Attention(4, 2, position=Rope(), mask=Window(6)), ROTARY),
    "alibi": model_of(Attention(4, position=Alibi())),
    "sinks": model_of(Attention(4, 2, sinks=True, position=Rope())),
    "latent": model_of(LatentAttention(4, 32, 16, 16, position=Rope())),
    "linear": model_of(LinearAttention(4)),
    "mamba and attention": model_of(Mamba(4), ROTARY),
    "experts": model_of((ROTARY, Experts(4, 2, SwiGLU(64)))),
    "cross-attention": CROSS,
}
FORMATS = ("int8", "int4", "nf4", "fp8", "q8_0", "q4_k")
WEIGHTS = ("full precision", *FORMATS, "w8a8")
CACHES = ("all tokens", "int8", "fp8", "int4:4", "sinks:2+9", "window:9", "h2o:12", "snapkv:8")
DRAFTS = ("no drafts", *METHODS)
STORES = ("contiguous", "paged")
ADAPTERS = ("no adapter", "adapter of the model", "adapter of a request")
FEATURES = (
    "alone", "batch", "small chunks", "preemption", "prefix cache", "sampled", "grammar", "beam search", "contrastive",
)  # fmt: skip
AXES: dict[str, Sequence[str]] = {
    "mixer": tuple(MIXERS), "weights": WEIGHTS, "cache": CACHES, "drafts": DRAFTS, "store": STORES,
    "adapter": ADAPTERS, "feature": FEATURES,
}  # fmt: skip
DEFAULTS = {"mixer": "grouped", **{axis: values[0] for axis, values in AXES.items() if axis != "mixer"}}
Cell = Mapping[str, str]


@cache
def built(mixer: str) -> nn.Module:
    model = MIXERS[mixer].build(seed=0).double().eval().requires_grad_(False)
    randomize_weights(model, seed=1)
    return model


@cache
def adapter_weights(mixer: str) -> LoraWeights:
    return lora_weights(adapted(mixer))


def adapted(mixer: str) -> nn.Module:
    model = deepcopy(built(mixer))
    add_lora(model, LoRA(3, 6.0), seed=3)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.eval().requires_grad_(False)


def quantize(model: nn.Module, weights: str) -> None:
    """Round the linear layers in place."""
    if weights == "w8a8":
        replace_modules(
            model,
            lambda name, module: type(module) is nn.Linear and ".lora_" not in name,
            lambda _, module: W8A8Linear.of(module, Integer(8)),  # ty: ignore[invalid-argument-type]
        )
    elif weights != "full precision":
        quantize_linears(model, format_named(weights))


def dequantize(model: nn.Module) -> None:
    """Ordinary layers with the rounded weights; inputs that are rounded stay so."""
    replace_modules(
        model,
        lambda _, module: isinstance(module, QuantizedLinear) and not isinstance(module, W8A8Linear),
        lambda _, module: module.dequantized(),  # ty: ignore[call-non-callable]
    )


def model_for(cell: Cell, reference: bool) -> nn.Module:
    """The model of a cell; its reference has merged adapters and ordinary layers."""
    mixer, adapter = cell["mixer"], cell["adapter"]
    model = adapted(mixer) if adapter == "adapter of the model" else deepcopy(built(mixer))
    quantize(model, cell["weights"])
    if reference:
        dequantize(model)
        if adapter == "adapter of the model" and cell["weights"] != "w8a8":  # whose layers refuse to be merged
            merge_lora(model)
    return model.double()


def drafter(name: str, mixer: str) -> Drafter | None:
    """Built for the same model before its weights or cache were changed; beside an encoder, for the decoder alone."""
    model = built("grouped" if name == "draft" and mixer == "cross-attention" else mixer)
    return None if name == "no drafts" else METHODS[name](deepcopy(decoder_of(model)))


def engine_for(cell: Cell, reference: bool) -> Engine:
    options: dict[str, Any] = {"rows": 1, "capacity": CAPACITY, "store": "contiguous", "prefix_cache": False}
    if cell["cache"] != "all tokens":
        options["cache"] = cell["cache"]
    feature = cell["feature"]
    if feature in ("beam search", "contrastive"):
        options["rows"] = 3
    if cell["mixer"] == "cross-attention":
        options["source_capacity"] = 8
    if not reference:
        store: Any = cell["store"]
        options |= {"store": store, "speculation": drafter(cell["drafts"], cell["mixer"]), "draft_tokens": 4}
        if feature in ("alone", "batch"):
            options["rows"] = 6  # free ones are for further candidates
        if feature in ("preemption", "sampled", "grammar"):
            options["rows"] = 3
        if feature == "small chunks":
            options["chunk"] = 3
        if feature == "prefix cache":
            options |= {"prefix_cache": True}
            options |= {"store": partial(Paged, block=4, blocks=40, states=40)} if store == "paged" else {}
        if feature == "preemption" and store == "paged":
            options["store"] = partial(Paged, block=4, blocks=CAPACITY // 4 + 1)
    model = model_for(cell, reference)
    engine = Engine(model, **options)
    if cell["adapter"] == "adapter of a request":
        engine.load_adapter("a", adapter_weights(cell["mixer"]))
    return engine


def prompts() -> list[list[int]]:
    """Repetitive ones, so that prompt lookup finds drafts; the second begins as the first."""
    first = [3, 7, 7, 2, 3, 7, 7, 2, 3, 7, 7, 2, 9]
    return [first, [*first[:9], 4, 11, 4, 11], [5], [8, 8, 1, 20, 8, 8, 1]]


@cache
def grammar() -> Any:
    letters = [b"", *(bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz0123")]
    return GrammarCompiler(letters, [0], vocab=VOCAB).regex("[a-e]{2}[f-j]{3,9}")


def run(cell: Cell, reference: bool = False) -> Outputs:
    """The outputs of all requests. ValueError if the features cannot be combined."""
    feature, name = cell["feature"], "a" if cell["adapter"] == "adapter of a request" else None
    sampling = Sampling(max_new=NEW, temperature=0)
    if feature == "sampled":
        sampling = replace(sampling, temperature=1.2, top_p=0.9, seed=5)
    if feature == "grammar":
        sampling = replace(sampling, grammar=grammar(), stop_ids=(0,))
    engine, source = engine_for(cell, reference), [4, 9, 6] if cell["mixer"] == "cross-attention" else None
    if feature == "beam search":
        beams = engine.beam_search(prompts()[0], Beams(width=3), sampling, source, adapter=name)
        return [(list(beam.ids), [beam.score]) for beam in beams]
    if feature == "contrastive":
        settings = ContrastiveOptions(candidates=3, alpha=0.4)
        tokens = engine.contrastive_search(prompts()[0], settings, sampling, adapter=name)
        return [([token.id for token in tokens], [token.logprob for token in tokens])]
    one_by_one = reference or feature == "prefix cache"
    requests = []
    for ids in prompts() if feature != "alone" else prompts()[:1]:
        requests.append(engine.submit(ids, sampling, source, adapter=name))
        while one_by_one and not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    for request in requests:
        assert request.error is None, request.error
    if feature == "preemption" and cell["store"] == "paged" and not reference and cell["cache"] == "all tokens":
        assert engine.metrics()["preemptions"] or cell["mixer"] == "linear", "no request was preempted"
    return [([token.id for token in request.new], [token.logprob for token in request.new]) for request in requests]


def difference(cell: Cell) -> float:
    """The largest difference of log-probabilities; infinite if tokens differ."""
    found, expected = run(cell), run(cell, reference=True)
    assert len(found) == len(expected)
    if [ids for ids, _ in found] != [ids for ids, _ in expected]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for (_, one), (_, two) in pairs for a, b in zip(one, two, strict=True))


CACHED = tuple(cache for cache in CACHES if cache != "all tokens")
CHOOSING = ("h2o:12", "snapkv:8")  # caches that choose keys by their scores
REFUSED: dict[tuple[str, str, str, str], tuple[str, str]] = {  # axis, value, axis, value -> what the error names
    **{("mixer", mixer, "cache", kind): ("arrays", kind) for mixer in ("alibi", "latent") for kind in CHOOSING},
    **{("mixer", "linear", "cache", kind): ("no layer of this model keeps keys", kind) for kind in CACHED},
    ("mixer", "latent", "adapter", "adapter of a request"): ("k_up", "adapter"),
    ("mixer", "cross-attention", "drafts", "first layers"): ("self:1", "cross-attention"),
    ("mixer", "cross-attention", "feature", "contrastive"): ("encoder-decoder", "contrastive"),
}  # fmt: skip
# Other tokens with the same distribution: tests/engine/test_speculation.py.
SAME_DISTRIBUTION = tuple(("drafts", drafts, "feature", "sampled") for drafts in RANDOM)


def excluded(cell: Cell) -> list[tuple[str, str, str, str]]:
    """The pairs of a cell that are refused, or have the same distribution but other tokens."""
    pairs = (*REFUSED, *SAME_DISTRIBUTION)
    return [pair for pair in pairs if cell.get(pair[0]) == pair[1] and cell.get(pair[2]) == pair[3]]


def pairs() -> Iterator[tuple[str, str, str, str]]:
    """All values of all pairs of axes."""
    for first, second in combinations(AXES, 2):
        for a in AXES[first]:
            for b in AXES[second]:
                yield first, a, second, b


def pair_cell(pair: tuple[str, str, str, str]) -> Cell:
    """The pair, all other axes as usual."""
    first, a, second, b = pair
    return DEFAULTS | {first: a, second: b}


def covering_cells(seed: int = 0) -> list[Cell]:
    """Cells in which every pair that is not refused occurs, each with many other pairs."""
    rng, cells = random.Random(seed), list[Cell]()
    missing = {pair for pair in pairs() if not excluded(pair_cell(pair))}
    while missing:
        first, a, second, b = min(missing)
        cell = {first: a, second: b}
        for axis in rng.sample(sorted(AXES), len(AXES)):
            if axis not in cell:
                values = [value for value in AXES[axis] if not excluded(cell | {axis: value})]
                cell[axis] = max(values, key=lambda value: (len(covered(cell | {axis: value}) & missing), rng.random()))
        missing -= covered(cell)
        cells.append(cell)
    return cells


def covered(cell: Cell) -> set[tuple[str, str, str, str]]:
    named = [axis for axis in AXES if axis in cell]
    return {(first, cell[first], second, cell[second]) for first, second in combinations(named, 2)}


def random_cell(rng: random.Random) -> Cell:
    return {axis: rng.choice(values) for axis, values in AXES.items()}


def table() -> str:
    """The matrix of axes in Markdown. ✓: all pairs are equal to their reference; a number: so many are refused."""
    names = list(AXES)
    lines = [f"| | {' | '.join(names[1:])} |", f"| --- |{' :-: |' * (len(names) - 1)}"]
    for row, first in enumerate(names[:-1]):
        marks = []
        for column, second in enumerate(names[1:], 1):
            refused = sum(pair[0] == first and pair[2] == second for pair in REFUSED)
            count = len(AXES[first]) * len(AXES[second])
            mark = f"{count - refused} ✓, {refused} refused" if refused else f"{count} ✓"
            marks.append("" if column <= row else mark)
        lines.append(f"| {first} | {' | '.join(marks)} |")
    return "\n".join(lines)


def main() -> int:
    wrong = 0
    for pair in pairs():
        if excluded(cell := pair_cell(pair)):
            continue
        try:
            found = difference(cell)
        except Exception as error:  # printed, and the next cell follows
            found = f"{type(error).__name__}: {error}"
        if found if isinstance(found, str) else found > TOLERANCE:
            wrong += 1
            print(" × ".join(pair[1::2]), found, flush=True)
    print(f"{table()}\n{wrong} pairs are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
