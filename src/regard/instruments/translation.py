"""From one vector to cross-attention: what a decoder knows of its source, measured on small trained models."""

import math
from functools import cache
from random import Random

import torch
from torch import Tensor

from regard.instruments.examples import MAX_REVERSED, SYMBOLS, TARGET_WORDS, ids, trained
from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, TextField
from regard.instruments.panels import bars, heatmap, lines, numbers, tokens
from regard.instruments.words import one_head, split_words
from regard.kernels.attention.mask import Full
from regard.layout import TokenLayout
from regard.lens.hooks import patch
from regard.lens.maps import named_attention_maps
from regard.parts.scored_attention import AdditiveModule, ScoredAttention

ROWS = 48
SENTENCE = "the old key opens the small box"
PRINTED = "made to give the printed weights"
EXAMPLE_ADDITIVE = (0.62, 0.18, 0.09, 0.06, 0.05)  # the first step of a printed example, five encoder states
EXAMPLE_CROSS = (0.55, 0.34, 0.11)  # the same of cross-attention, three source tokens
MODES = ("trained model", PRINTED)
ADDITIVE = "target.stack.blocks.0.sublayers.0.body.attention.pattern"
CROSS = "target.stack.blocks.0.sublayers.1.body"


@cache
@torch.no_grad()
def reversal_accuracy(name: str) -> list[float]:
    """The share of sequences that the trained model reverses without a mistake, by length of the source."""
    rng, model, result = Random(5), trained(name), []
    for length in range(1, MAX_REVERSED + 1):
        source = torch.tensor([[rng.randint(1, SYMBOLS) for _ in range(length)] for _ in range(ROWS)])
        target = source.flip(1)
        logits = model(source, torch.nn.functional.pad(target, (1, -1)))
        result.append(float((logits.argmax(-1) == target).all(1).float().mean()))
    return result


@torch.no_grad()
def generate(name: str, source: Tensor, steps: int) -> Tensor:
    """Greedy output (B, 1 + steps) of an encoder-decoder, with the symbol at its start."""
    model, out = trained(name), torch.zeros(len(source), 1, dtype=torch.long)
    for _ in range(steps):
        out = torch.cat([out, model(source, out)[:, -1:].argmax(-1)], 1)
    return out


def bottleneck(length: int, seed: int) -> list[Panel]:
    rng = Random(seed)
    source = torch.tensor([[rng.randint(1, SYMBOLS) for _ in range(length)]])
    names = {"one state (LSTM)": "reversal", "attention (transformer)": "reversal-attention"}
    curves = {label: list(enumerate(reversal_accuracy(name), 1)) for label, name in names.items()}
    letters = " ABCDEFGH"
    panels = [
        lines("sequences reversed without a mistake", curves, "length of the source", "share", marks={"here": length}),
        tokens("source", [letters[i] for i in source[0].tolist()], [0.0] * length),
    ]
    for label, name in names.items():
        out = generate(name, source, length)[0, 1:].tolist()
        wrong = [float(a != b) for a, b in zip(out, source[0].flip(0).tolist(), strict=True)]
        panels.append(tokens(f"reversed, {label}; wrong symbols are tinted", [letters[i] for i in out], wrong))
    state = {label: points[length - 1][1] for label, points in curves.items()}
    return [
        *panels,
        numbers(
            {"numbers in the state": 2 * 24} | {f"without a mistake, {label}": value for label, value in state.items()}
        ),
    ]


@torch.no_grad()
def additive_weights(source: list[str]) -> tuple[list[str], Tensor]:
    """The output of the trained model, and its weights (steps, source words)."""
    model, rows, x = trained("additive"), [], torch.tensor([ids(source)])
    out = generate("additive", x, 5)

    def keep(pattern: Tensor) -> Tensor:
        rows.append(pattern[0, 0, 0])
        return pattern

    with patch(model, {ADDITIVE: keep}):
        model(x, out[:, :-1])
    return [TARGET_WORDS[i] for i in out[0, 1:].tolist()], torch.stack(rows)


def printed_additive() -> Tensor:
    """The part with one hidden unit, whose states are chosen so that the scores are the logs of the printed weights."""
    module = ScoredAttention(source=True, score_dim=1).module(1, 1).double()
    assert isinstance(module, AdditiveModule)
    states = torch.tensor(EXAMPLE_ADDITIVE, dtype=torch.float64).log().div(10).atanh()
    layout = TokenLayout(torch.tensor([[0]])).with_keys(torch.arange(5)[None])
    with torch.no_grad():
        module.k_proj.weight.fill_(1.0)
        module.v.fill_(10.0)
        k = module.cached_arrays(states.view(1, 5, 1))["k"]
        return module.weights(torch.zeros(1, 1, 1, 1, dtype=torch.float64), k, layout)[0, 0]


