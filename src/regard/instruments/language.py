"""What a language model does with a text: heads, generation, masked words, and its guess layer by layer."""

import math
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.instruments.examples import MASK, START, WORDS, ids, trained, word_tokenizer
from regard.instruments.instrument import Instrument, Panel, Quiz, Slider, Subject, Switch, TextField
from regard.instruments.panels import bars, heatmap, lines, numbers, table, tokens
from regard.instruments.vocabulary import EXAMPLE, MAX_TOKENS, OF, read
from regard.kernels.attention.mask import Causal
from regard.lens.detectors import HeadScores, score_heads, weight_maps
from regard.lens.logit_lens import logit_lens
from regard.lens.maps import attention_maps, entropy
from regard.models.decoder import Decoder, DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.stack import replace_runs
from regard.objectives.masked import MaskedTokens
from regard.parts.attention import Attention
from regard.planning.parameters import count_parameters
from regard.planning.part_tree import part_tree

TEXT = "the old key opens the small box . it is"
GAPS = "the [MASK] key opens the small [MASK] . it is old ."
MAX_HEADS = 16  # maps of one layer that are drawn


LABELS: WeakKeyDictionary[DecoderModule, HeadScores] = WeakKeyDictionary()


def head_label(model: DecoderModule, layer: int, head: int) -> str:
    """The kind of a head by the detectors of the lens, measured once per model on repeated random tokens."""
    if model not in LABELS:
        length = min(32, model.spec.vocab, (model.spec.context or 64) // 2)
        LABELS[model] = score_heads(model, model.spec.vocab, length)
    scores = {kind: layers[layer] for kind, layers in LABELS[model].scores.items()}
    score, kind = max((float(of_layer[head]), kind) for kind, of_layer in scores.items() if of_layer is not None)
    return f"{kind} {score:.2f}" if score > 0.4 else "no label"


def heads(subject: Subject | None, of: str, text: str, layer: int, head: int) -> list[Panel]:
    subject, encoded, pieces = read(subject, of, text)
    model, maps = subject.model, weight_maps(subject.model, torch.tensor(encoded))
    layer = min(layer, len(maps) - 1)
    found = maps[layer]
    if found is None:
        raise ValueError(f"layer {layer} has no attention; choose another one")
    weights = found.float().cpu()
    head, n = min(head, len(weights) - 1), len(encoded)
    later = torch.arange(1, n) if n > 1 else torch.tensor([0])
    previous, first = weights[:, later, (later - 1).clamp_min(0)].mean(-1), weights[:, later, 0].mean(-1)
    rows = [(h, previous[h].item(), first[h].item(), e) for h, e in enumerate(entropy(weights).tolist())]
    cells = [[w if j <= i else None for j, w in enumerate(row)] for i, row in enumerate(weights[head].tolist())]
    width, drawn = model.spec.width, min(MAX_HEADS, len(weights))
    of_all = "" if drawn == len(weights) else f"; the first {drawn} of {len(weights)} heads"
    place = f"layer {layer}, head {head} ({len(maps)} layers of {len(weights)} heads)"
    return [
        heatmap(f"{place} · {head_label(model, layer, head)}{of_all}", cells, pieces, pieces),
        table(
            "the heads of this layer, on this text",
            ("head", "weight on the previous token", "on the first token", "entropy, nats"),
            rows,
        ),
        *(
            heatmap(f"head {h} · {head_label(model, layer, h)}", weights[h], pieces, pieces, shows_numbers=False)
            for h in range(drawn)
        ),
        numbers(
            {
                "model": subject.name,
                "heads": len(weights),
                "width": width,
                "8 heads of 64 in the model of 2017": 8 * Attention(8).sizes(512)[2],
            }
        ),
    ]


@torch.no_grad()
def next_token(subject: Subject, encoded: list[int], temperature: float) -> Tensor:
    rows = torch.tensor([encoded], device=subject.model.embedding.weight.device)
    return (subject.model(rows)[0, -1].float().cpu() / temperature).softmax(-1)


def generation(subject: Subject | None, of: str, text: str, steps: int, choice: int, temperature: float) -> list[Panel]:
    subject, encoded, pieces = read(subject, of, text)
    written, rows = [], []
    for step in range(steps):
        if len(encoded) >= MAX_TOKENS:
            break
        best = next_token(subject, encoded, temperature).topk(5)
        rank = choice - 1 if step == 0 else 0
        id = int(best.indices[rank])
        names = [subject.tokenizer.decode_token(int(i)) for i in best.indices]
        if step == 0:
            first = bars(
                "the first new token", list(zip(names, best.values.tolist(), strict=True)), sets="choice", selected=rank
            )
        others = ", ".join(f"{n} {p:.2f}" for n, p in zip(names, best.values.tolist(), strict=True) if n != names[rank])
        rows.append((step + 1, names[rank], float(best.values[rank]), others))
        written.append(float(best.values[rank]))
        encoded, pieces = [*encoded, id], [*pieces, names[rank]]
    if not rows:
        raise ValueError(f"the text already has {MAX_TOKENS} tokens; shorten it")
    known = len(pieces) - len(written)
    notes = [""] * known + [f"{p:.0%}" for p in written]
    return [
        tokens("text, and what the model adds; each new token is fed back in", pieces, [0.0] * known + written, notes),
        first,
        table("step by step", ("step", "token", "probability", "others"), rows),
        numbers({"model": subject.name, "forward passes": len(rows), "probability of all": math.prod(written)}),
    ]


@cache
def masked_model(two_way: bool) -> EncoderModule:
    """The trained encoder; for one-way attention the same weights with a causal mask."""
    module = trained("masked")
    assert isinstance(module, EncoderModule)
    if two_way:
        return module
    causal = replace_runs(module.spec, lambda run: replace(run, blocks=tuple(with_causal(b) for b in run.blocks)))
    assert isinstance(causal, Encoder)
    copy = causal.build(seed=0)
    copy.load_state_dict(module.state_dict())
    return copy.eval()


def with_causal(block):
    sublayers = tuple(
        replace(s, body=replace(s.body, mask=Causal())) if isinstance(s.body, Attention) else s for s in block.sublayers
    )
    return replace(block, sublayers=sublayers)


@cache
def masking_shares() -> dict[str, float]:
    """What becomes of the chosen tokens, counted in 20,000 tokens that the objective masked."""
    rng = np.random.default_rng(0)
    text = rng.integers(2, len(WORDS), 20_000)
    item = MaskedTokens().masked_item(text, np.arange(len(text)), word_tokenizer(), rng)
    chosen = item["weights"] > 0
    now, was = item["tokens"][chosen], item["targets"][chosen]
    is_mask, kept = (now == WORDS.index(MASK)).mean(), (now == was).mean()
    return {
        "chosen of all": float(chosen.mean()),
        "[MASK]": float(is_mask),
        "random word": float(1 - is_mask - kept),
        "kept": float(kept),
    }


def masked_words(text: str, two_way: bool, index: int) -> list[Panel]:
    words = [word if word == MASK else word.lower() for word in text.split()]
    encoded = ids([START, *words])
    masked = [i for i, id in enumerate(encoded) if id == WORDS.index(MASK)]
    if not masked or len(encoded) > MAX_TOKENS:
        raise ValueError(f"write at most {MAX_TOKENS - 1} words, some of them as {MASK}")
    at, model = masked[min(index, len(masked)) - 1], masked_model(two_way)
    with torch.no_grad():
        probabilities = model(torch.tensor([encoded]))[0].softmax(-1)
    best = [probabilities[i].max(-1) for i in masked]
    filled = [WORDS[int(best[masked.index(i)].indices)] if i in masked else WORDS[id] for i, id in enumerate(encoded)]
    notes = [f"{float(best[masked.index(i)].values):.0%}" if i in masked else "" for i in range(len(encoded))]
    last = attention_maps(model, encoded)[-1]
    assert last is not None
    weights = last.mean(0)  # (L, L), the mean of the heads
    attended = (weights[at] > 0).nonzero().flatten().tolist()
    top = probabilities[at].topk(5)
    return [
        tokens("filled in", filled, [float(i in masked) for i in range(len(filled))], notes),
        bars(
            f"position {at}: most likely words",
            [(WORDS[int(i)], float(p)) for p, i in zip(top.values, top.indices, strict=True)],
        ),
        bars(
            "weights of this position in the last layer, its own included",
            [(f"{i} {WORDS[id]}", w) for i, (id, w) in enumerate(zip(encoded, weights[at].tolist(), strict=True))],
        ),
        bars("tokens that the objective chooses, and what becomes of them", masking_shares()),
        numbers({"attends to positions": ", ".join(map(str, attended))}),
    ]


@torch.no_grad()
def token_losses(model: DecoderModule, encoded: list[int]) -> list[float]:
    """−log p of each token after the first."""
    rows = torch.tensor([encoded], device=model.embedding.weight.device)
    logits = model(rows)[0, :-1].float()
    return F.cross_entropy(logits, rows[0, 1:], reduction="none").tolist() if len(encoded) > 1 else []


@cache
def stages(spec: Decoder, tokens: int) -> list[tuple[str, str, str]]:
    """The parts of the stack in order, with the shape of their outputs and their weights, drawn from the spec."""
    (stack,) = part_tree(spec, tokens)["stacks"]
    inside, scores = f"({tokens}, {spec.width})", f"({tokens}, {spec.vocab})"

    def row(part: dict[str, Any]) -> tuple[str, str, str]:
        return part["kind"], scores if part["kind"] == "unembedding" else inside, f"{part['parameters']:,}"

    outside = sum(part["parameters"] for part in (*stack["before"], *stack["after"]))
    blocks = (f"{stack['layers']} blocks", inside, f"{count_parameters(spec).total - outside:,}")
    return [
        ("ids", f"({tokens},)", ""),
        *map(row, stack["before"]),
        blocks,
        *map(row, stack["after"]),
        ("softmax", scores, ""),
    ]


def sandwich(subject: Subject | None, of: str, text: str) -> list[Panel]:
    subject, encoded, pieces = read(subject, of, text)
    model = subject.model
    by_layer = logit_lens(model, encoded, slice(-1, None))
    losses = [0.0, *token_losses(model, encoded)]
    answer, rows, curve = int(list(by_layer.values())[-1][0, -1].argmax()), [], []
    for depth, logits in enumerate(by_layer.values()):
        p = logits[0, -1].float().cpu().softmax(-1)
        rows.append(
            (
                depth - 1 if depth else "input",
                subject.tokenizer.decode_token(int(p.argmax())),
                p.max().item(),
                p[answer].item(),
            )
        )
        curve.append((depth, p[answer].item()))
    spec, n = model.spec, len(encoded)
    return [
        table("from ids to probabilities", ("part", "shape of its output", "weights"), stages(spec, n)),
        lines(
            f"probability of “{subject.tokenizer.decode_token(answer)}” if the head read each layer",
            {"probability": curve},
            "layers before the head",
            "probability",
        ),
        table("guess after each layer", ("layer", "guess", "its probability", "of the final guess"), rows),
        tokens(
            "loss of each token, −log p; uncertain ones are tinted",
            pieces,
            [min(1.0, loss / 4) for loss in losses],
            ["", *(f"{loss:.2f}" for loss in losses[1:])],
        ),
        numbers(
            {
                "model": subject.name,
                "mean loss": sum(losses) / max(1, n - 1),
                "log of the vocabulary": math.log(spec.vocab),
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "heads", "Heads side by side",
        "Each head has its own projections and its own weights; together they have the cost of one wide head.",
        r"\mathrm{MultiHead}(X) = [\mathrm{head}_1; \dots; \mathrm{head}_h]\,W_O, \qquad h \cdot d_k = 8 \cdot "
        r"64 = 512",
        (
            OF,
            TextField("text", "text", TEXT),
            Slider("layer", "layer", 0, 47, 0),
            Slider("head", "head", 0, 63, 0),
        ),
        Quiz(
            "The adjective of the first sentence has to be repeated after “is”. Which head finds it?",
            "In the example model, head 1 of layer 0: “is” puts 98 % of its weight on “old”.",
            {"of": EXAMPLE, "text": TEXT, "layer": 0, "head": 1},
        ),
        heads, ("lens/maps.py", "parts/attention.py"), reads_model=True,
    ),
    Instrument(
        "generation", "Generating token by token",
        "The model predicts a distribution over the next token; the chosen one is appended and everything runs again.",
        r"p(x_1, \dots, x_n) = \prod_t p(x_t \mid x_{<t})",
        (
            OF,
            TextField("text", "text", TEXT),
            Slider("steps", "new tokens", 1, 8, 4),
            Slider("choice", "rank of the first new token", 1, 5, 1),
            Slider("temperature", "temperature", 0.1, 3.0, 1.0, 0.05),
        ),
        Quiz(
            "What does a high temperature do to the probabilities?",
            "It makes them more equal: the logits are divided by it before the softmax. At 3 the first word has 0.50 "
            "instead of 0.998.",
            {"of": EXAMPLE, "text": TEXT, "temperature": 3.0},
        ),
        generation, ("models/decoder.py",), reads_model=True,
    ),
    Instrument(
        "masked-words", "Filling in masked words",
        "An encoder attends to both sides of a gap; with a causal mask only to the gap and the words before it.",
        r"\mathcal{L} = -\sum_{i \in \text{masked}} \log p(x_i \mid x_{\setminus \text{masked}})",
        (
            TextField("text", "words, gaps as [MASK]", GAPS),
            Switch("two_way", "attend to both sides; off: the same weights with a causal mask", True),
            Slider("index", "gap", 1, 8, 1),
        ),
        Quiz(
            "The first adjective is masked and repeated at the end. Can a one-way model know it?",
            "No: with attention to both sides “old” has 0.9997; with a causal mask each of the six adjectives has 0.13 "
            "to 0.22. The gap also attends to its own position.",
            {"text": GAPS, "two_way": False, "index": 1},
        ),
        masked_words, ("models/encoder.py", "objectives/masked.py"),
    ),
    Instrument(
        "sandwich", "From ids to the next token",
        "Ids become vectors, blocks change them, the head turns the last one into a guess; the lens reads every layer.",
        r"\mathrm{logits}_\ell = W_{\mathrm{head}}\,\mathrm{norm}(x_\ell), \qquad \mathcal{L} = -\log p(x_{t+1} "
        r"\mid x_{\le t})",
        (OF, TextField("text", "text", TEXT)),
        Quiz(
            "After which layer is the final guess there?",
            "In the example model only after the last: after layer 0 “stone” has 0.07, after layer 1 0.9998.",
            {"of": EXAMPLE, "text": "the red boat carries the old"},
        ),
        sandwich, ("lens/logit_lens.py", "models/decoder.py"), reads_model=True,
    ),
)  # fmt: skip
