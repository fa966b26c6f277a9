"""Speculative decoding is 2 to 3 times as fast where the draft agrees often; easy tokens are accepted far more often.

A decoder and a smaller one, the draft model, learn stories of the small world. Blocks that add zero make the decoder
100 times as large, so that a step costs far more than one of the draft. The engine generates the same stories plainly
and with drafts of k tokens, greedily, by three draft models: the trained one, the decoder itself without the added
blocks, which always agrees, and an untrained one, the control. Each speed-up is compared with

    (1 - α^(k+1)) / (1 - α) / (v + k·c)     α: acceptance, c: cost of a draft step, v: cost of verifying k + 1 tokens

Costs are measured in steps of the decoder; v is 1 in the usual formula. All runs alternate, in processor time.
Easy tokens: the share of accepted tokens among punctuation, the most common English words, and all others, for these
two models on new stories, and for SmolLM2 with its copy in 3 bits as the draft on the Python manual.

Leviathan et al. 2022, Chen et al. 2023.
"""

# ledger: spec.speed spec.easy

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from regard.adapt.quantized import quantize_linears
from regard.data.world import stories
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.engine.speculation.draft_length import DraftCosts
from regard.engine.speculation.draft_model import DraftModel
from regard.engine.stores.contiguous import Contiguous
from regard.formats.integers import Integer
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.mamba_language import draw_rows
from regard.labs.small_models import decoder_spec
from regard.labs.trained_model import TRAINED, read_manual
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.planning.speed import expected_tokens
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe

VOCAB, WIDTH, SMALL, ROW = 512, 64, 32, 64
ROWS = 8  # of a batch
PROMPT, FORWARDS = 32, 4  # tokens before those that are timed; forwards of one measurement
TRAINED_DRAFT, SAME, UNTRAINED = "trained draft", "always agrees", "untrained draft"
COMMON = {
    "the", "of", "and", "to", "a", "in", "is", "it", "that", "was", "for", "on", "are", "as", "with", "be", "by",
    "this", "from", "or", "at", "an", "not", "but", "if", "then", "than",
}  # fmt: skip
CLASSES = ("punctuation", "common words", "others")


