"""The other half of a block: feed-forward layers, gates, norms and the residual stream."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, TextField
from regard.instruments.panels import bars, heatmap, lines, numbers, table
from regard.instruments.words import seeded
from regard.layout import TokenLayout
from regard.models.base import meta_device
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import ACTIVATIONS, Activation, FeedForward, FeedForwardModule, Gated, GatedModule
from regard.parts.norm import LayerNorm, RMSNorm

CURVE = torch.linspace(-4, 4, 81)


def parameters(body: Body, width: int) -> int:
    """The number of weights of a body, counted without allocating them."""
    with meta_device():
        return sum(parameter.numel() for parameter in body.build(width).parameters())


def expand_contract(width: int, factor: int, activation: Activation) -> list[Panel]:
    body = FeedForward(factor * width, activation, bias=False)
    attention, feedforward = parameters(Attention(8, head_dim=width // 8), width), parameters(body, width)
    small = seeded(FeedForward(8 * factor, activation, bias=False), 8, seed=2)
    assert isinstance(small, FeedForwardModule)
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        hidden = small.activation(small.up_proj(x))
        one_matrix = small.down_proj.get_parameter("weight") @ small.up_proj.get_parameter("weight")
        difference = float((small(x) - x @ one_matrix.T).abs().max())
    return [
        bars("weights of one block", {"feed-forward": feedforward, "attention": attention}),
        numbers(
            {
                "feed-forward": feedforward,
                "attention": attention,
                "ratio": feedforward / attention,
                "one matrix W_down W_up instead differs by": difference,
                "hidden channels that are 0": f"{int((hidden == 0).sum())} of {hidden.numel()}",
            }
        ),
        heatmap(
            "a token of width 8, expanded; random weights",
            hidden.view(factor, 8),
            [f"{8 * i + 1}–{8 * i + 8}" for i in range(factor)],
            [str(i + 1) for i in range(8)],
            "signed",
            shows_numbers=False,
        ),
    ]


def gated(activation: Activation, gate: float, up: float, width: int) -> list[Panel]:
    sigma = ACTIVATIONS[activation]
    body, plain = Gated(activation=activation, multiple_of=1), FeedForward(activation="relu", bias=False)
    module = seeded(Gated(12, activation), 6, seed=3)
    assert isinstance(module, GatedModule)
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        gates, ups = sigma(module.gate_proj(x))[0], module.up_proj(x)[0]
    opened = sigma(torch.tensor(gate)).item()
    names: list[str] = list(dict.fromkeys(("relu", activation)))
    curves = {name: list(zip(CURVE.tolist(), ACTIVATIONS[name](CURVE).tolist(), strict=True)) for name in names}
    channels = [str(i + 1) for i in range(12)]
    return [
        lines("the gate as a function of W_gate x", curves, "W_gate x", "σ", marks={"here": gate}),
        heatmap(
            "twelve channels of a unit; random weights",
            torch.stack([gates, ups, gates * ups]),
            ("σ(W_gate x)", "W_up x", "product"),
            channels,
            "signed",
        ),
        numbers({"gate": opened, "W_up x": up, "gate · W_up x": opened * up}),
        table(
            "equal numbers of weights",
            ("layer", "matrices", "hidden width", "weights"),
            [
                ("feed-forward", 2, plain.hidden_dim(width), parameters(plain, width)),
                ("gated", 3, body.hidden_dim(width), parameters(body, width)),
            ],
        ),
    ]


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


def residual(style: Literal["pre", "post", "parallel"], depth: int, skip: float, position: int) -> list[Panel]:
    sublayers = tuple(Sublayer(body, LayerNorm()) for body in (Attention(4), FeedForward(64, "gelu")))
    block = Block(sublayers, style=style, keep=skip)
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
        "feed-forward-layer", "The feed-forward layer",
        "It expands and contracts each token; at 4 times the width it has two thirds of a block's weights.",
        r"\mathrm{FFN}(x) = W_{\mathrm{down}}\,\sigma(W_{\mathrm{up}}\,x), \qquad 2 \cdot d \cdot 4d = 8d^2 "
        r"\text{ weights against "
        r"} 4d^2 \text{ of attention}",
        (
            Slider("width", "width d", 64, 4096, 512, 64),
            Slider("factor", "hidden width / d", 1, 8, 4),
            Selection("activation", "activation σ", ("relu", "gelu", "silu", "identity"), "relu"),
        ),
        Quiz(
            "What happens to the two matrices without the nonlinearity?",
            "They merge: one matrix W_down W_up gives the same output, so the wide hidden layer adds nothing.",
            {"activation": "identity"},
        ),
        expand_contract, ("parts/feedforward.py", "parts/attention.py"),
    ),
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
    Instrument(
        "gated-unit", "A gated unit: SwiGLU",
        "One projection gates the other; with 8/3 of the width it has as many weights as two matrices at 4.",
        r"\mathrm{SwiGLU}(x) = W_{\mathrm{down}}\,(\mathrm{Swish}(W_{\mathrm{gate}}\,x) \odot "
        r"W_{\mathrm{up}}\,x), \qquad \mathrm{Swish}(a) = "
        r"\frac{a}{1+e^{-a}}",
        (
            Selection("activation", "σ of the gate", ("silu", "sigmoid", "gelu", "relu", "identity"), "silu"),
            Slider("gate", "W_gate x", -4.0, 4.0, 1.0, 0.1),
            Slider("up", "W_up x", -4.0, 4.0, 2.0, 0.1),
            Slider("width", "width", 96, 4608, 768, 96),
        ),
        Quiz(
            "Where is Swish negative, and how far does it go?",
            "For all negative inputs; its minimum is about −0.28 at −1.28. Elsewhere below 0 its slope is not 0, "
            "unlike ReLU's.",
            {"activation": "silu", "gate": -1.3},
        ),
        gated, ("parts/feedforward.py",),
    ),
)  # fmt: skip