def read_sentence(text: str) -> list[str]:
    """The words of a sentence of the pattern that the models were trained on."""
    words = split_words(text.lower())
    if len(words) != len(SENTENCE.split()) or words[0] != "the" or words[4] != "the":
        raise ValueError(f"write seven words like “{SENTENCE}”: the models were trained on this pattern only")
    return words


def alignment(mode: str, text: str, step: int) -> list[Panel]:
    if mode == PRINTED:
        source, target, weights = [f"h{i}" for i in range(1, 6)], ["step 1"], printed_additive()
    else:
        source = read_sentence(text)
        target, weights = additive_weights(source)
    return aligned(source, target, weights, step, "encoder states")


def cross_attention(mode: str, text: str, step: int) -> list[Panel]:
    if mode == PRINTED:
        k = torch.tensor(EXAMPLE_CROSS, dtype=torch.float64).log()[:, None]
        _, weights, _ = one_head(torch.ones(1, 1), k, k, Full(), 1.0)
        return aligned(["k1", "k2", "k3"], ["step 1"], weights, step, "source tokens")
    source = read_sentence(text)
    x = torch.tensor([ids(source)])
    out = generate("translation", x, 5)
    weights = named_attention_maps(trained("translation"), x, out[:, :-1])[CROSS][0].mean(0)  # (steps, source words)
    return aligned(source, [TARGET_WORDS[i] for i in out[0, 1:].tolist()], weights, step, "source tokens")


def aligned(source: list[str], target: list[str], weights: Tensor, step: int, keys: str) -> list[Panel]:
    row = min(step, len(target)) - 1
    entropy = -sum(w * math.log(w) for w in weights[row].tolist() if w > 0)
    return [
        heatmap(f"weights: output down, {keys} across", weights, target, source, sets="step", selected=row),
        bars(f"weights for “{target[row]}”", list(zip(source, weights[row].tolist(), strict=True))),
        tokens("output", target, [float(i == row) for i in range(len(target))], sets="step", selected=row),
        numbers(
            {
                "sum of the weights": float(weights[row].sum()),
                "entropy, nats": entropy,
                "largest": float(weights[row].max()),
            }
        ),
    ]


STEPS = (
    Selection("mode", "weights of", MODES, "trained model"),
    TextField("text", "words", SENTENCE),
    Slider("step", "output step", 1, 5, 1),
)
INSTRUMENTS = (
    Instrument(
        "bottleneck", "Everything in one vector",
        "A recurrent encoder passes one state to its decoder; long sources do not fit. A transformer attends to all.",
        r"s_0 = h_n, \qquad y_t \sim p(y_t \mid y_{<t}, s_0)",
        (Slider("length", "symbols", 1, MAX_REVERSED, 10), Slider("seed", "another sequence", 0, 20, 1)),
        Quiz(
            "From which length on does the state of 48 numbers lose symbols?",
            "From 7 symbols on there are mistakes, and at 12 one sequence in ten is right. The other curve is a "
            "transformer with twice the weights, so it does not show what attention alone adds to the LSTM.",
            {"length": 12},
        ),
        bottleneck, ("models/seq2seq.py", "parts/recurrent.py"),
    ),
    Instrument(
        "alignment", "The first attention: additive scores",
        "At every output step the decoder weighs all encoder states; the weights sum to 1 and align the languages.",
        r"e_{ij} = v^\top \tanh(W s_{i-1} + U h_j), \qquad \alpha_{ij} = \frac{e^{e_{ij}}}{\sum_k e^{e_{ik}}}, \qquad "
        r"c_i = \sum_j \alpha_{ij} h_j",
        STEPS,
        Quiz(
            "The invented language puts nouns before adjectives and the verb last. Where do the weights show it?",
            "They are not on the diagonal: the first output word attends to “key”, the last one mostly to the state "
            "after “opens”, which has read it.",
            {"mode": "trained model", "text": SENTENCE, "step": 5},
        ),
        alignment, ("parts/scored_attention.py", "parts/attention_rnn.py", "models/seq2seq.py"),
    ),
    Instrument(
        "cross-attention", "Cross-attention",
        "Queries come from the decoder, keys and values from the encoder: all output words attend to the source.",
        r"\mathrm{softmax}\!\left(\frac{Q_{\mathrm{dec}}\,K_{\mathrm{enc}}^\top}{\sqrt{d_k}}\right) V_{\mathrm{enc}}",
        STEPS,
        Quiz(
            "Which word of the source has the largest weight for the last word of the output?",
            "“opens”: the verb is last in the invented language. Not every row is an alignment: at step 4 this model "
            "puts its weight on the first “the”, and its output is still right.",
            {"mode": "trained model", "text": SENTENCE, "step": 5},
        ),
        cross_attention, ("parts/cross_attention.py", "models/encoder_decoder.py"),
    ),
)  # fmt: skip