def run(bench: Bench) -> Findings:
    train, test, tokenizer = encode_stories(bench)
    torch.manual_seed(bench.seed)
    attention, steps = Attention(4, position=Rope()), bench.training(400, 2)
    model, draft, untrained = (
        decoder_spec(attention, VOCAB, width, layers).build() for width, layers in ((WIDTH, 2), (SMALL, 1), (SMALL, 1))
    )
    for name, module in (("model", model), ("draft model", draft)):
        fit(bench, name, module, lambda rng: draw_rows(rng, train, ROWS, ROW), steps, 5e-3)
    large = enlarged(model, bench.setting(8, 1), bench.setting(8192, 64))
    found = measure(bench, large, {TRAINED_DRAFT: draft, SAME: model, UNTRAINED: untrained.eval()}, test)
    shares = {"trained pair": acceptance_by_class(model, draft, test[: bench.setting(40, 2) * ROW].view(-1, ROW),
                                                  tokenizer.decode_token)}  # fmt: skip
    shares["SmolLM2 and 3 bits"] = acceptance_of_smollm2(bench, tokenizer)
    table = [{"draft": name, "k": k} | values for (name, k), values in found.items()]
    lengths = sorted({k for _, k in found})
    speedups = {name: {k: found[name, k]["speed-up"] for k in lengths} for name in (TRAINED_DRAFT, SAME, UNTRAINED)}
    best = max(lengths, key=lambda k: speedups[TRAINED_DRAFT][k])
    chosen, whole = found[TRAINED_DRAFT, best], found[SAME, 5]
    ratios = [found[name, k]["speed-up"] / found[name, k]["formula"] for name in (TRAINED_DRAFT, SAME) for k in lengths]
    checks = [
        Check("the tokens are those of plain decoding, with every draft", f"{len(found)} runs",
              all(values["equal"] for values in found.values())),
        Check("the trained draft agrees often: more than 0.7 of the verified tokens are accepted",
              f"{chosen['acceptance']:.2f}", chosen["acceptance"] > 0.7),
        Check("with it the best length is 2 to 3 times as fast as plain decoding",
              f"{chosen['speed-up']:.2f}x with {best} tokens", 2 <= chosen["speed-up"] <= 3),
        Check("5 accepted of 5 are not 5 times: less than (k + 1) / (1 + k c)",
              f"{whole['speed-up']:.2f}x, acceptance {whole['acceptance']:.2f}, c = {whole['c']:.2f}, "
              f"v = {whole['v']:.2f}",
              whole["acceptance"] == 1 and whole["speed-up"] < min(5, 6 / (1 + 5 * whole["c"]))),
        Check("the formula with the measured costs is right within 25 %, for the drafts that agree",
              f"{min(ratios):.2f} to {max(ratios):.2f} of it", max(abs(ratio - 1) for ratio in ratios) <= 0.25),
        Check("an untrained draft is slower than none, at every length",
              f"{min(speedups[UNTRAINED].values()):.2f} to {max(speedups[UNTRAINED].values()):.2f}x",
              max(speedups[UNTRAINED].values()) < 1),
        *(Check(f"{name}: punctuation and common words are rejected less than half as often as other tokens",
                ", ".join(f"{kind} {1 - share[kind]:.2f}" for kind in CLASSES),
                max(1 - share[kind] for kind in CLASSES[:2]) < (1 - share["others"]) / 2)
          for name, share in shares.items()),
    ]  # fmt: skip
    plots = [
        Plot("tokens per draft", "speed-up", {
            TRAINED_DRAFT: list(speedups[TRAINED_DRAFT].items()),
            "its formula": [(k, found[TRAINED_DRAFT, k]["formula"]) for k in lengths],
            SAME: list(speedups[SAME].items()), UNTRAINED: list(speedups[UNTRAINED].items()),
        }, "batch of one, processor time"),
        Plot("", "accepted", {name: [(i, share[kind]) for i, kind in enumerate(CLASSES)]
                              for name, share in shares.items()}, groups=("punctuation", "common\nwords", "others")),
    ]  # fmt: skip
    remark = (
        "On a CPU a forward of few tokens costs more than one of one token (v), on a GPU hardly: speed-ups there are "
        "higher. The classes of a token are those of the model's own choice."
    )
    return Findings(table, checks, plots, remark)


def encode_stories(bench: Bench) -> tuple[Tensor, Tensor, Tokenizer]:
    """The ids of stories for training, and of held-out ones, which the seed chooses."""
    texts = {
        split: "\n".join(story.text for story in islice(stories(2, split, bench.seed << 20), count))
        for split, count in (("train", bench.setting(2000, 40)), ("held-out", bench.setting(100, 20)))
    }
    tokenizer = bpe([texts["train"]], VOCAB)
    train, test = (torch.tensor(tokenizer.encode(text)) for text in texts.values())
    return train, test, tokenizer


@torch.no_grad()
def enlarged(model: DecoderModule, blocks: int, hidden: int) -> DecoderModule:
    """The same function with added blocks, whose output is zero: it costs what their weights cost."""
    spec = model.spec
    run = spec.layers[0]
    assert isinstance(run, Repeat)
    padding = Block((Sublayer(SwiGLU(hidden)),))
    large = replace(spec, layers=(run, Repeat((padding,), blocks))).build(seed=0)
    large.load_state_dict(model.state_dict(), strict=False)
    for block in large.stack.blocks[len(model.stack.blocks) :]:
        for name, weight in block.named_parameters():
            if "down_proj" in name:
                weight.zero_()
    return large.eval()


