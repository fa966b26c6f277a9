"""Norms, and the residual stream with the place of the norm."""

from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, TextField
from regard.instruments.panels import diagram, heatmap, lines, numbers, table
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, RMSNorm
from regard.planning.part_tree import part_tree

STREAM, BODY = 0.85, 0.3  # where the residual stream and the bodies are drawn


def read_matrix(text: str) -> Tensor:
    """Rows separated by ; or a new line, numbers by spaces or commas."""
    try:
        rows = [
            [float(n) for n in row.replace(",", " ").split()]
            for row in text.replace("\n", ";").split(";")
            if row.strip()
        ]
    except ValueError as error:
        raise ValueError(f"the table has something that is no number: {error}; write 1 2 3; 4 5 6") from None
    if not 2 <= len(rows) <= 6 or len({len(row) for row in rows}) != 1 or not 2 <= len(rows[0]) <= 6:
        raise ValueError("the table needs 2 to 6 rows of equal length 2 to 6; write 1 2 3; 4 5 6")
    matrix = torch.tensor(rows, dtype=torch.float64)
    if not bool((matrix.abs() <= 1e6).all()):
        raise ValueError("the table has numbers beyond ±1,000,000; write smaller ones")
    return matrix


def norms(values: str, kind: str, index: int) -> list[Panel]:
    x = read_matrix(values)
    by_column = kind == "BatchNorm"
    if by_column:
        y = F.batch_norm(x, None, None, training=True)  # not a part: a token's output would depend on the others
    else:
        y = (LayerNorm(weight=False, bias=False) if kind == "LayerNorm" else RMSNorm(weight=False)).build(x.shape[1])(x)
    index = min(index, x.shape[1] if by_column else x.shape[0]) - 1
    line, out = (x[:, index], y[:, index]) if by_column else (x[index], y[index])
    tokens, features = [f"token {i + 1}" for i in range(len(x))], [f"feature {i + 1}" for i in range(x.shape[1])]
    sets, selected = (None, None) if by_column else ("index", index)
    name = features[index] if by_column else tokens[index]
    return [
        heatmap("input", x, tokens, features, "signed", sets, selected),
        heatmap("output", y, tokens, features, "signed", sets, selected),
        table(
            f"{name}, before and after",
            ("", "mean", "deviation", "root mean square"),
            [
                (label, v.mean().item(), v.std(correction=0).item(), v.square().mean().sqrt().item())
                for label, v in (("before", line), ("after", out))
            ],
        ),
    ]


NormPlacement = Literal["pre", "post", "parallel"]


def block_of(style: NormPlacement, keep: float) -> Block:
    sublayers = tuple(Sublayer(body, LayerNorm()) for body in (Attention(4), FeedForward(64, "gelu")))
    return Block(sublayers, style=style, keep=keep)


@cache
def drawn_block(style: NormPlacement) -> dict[str, Any]:
    spec = Decoder(1, 32, (Repeat((block_of(style, 1.0),)),))
    return part_tree(spec, 1)["stacks"][0]["runs"][0]["blocks"][0]


def block_diagram(style: NormPlacement, keep: float) -> Panel:
    """The block of a spec from bottom to top: the residual stream at the right, the bodies at the left."""
    column: list[tuple[str, str, float]] = [("x", "x", STREAM)]  # id, label, x; one per row
    edges: list[tuple[str, str, float]] = []
    stream, source = "x", "x"  # the end of the stream; what the next body gets
    for i, sublayer in enumerate(drawn_block(style)["sublayers"]):
        norm, body, added = (f"{name}{i}" for name in ("norm", "body", "added"))
        branch = [body] if style == "post" else [norm, body]
        labels = {norm: sublayer["norm"]["kind"], body: sublayer["body"]["kind"]}
        column += [(id, labels[id].replace("_", " "), BODY) for id in branch]
        column.append((added, "+", STREAM))
        edges += [(source, branch[0], 1.0), *pairwise_edges(branch), (body, added, 1.0)]
        edges.append((stream, added, keep if i == 0 or style != "parallel" else 1.0))
        stream = added
        if style == "post":
            column.append((norm, labels[norm].replace("_", " "), STREAM))
            edges.append((added, norm, 1.0))
            stream = norm
        source = "x" if style == "parallel" else stream
    rows = len(column) - 1
    nodes = [{"id": id, "label": label, "x": x, "y": 1 - row / rows} for row, (id, label, x) in enumerate(column)]
    return diagram(f"the {style} block of the spec, from bottom to top; thin: a small factor", nodes, edges)


