"""Before attention: a feed-forward network, a recurrent one, and the cell of an LSTM."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, TextField
from regard.instruments.panels import bars, diagram, equation, heatmap, lines, numbers, table
from regard.instruments.words import seeded, split_words, whole, word_vectors
from regard.kernels.recurrent.cells import lstm_step
from regard.models.base import initialize
from regard.parts.feedforward import ACTIVATIONS
from regard.parts.recurrent import RNN, RecurrentMixerModule

SIZES = (4, 5, 3, 2)
LAYERS = ("x", "h", "g", "y")
NODES = tuple(f"{letter}{i + 1}" for letter, size in zip(LAYERS, SIZES, strict=True) for i in range(size))


def network() -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        linears = [nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:], strict=False)]
        initialize(nn.ModuleList(linears), depth=1)
    return linears


def run_network(linears: list[nn.Linear], x: Tensor, activation: str) -> list[Tensor]:
    """The values of every layer; the last one has no activation."""
    values = [x]
    for i, linear in enumerate(linears):
        y = linear(values[-1])
        values.append(y if i == len(linears) - 1 else ACTIVATIONS[activation](y))
    return values


def feedforward(x1: float, x2: float, x3: float, x4: float, activation: str, node: str) -> list[Panel]:
    linears = network()
    x = torch.tensor([x1, x2, x3, x4], requires_grad=True)
    values = run_network(linears, x, activation)
    depth, row = LAYERS.index(node[0]), int(node[1:]) - 1
    (gradient,) = torch.autograd.grad(values[depth][row], x)
    nodes = [
        {
            "id": f"{LAYERS[i]}{j + 1}",
            "label": f"{LAYERS[i]}{j + 1}",
            "x": i / 3,
            "y": (j + 0.5) / size,
            "value": values[i][j].item(),
        }
        for i, size in enumerate(SIZES)
        for j in range(size)
    ]
    edges = [
        (f"{LAYERS[i]}{b + 1}", f"{LAYERS[i + 1]}{a + 1}", linear.weight[a, b].item())
        for i, linear in enumerate(linears)
        for a in range(SIZES[i + 1])
        for b in range(SIZES[i])
    ]
    panels = [
        diagram("values flow to the right; line width is the weight", nodes, edges, "node", NODES.index(node)),
        bars(
            f"derivative of {node} with respect to each input",
            [(f"x{i + 1}", g) for i, g in enumerate(gradient.tolist())],
        ),
    ]
    if depth:
        weights, previous = linears[depth - 1].weight[row], values[depth - 1]
        terms = [
            (f"{LAYERS[depth - 1]}{j + 1}", w, p, w * p)
            for j, (w, p) in enumerate(zip(weights.tolist(), previous.tolist(), strict=True))
        ]
        total = "sum of the last column + b"
        formula = total if depth == len(linears) else f"σ({total})"  # the output has no activation
        panels.append(table(f"{node} = {formula}", ("from", "weight", "value", "product"), terms))
    return panels


def rnn(text: str, gain: float, width: int, activation: Literal["tanh", "relu"]) -> list[Panel]:
    words = split_words(text)
    module = seeded(RNN(activation=activation), width, seed=1)
    assert isinstance(module, RecurrentMixerModule)
    cell = module.recurrence
    with torch.no_grad():
        cell.h_proj.weight.copy_(gain * nn.init.orthogonal_(torch.empty(width, width), generator=generator(1)))
    states, past = [], (torch.zeros(1, width, requires_grad=True),)
    for x in cell.project_inputs(word_vectors(words, width)).unbind(1):
        past = cell.step(x, *past)
        past[0].retain_grad()
        states.append(past[0])
    states[-1].norm().backward()
    norms = [float(state.grad.norm()) if state.grad is not None else 0.0 for state in states]
    steps = [f"{i + 1} {word}" for i, word in enumerate(words)]
    with torch.no_grad():
        fused = module(word_vectors(words, width), whole(words))[0, -1]
    return [
        unrolled(words, [float(state.detach().norm()) for state in states]),
        heatmap(
            "hidden state after each word",
            torch.cat(states),
            steps,
            [str(i + 1) for i in range(width)],
            "signed",
            shows_numbers=width <= 8,
        ),
        bars("gradient of |h_T| that arrives at each step", list(zip(steps, norms, strict=True))),
        numbers(
            {
                "gradient at the first step": norms[0],
                "steps": len(words),
                "weights, however long the text": sum(p.numel() for p in cell.parameters()),
                "all steps in one call differ by": float((fused - states[-1][0].detach()).abs().max()),
            }
        ),
    ]


def unrolled(words: list[str], sizes: list[float]) -> Panel:
    """Words below, states with their norms above: W_x goes up and W_h to the right, the same ones at every step."""
    places = [(t + 0.5) / len(words) for t in range(len(words))]
    nodes = [
        {"id": f"h{t}", "label": f"h{t}", "x": x, "y": 0.0, "value": size}
        for t, (x, size) in enumerate(zip(places, sizes, strict=True), 1)
    ]
    nodes += [
        {"id": f"x{t}", "label": word, "x": x, "y": 1.0}
        for t, (x, word) in enumerate(zip(places, words, strict=True), 1)
    ]
    edges = [(f"x{t}", f"h{t}", 1.0) for t in range(1, len(words) + 1)]
    edges += [(f"h{t}", f"h{t + 1}", 1.0) for t in range(1, len(words))]
    return diagram("unrolled: the same W_x up and W_h to the right; size of each state", nodes, edges)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logit(p: float) -> float:
    return math.inf if p == 1 else -math.inf if p == 0 else math.log(p / (1 - p))


CELL = {  # the parts of the drawing: what it is, x, y, equation
    "c_t−1": (
        "the cell of the step before",
        0.0,
        0.0,
        r"c_{t-1} = f_{t-1} \odot c_{t-2} + i_{t-1} \odot \tilde c_{t-1}",
    ),
    "f": ("the forget gate", 0.1, 1.0, r"f_t = \sigma(W_f x_t + U_f h_{t-1} + b_f)"),
    "i": ("the input gate", 0.37, 1.0, r"i_t = \sigma(W_i x_t + U_i h_{t-1} + b_i)"),
    "c̃": ("the candidate", 0.63, 1.0, r"\tilde c_t = \tanh(W_c x_t + U_c h_{t-1} + b_c)"),
    "c_t": ("the cell", 0.5, 0.0, r"c_t = f_t \odot c_{t-1} + i_t \odot \tilde c_t"),
    "o": ("the output gate", 0.9, 1.0, r"o_t = \sigma(W_o x_t + U_o h_{t-1} + b_o)"),
    "h_t": ("the output", 1.0, 0.0, r"h_t = o_t \odot \tanh(c_t)"),
}


def lstm(
    forget: float, write: float, output: float, candidate: float, steps: int, start: float, part: str
) -> list[Panel]:
    gates = torch.tensor([[logit(write), logit(forget), math.atanh(candidate), logit(output)]], dtype=torch.float64)
    c = first = torch.full((1, 1), start, dtype=torch.float64, requires_grad=True)
    h = torch.zeros_like(c)
    cells, outputs = [(0, start)], []
    for t in range(1, steps + 1):
        h, c = lstm_step(gates, h, c, torch.zeros_like(gates).mul)  # the gates are set by hand, not by h
        cells.append((t, c.item()))
        outputs.append((t, h.item()))
    (gradient,) = torch.autograd.grad(c.sum(), first)
    values = (cells[-2][1], forget, write, candidate, c.item(), output, h.item())
    nodes = [
        {"id": id, "label": id, "x": x, "y": y, "value": value}
        for (id, (_, x, y, _)), value in zip(CELL.items(), values, strict=True)
    ]
    edges = [(id, "c_t", factor) for id, factor in (("c_t−1", forget), ("f", forget), ("i", write), ("c̃", write))]
    edges += [("c_t", "h_t", output), ("o", "h_t", output)]
    chosen = list(CELL).index(part)
    return [
        diagram("the last step; a line is as wide as its gate is open", nodes, edges, "part", chosen),
        equation(f"{part}, {CELL[part][0]}", part),
        lines("memory over time", {"cell c": cells, "output h": outputs}, "step", "value"),
        numbers(
            {
                "c at the end": c.item(),
                "∂c_T/∂c_0 by autograd": float(gradient),
                "Π f": forget**steps,
                "h at the end": h.item(),
            }
        ),
    ]


INPUTS = tuple(
    Slider(f"x{i}", f"input x{i}", -2.0, 2.0, value, 0.1) for i, value in enumerate((1.0, -0.5, 0.5, 0.2), 1)
)
INSTRUMENTS = (
    Instrument(
        "feed-forward", "A feed-forward network",
        "Values flow one way, from a fixed number of inputs to the outputs; there is no memory.",
        r"h = \sigma(Wx + b)",
        (
            *INPUTS,
            Selection("activation", "activation σ", ("relu", "tanh", "sigmoid", "gelu", "identity"), "relu"),
            Selection("node", "node", NODES, "y1"),
        ),
        Quiz(
            "What does the network become if the activation is the identity?",
            "One linear map: the derivatives of an output no longer change when the inputs change.",
            {"activation": "identity", "node": "y1"},
        ),
        feedforward, ("parts/feedforward.py",),
    ),
    Instrument(
        "recurrence", "A recurrent network, unrolled",
        "The same weights are used at every word; the hidden state is all that the network keeps of the earlier ones.",
        r"h_t = \sigma(a_t), \quad a_t = W_x x_t + W_h h_{t-1} + b, \qquad \frac{\partial h_T}{\partial h_t} = "
        r"\prod_{k>t} \mathrm{diag}(\sigma'(a_k))\,W_h",
        (
            TextField("text", "words", "the boat left the harbour at dawn"),
            Slider("gain", "size of W_h", 0.1, 1.5, 0.9, 0.05),
            Slider("width", "width of the state", 2, 16, 6),
            Selection("activation", "activation σ", ("tanh", "relu"), "tanh"),
        ),
        Quiz(
            "How does the gradient at the first word depend on the size of W_h?",
            "It is a product with one factor per step. At 0.5 only 0.0004 of it is left after six steps.",
            {"gain": 0.5},
        ),
        rnn, ("parts/recurrent.py", "kernels/recurrent/cells/__init__.py"),
    ),
    Instrument(
        "lstm", "The LSTM cell",
        "Gates scale what the cell keeps, adds and outputs; along the cell no matrix is multiplied.",
        r"c_t = f \odot c_{t-1} + i \odot \tilde c, \qquad h_t = o \odot \tanh(c_t), \qquad "
        r"\frac{\partial c_T}{\partial c_0} = \prod_t f_t",
        (
            Slider("forget", "forget gate f", 0.0, 1.0, 0.9, 0.01),
            Slider("write", "input gate i", 0.0, 1.0, 0.2, 0.01),
            Slider("output", "output gate o", 0.0, 1.0, 0.8, 0.01),
            Slider("candidate", "candidate", -0.99, 0.99, 0.5, 0.01),
            Slider("steps", "steps", 1, 60, 20),
            Slider("start", "memory at the start", -2.0, 2.0, 1.0, 0.1),
            Selection("part", "part of the cell", tuple(CELL), "f"),
        ),
        Quiz(
            "Which gates carry the memory unchanged over any number of steps?",
            "f = 1 and i = 0: the cell stays at its first value, and the gradient is exactly 1.",
            {"forget": 1.0, "write": 0.0, "steps": 60},
        ),
        lstm, ("kernels/recurrent/cells/__init__.py",), equations={id: latex for id, (*_, latex) in CELL.items()},
    ),
)  # fmt: skip