def measure(
    bench: Bench, model: DecoderModule, drafts: dict[str, DecoderModule], text: Tensor
) -> dict[tuple[str, int], dict[str, float]]:
    """By draft model and length: acceptance, costs and speed-up. All runs alternate; medians."""
    prompt, new = text[:PROMPT].tolist(), bench.setting(32, 12)
    sampling, capacity = Sampling(max_new=new, temperature=0), PROMPT + new
    plain, engines = Engine(model, rows=1, capacity=capacity), {}
    for name, draft in drafts.items():
        for k in bench.setting((1, 3, 5, 8), (2, 5)):
            engine = Engine(model, rows=1, capacity=capacity, speculation=DraftModel(draft), draft_tokens=k)
            assert engine.speculation is not None
            engine.speculation.costs = DraftCosts(1.0, 0.0)  # drafts of k tokens, whether they pay or not
            engines[name, k] = engine
    seconds: defaultdict[object, list[float]] = defaultdict(list)
    outputs: dict[object, list[int]] = {}
    for _ in bench.each("rounds", range(bench.setting(4, 2))):
        for key, engine in {"plain": plain, **engines}.items():
            outputs[key], spent = generate(engine, prompt, sampling)
            seconds[key].append(spent)
        for n in sorted({1, *(k + 1 for _, k in engines)}):
            seconds["verify", n].append(forward_seconds(model, n))
        for name, draft in drafts.items():
            seconds["draft", name].append(forward_seconds(draft, 1))
    median = {key: statistics.median(times[1:]) for key, times in seconds.items()}  # the first is a warm-up
    found = {}
    for (name, k), engine in engines.items():
        assert engine.speculation is not None
        numbers = engine.speculation.statistics
        before = [numbers.drafts, *numbers.accepted]  # drafts that were right up to each position
        alpha = sum(numbers.accepted) / sum(map(min, before, numbers.proposed))  # of the tokens that were verified
        v, c = (median[key] / median["verify", 1] for key in (("verify", k + 1), ("draft", name)))
        found[name, k] = {
            "acceptance": alpha, "tokens per draft": numbers.tokens_per_draft, "c": c, "v": v,
            "speed-up": median["plain"] / median[name, k], "formula": expected_tokens(alpha, k) / (v + k * c),
            "equal": outputs[name, k] == outputs["plain"],
        }  # fmt: skip
    return found


def generate(engine: Engine, prompt: list[int], sampling: Sampling) -> tuple[list[int], float]:
    """The new tokens, and the processor time after the first one."""
    request = engine.submit(prompt, sampling)
    while not request.new:
        engine.step()
    start = time.process_time()
    while request.finish is None:
        engine.step()
    return [token.id for token in request.new], time.process_time() - start


@torch.inference_mode()
def forward_seconds(model: DecoderModule, tokens: int) -> float:
    """Of a forward of so many tokens after a prompt."""
    store = Contiguous(model.spec.memory(), 1, PROMPT + tokens, torch.float32)
    layout, ids = TokenLayout(torch.arange(PROMPT, PROMPT + tokens).unsqueeze(0)), torch.zeros(1, tokens).long()
    start = time.process_time()
    for _ in range(FORWARDS):
        model(ids, layout, store.begin_forward(layout, check=False))
    return (time.process_time() - start) / FORWARDS


def class_of(token: str) -> str:
    word = token.strip().lower()
    return CLASSES[1] if word in COMMON else CLASSES[2] if any(map(str.isalnum, word)) else CLASSES[0]


@torch.no_grad()
def acceptance_by_class(
    model: DecoderModule, draft: DecoderModule, rows: Tensor, decode: Callable[[int], str]
) -> dict[str, float]:
    """The share of positions of a text at which both have the same most likely token, by the class of the model's."""
    chosen, proposed = (of(rows).argmax(-1).flatten().tolist() for of in (model, draft))
    hits: dict[str, list[bool]] = {kind: [] for kind in CLASSES}
    for a, b in zip(chosen, proposed, strict=True):
        hits[class_of(decode(a))].append(a == b)
    return {kind: sum(found) / max(1, len(found)) for kind, found in hits.items()}


def acceptance_of_smollm2(bench: Bench, tokenizer: Tokenizer) -> dict[str, float]:
    model, ids = read_manual(bench, 1, bench.setting(512, 32))
    rounded = deepcopy(model)
    quantize_linears(rounded, Integer(3, symmetric=False, group=32))
    tokenizer = tokenizer if bench.size == "quick" else Tokenizer.load(TRAINED)
    return acceptance_by_class(model, rounded, ids, tokenizer.decode_token)
