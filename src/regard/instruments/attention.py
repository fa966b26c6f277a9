"""Attention step by step: one query, one head, five tokens computed by hand, many heads, and masks."""

import math

import torch
from torch import Tensor

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Switch, TextField
from regard.instruments.panels import bars, heatmap, numbers, scatter, table
from regard.instruments.words import one_head, seeded, split_words, whole, word_vectors
from regard.kernels.attention.mask import Causal, Full, Mask, PrefixLM
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Dilated, SinksAndWindow, Window
from regard.layout import TokenLayout
from regard.lens.hooks import record
from regard.lens.maps import row_entropy
from regard.parts.attention import Attention
from regard.parts.position.sinusoidal import Sinusoidal

HEAD_DIM, COORDINATES = 64, 8
KEYS, VALUES = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)), (10.0, 20.0, 30.0)
# Five tokens of width 4, then W_Q, W_K and W_V: drawn in R from N(0, 1) with seed 2017.
TOY_WORDS = ("the", "lamp", "stood", "by", "doors")
TOY_X = (
    1.434201, 0.451906, 0.342768, 1.194427, -0.077292, -1.958366, 1.572425, -0.482068, 0.739137, -0.001524,
    -0.746735, 1.317862, -1.758605, -0.265336, 0.306650, -1.129832, -0.069825, 1.563223, -1.430486, -0.926351,
)  # fmt: skip
TOY_PROJECTIONS = (
    (0.140709, 0.759625, -0.867785, 0.589432, -0.852233, 0.062291, 0.098734, -0.930625,
     1.903397, -0.389031, -0.683174, 0.297462, -1.648186, 0.636666, 0.241089, 3.137277),
    (-1.027535, -1.059545, -0.339800, 0.918723, 1.941803, 0.024333, 1.110236, 1.206424,
     -0.277956, -0.729586, 0.049290, 1.358132, -0.221589, -1.025831, 0.983654, -1.584031),
    (0.197645, 1.572099, 0.768634, 0.942941, -0.021835, 1.483242, 0.186895, 0.239568,
     -1.593504, -0.222678, -1.330609, -0.483265, -1.025421, -0.340831, 0.063698, 0.525216),
)  # fmt: skip


def sweep(angle: float, length: float) -> list[Panel]:
    radians = math.radians(angle)
    q = torch.tensor([[length * math.cos(radians), length * math.sin(radians)]], dtype=torch.float64)
    k, v = torch.tensor(KEYS, dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)[:, None]
    scores, weights, out = one_head(q, k, v, Full(), 2**-0.5)
    names = [f"key {i + 1}, value {VALUES[i]:.0f}" for i in range(3)]
    arrows = [(float(q[0, 0]), float(q[0, 1]), "query"), *((x, y, f"key {i + 1}") for i, (x, y) in enumerate(KEYS))]
    return [
        scatter("query and keys", arrows, ["query", "key", "key", "key"], arrows=True),
        bars("weights", [(name, float(w)) for name, w in zip(names, weights[0], strict=True)], digits=4),
        table(
            "from dot products to weights",
            ("key", "q·k", "q·k / √2", "exp", "weight"),
            [(i, s * 2**0.5, s, math.exp(s), w) for i, s, w in zip((1, 2, 3), *rows(scores, weights), strict=True)],
        ),
        numbers(
            {"output": float(out), "sum of exp": float(scores.exp().sum()), "sum of weights": float(weights.sum())}
        ),
    ]


def rows(*matrices: Tensor) -> list[list[float]]:
    return [matrix[0].tolist() for matrix in matrices]