def pairwise_edges(ids: list[str]) -> list[tuple[str, str, float]]:
    return [(a, b, 1.0) for a, b in pairwise(ids)]


def residual(style: NormPlacement, depth: int, skip: float, position: int) -> list[Panel]:
    block = block_of(style, skip)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = Stack((Repeat((block,), depth),), 32)
        for module in stack.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        x, direction = torch.randn(1, 8, 32), torch.randn(32)
    layout = TokenLayout.whole(1, 8)
    streams = [x.requires_grad_()]
    for layer in stack.blocks:
        out, _ = layer(streams[-1], layout)
        out.retain_grad()
        streams.append(out)
    # along a random direction: the mean square of a normed output is nearly constant, and its gradient nearly 0
    (streams[-1][0, position - 1] * direction).sum().backward()
    gradients = [float(s.grad.norm()) if s.grad is not None else 0.0 for s in streams]
    sizes = [float(s.detach().square().mean().sqrt()) for s in streams]
    return [
        block_diagram(style, skip),
        lines(
            "gradient of the output along a random direction, after each layer; random weights",
            {style: list(enumerate(gradients))},
            "layer",
            "gradient norm",
            log_y=True,
        ),
        lines("size of the residual stream", {style: list(enumerate(sizes))}, "layer", "root mean square"),
        numbers(
            {
                "gradient at the input / at the output": gradients[0] / gradients[-1] if gradients[-1] else 0.0,
                "stream at the output": sizes[-1],
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "norms", "LayerNorm, RMSNorm and BatchNorm",
        "LayerNorm and RMSNorm use one token's features; BatchNorm uses one feature of all tokens.",
        r"\mathrm{LayerNorm}(x) = \frac{x-\mu}{\sqrt{\sigma^2+\varepsilon}}, \qquad \mathrm{RMSNorm}(x) "
        r"= \frac{x}{\sqrt{\overline{x^2}+\varepsilon}}",
        (
            TextField("values", "table, rows separated by ;", "1 2 3 4; 2 4 6 8; -1 0 1 0; 5 5 6 4"),
            Selection("kind", "norm", ("LayerNorm", "RMSNorm", "BatchNorm"), "LayerNorm"),
            Slider("index", "row, or column of BatchNorm", 1, 6, 1),
        ),
        Quiz(
            "The second token is twice the first. What is the difference after LayerNorm?",
            "None: mean and scale are removed, so both rows become equal. After BatchNorm they differ.",
            {"kind": "LayerNorm", "index": 2},
        ),
        norms, ("parts/norm.py",),
    ),
    Instrument(
        "residual", "Residual stream and norm placement",
        "The added input gives gradients a path around every layer; pre-norm keeps that path free of norms.",
        r"\text{pre: } x + f(\mathrm{norm}(x)) \qquad \text{post: } \mathrm{norm}(x + f(x)) \qquad "
        r"\text{parallel: } x + f(n) + g(n),\; n = \mathrm{norm}(x)",
        (
            Selection("style", "placement of the norm", ("pre", "post", "parallel"), "pre"),
            Slider("depth", "layers", 1, 24, 12),
            Slider("skip", "factor of the residual path", 0.0, 1.0, 1.0, 0.05),
            Slider("position", "output token", 1, 8, 8),
        ),
        Quiz(
            "What happens to the gradient at the input without the residual path?",
            "It has to pass through every layer. After 24 of them it is a hundredth of the gradient with the path: "
            "0.03 instead of 3.3 times the gradient at the output.",
            {"skip": 0.0, "depth": 24},
        ),
        residual, ("parts/block.py", "models/stack.py"),
    ),
)  # fmt: skip