def self_attention(text: str, query: int, scaled: bool, temperature: float, causal: bool) -> list[Panel]:
    words = split_words(text)
    query = min(query, len(words)) - 1
    scale = (HEAD_DIM**-0.5 if scaled else 1.0) / temperature
    body = Attention(1, head_dim=HEAD_DIM, mask=Causal() if causal else Full(), scale=scale)
    module, x = seeded(body, HEAD_DIM, seed=5), word_vectors(words, HEAD_DIM)
    with torch.no_grad(), record(module, ["q", "k", "v", "scores", "pattern", "z"]) as recorded:
        module(x, whole(words))
    weights, scores = recorded["pattern"][0, 0].double(), recorded["scores"][0, 0].double()
    blocked = [[None if math.isinf(s) else s for s in row] for row in scores.tolist()]
    shapes = [("X", tuple(x.shape[1:])), *((n, tuple(recorded[n].shape[-2:])) for n in ("q", "k", "v", "pattern", "z"))]
    vectors = torch.stack([x[0, query], *(recorded[n][0, 0, query] for n in ("q", "k", "v", "z"))])[:, :COORDINATES]
    return [
        heatmap(
            "weights: queries down, keys across; random projections",
            weights,
            words,
            words,
            sets="query",
            selected=query,
        ),
        bars(f"“{words[query]}” attends to", list(zip(words, weights[query].tolist(), strict=True))),
        heatmap(
            f"vectors of “{words[query]}”, the first {COORDINATES} of {HEAD_DIM} coordinates",
            vectors,
            ("x", "q", "k", "v", "output"),
            range(1, COORDINATES + 1),
            "signed",
        ),
        heatmap(
            "scores before the softmax; random projections",
            blocked,
            words,
            words,
            "signed",
            sets="query",
            selected=query,
        ),
        numbers(
            {
                "√d_k": math.sqrt(HEAD_DIM),
                "sum of the row": float(weights[query].sum()),
                "entropy of the row, nats": float(row_entropy(weights)[query]),
                "largest possible entropy": math.log(query + 1 if causal else len(words)),
                "deviation of the scores": float(scores[scores.isfinite()].std(correction=0)),
            }
        ),
        table("shapes", ("tensor", "rows", "columns"), [(name, *shape) for name, shape in shapes]),
    ]


def toy(query: int, causal: bool, positions: bool, shrink: float) -> list[Panel]:
    x = torch.tensor(TOY_X, dtype=torch.float64).view(5, 4)
    if positions:
        x = Sinusoidal().build(4, 1).embed(x[None], TokenLayout.whole(1, 5))[0]
    projections = [torch.tensor(w, dtype=torch.float64).view(4, 4) for w in TOY_PROJECTIONS]
    q, k = (x @ w * shrink for w in projections[:2])
    scores, weights, out = one_head(q, k, x @ projections[2], Causal() if causal else Full(), 0.5)
    entropies, features = row_entropy(weights), [f"{i + 1}" for i in range(4)]
    return [
        heatmap("weights", weights, TOY_WORDS, TOY_WORDS, sets="query", selected=query - 1),
        heatmap("output z = A V", out, TOY_WORDS, features, "signed", sets="query", selected=query - 1),
        numbers(
            {
                "entropy of the row, nats": float(entropies[query - 1]),
                "largest entropy of a row": float(entropies.max()),
                "log 5": math.log(5),
                "deviation of the scaled scores": float(scores.std(correction=0)),
            }
        ),
    ]


def mask_of(kind: str, size: int, first: int) -> Mask:
    masks = {
        "causal": Causal(),
        "full": Full(),
        "prefix": PrefixLM(first),
        "window": Window(size),
        "two-sided window": Window(size, causal=False),
        "dilated": Dilated(size, 2),
        "first tokens and window": SinksAndWindow(first, size),
        "global tokens and window": Longformer(size, first),
    }
    return masks[kind]


MASKS = ("causal", "full", "prefix", "window", "two-sided window", "dilated", "first tokens and window",
         "global tokens and window")  # fmt: skip


def masks(kind: str, tokens: int, size: int, first: int, query: int) -> list[Panel]:
    mask, query = mask_of(kind, size, first), min(query, tokens) - 1
    same = torch.zeros(tokens, 1)  # equal scores: the weights show the mask alone
    _, weights, _ = one_head(same, same, same, mask, 1.0)
    allowed = weights > 0
    cells = [[weight if weight > 0 else None for weight in row] for row in weights.tolist()]
    names = [str(i + 1) for i in range(tokens)]
    keys = allowed.sum(-1)
    return [
        heatmap(
            "weights of equal scores; crossed cells are blocked",
            cells,
            names,
            names,
            sets="query",
            selected=query,
            shows_numbers=tokens <= 8,
        ),
        bars("keys per query", list(zip(names, keys.double().tolist(), strict=True)), sets="query", selected=query),
        numbers(
            {
                "blocked cells": int((~allowed).sum()),
                "allowed cells": int(allowed.sum()),
                "share of the full matrix": float(allowed.double().mean()),
                f"keys of query {query + 1}": int(keys[query]),
                "attends to later tokens": "yes" if bool(allowed.triu(1).any()) else "no",
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "one-query", "One query, three keys",
        "The weight of a key grows with its dot product with the query; the output is the weighted mean of the values.",
        r"\mathrm{out} = \sum_j \frac{e^{q\cdot k_j/\sqrt{d_k}}}{\sum_{j'} e^{q\cdot k_{j'}/\sqrt{d_k}}}\, v_j",
        (
            Slider("angle", "direction of the query, degrees", -180, 180, 0),
            Slider("length", "length of the query", 0.0, 8.0, 1.0, 0.1),
        ),
        Quiz(
            "In which direction must the query point so that the second key gets the largest weight?",
            "Between 90° and 225° (−135°): there sin θ exceeds both cos θ and cos θ + sin θ, the products "
            "of the other keys.",
            {"angle": 135, "length": 4.0},
        ),
        sweep, ("kernels/attention/reference.py",),
    ),
    Instrument(
        "self-attention", "Self-attention of one head",
        "Every token is projected to a query, a key and a value; each row of weights sums to 1 and mixes the values.",
        r"\mathrm{Attention}(Q,K,V) = \mathrm{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V",
        (
            TextField("text", "words", "we saw the lamp"),
            Slider("query", "query", 1, 12, 2),
            Switch("scaled", "divide by √d_k = 8", True),
            Slider("temperature", "temperature", 0.25, 4.0, 1.0, 0.05),
            Switch("causal", "causal mask", False),
        ),
        Quiz(
            "Why are the scores divided by √d_k?",
            "Without it the scores of 64-dimensional vectors are eight times as wide, and the softmax puts nearly all "
            "weight on one key: the entropy of this row falls from 1.13 to 0.15 nats.",
            {"scaled": False},
        ),
        self_attention, ("parts/attention.py", "kernels/attention/reference.py"),
    ),
    Instrument(
        "five-tokens", "Five tokens by hand",
        "Small enough to check with a pocket calculator: five tokens of width 4, random projections, one head.",
        r"A = \mathrm{softmax}\!\left(\frac{(XW_Q)(XW_K)^\top}{\sqrt{4}}\right),\quad z = A\,XW_V",
        (
            Slider("query", "query", 1, 5, 2),
            Switch("causal", "causal mask", False),
            Switch("positions", "add sinusoidal positions", True),
            Slider("shrink", "factor of W_Q and W_K", 0.1, 1.0, 1.0, 0.05),
        ),
        Quiz(
            "The scores are divided by √4. Why are the weights still so sharp?",
            "The division assumes queries and keys of unit variance. Projections drawn from N(0, 1) make them wider: "
            "the scaled scores have a deviation of 6.6. With W_Q and W_K halved, which is 1/√4, the rows spread out.",
            {"shrink": 0.5},
        ),
        toy, ("kernels/attention/reference.py", "parts/position/sinusoidal.py"),
    ),
    Instrument(
        "masks", "Masks",
        "A mask removes keys before the softmax; the weights of the remaining keys still sum to 1.",
        r"A_{ij} = 0 \;\text{where the mask blocks } (i,j), \qquad \text{causal: } j > i",
        (
            Selection("kind", "mask", MASKS, "causal"),
            Slider("tokens", "tokens", 1, 24, 4),
            Slider("size", "window, if the mask has one", 1, 12, 3),
            Slider("first", "prefix, first or global tokens, if any", 1, 8, 1),
            Slider("query", "query", 1, 24, 4),
        ),
        Quiz(
            "How many cells does a causal mask block for 4 tokens, and for 10?",
            "n(n − 1)/2: 6 cells for 4 tokens, 45 for 10.",
            {"kind": "causal", "tokens": 10, "query": 10},
        ),
        masks, ("kernels/attention/mask.py", "kernels/attention/patterns/window.py"),
    ),
)  # fmt: skip
