"""The feed-forward layer of a block: plain, gated, and routed to experts."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, Subject, Switch, TextField
from regard.instruments.panels import bars, diagram, heatmap, lines, numbers, table
from regard.instruments.vocabulary import SERVED, read
from regard.instruments.words import seeded, split_words, word_vectors
from regard.lens.hooks import record
from regard.models.base import meta_device
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.experts import Experts, ExpertsModule, GroupedLinear
from regard.parts.feedforward import (
    ACTIVATIONS,
    Activation,
    FeedForward,
    FeedForwardModule,
    Gated,
    GatedModule,
    SwiGLU,
)
from regard.planning.groups import format_number
from regard.planning.parameters import Parameters, count_parameters
from regard.planning.published import mixtral

CURVE = torch.linspace(-4, 4, 81)
CHANNELS = 12  # of a gated unit that are drawn
GATE = ("gate_proj", "up_proj", "neurons")  # activations of a gated unit
RANDOM = "random weights"
OF_UNIT = Selection("of", "weights of", (RANDOM, SERVED), RANDOM)


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
    with torch.no_grad(), record(small, ["neurons"]) as recorded:
        y, hidden = small(x), recorded["neurons"]
        one_matrix = small.down_proj.get_parameter("weight") @ small.up_proj.get_parameter("weight")
        difference = float((y - x @ one_matrix.T).abs().max())
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


class Channels(NamedTuple):
    """Twelve hidden channels of a gated unit for one token: the activated gate, W_up x, and their product."""

    title: str
    values: Tensor  # (3, 12)


@torch.no_grad()
def random_channels(activation: Activation) -> Channels:
    module = seeded(Gated(CHANNELS, activation), 6, seed=3)
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(8))
    with record(module, GATE) as recorded:
        module(x)
    return Channels("twelve channels of a unit; random weights", channels(module, recorded))


@torch.no_grad()
def served_channels(subject: Subject | None, text: str, layer: int) -> Channels:
    subject, encoded, pieces = read(subject, SERVED, text)
    units = {
        name: module
        for name, module in subject.model.named_modules()
        if isinstance(module, GatedModule) and not isinstance(module.gate_proj, GroupedLinear)
    }
    if not units:
        raise ValueError(f"{subject.name} has no gated units; choose random weights")
    layer = min(layer, len(units) - 1)
    name, unit = list(units.items())[layer]
    with record(subject.model, [f"{name}.{part}" for part in GATE]) as recorded:
        subject.model(torch.tensor([encoded], device=subject.model.embedding.weight.device))
    found = channels(unit, {part: recorded[f"{name}.{part}"] for part in GATE})
    place = f"gated unit {layer} ({len(units)} in {subject.name})"
    return Channels(f"{place}, the first twelve channels at “{pieces[-1]}”", found)


def channels(unit: nn.Module, recorded: Mapping[str, Tensor]) -> Tensor:
    """The rows of Channels, at the last token."""
    assert isinstance(unit, GatedModule)
    gate, up, product = (recorded[part].flatten(0, -2)[-1, :CHANNELS].float().cpu() for part in GATE)
    return torch.stack([unit.activation(gate), up, product])


def gated(
    subject: Subject | None, activation: Activation, gate: float, up: float, width: int, of: str, text: str, layer: int
) -> list[Panel]:
    body, plain = Gated(activation=activation, multiple_of=1), FeedForward(activation="relu", bias=False)
    unit = served_channels(subject, text, layer) if of == SERVED else random_channels(activation)
    opened = ACTIVATIONS[activation](torch.tensor(gate)).item()
    names: list[str] = list(dict.fromkeys(("relu", activation)))
    curves = {name: list(zip(CURVE.tolist(), ACTIVATIONS[name](CURVE).tolist(), strict=True)) for name in names}
    return [
        lines("the gate as a function of W_gate x", curves, "W_gate x", "σ(W_gate x)", marks={"here": gate}),
        heatmap(
            unit.title,
            unit.values,
            ("σ(W_gate x)", "W_up x", "product"),
            [str(i + 1) for i in range(unit.values.shape[1])],
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


class Routed(NamedTuple):
    """A layer of experts, the tokens, and the weights (T, X) of their experts."""

    title: str
    layer: ExpertsModule
    tokens: list[str]
    weights: Tensor


def weights_of(layer: ExpertsModule, logits: Tensor) -> Tensor:
    """(T, X): the weights that the router gives to the chosen experts, 0 for the others."""
    routing = layer.router.route(logits)
    return torch.zeros_like(logits).scatter(1, routing.chosen, routing.weights.to(logits.dtype)).float().cpu()


@torch.no_grad()
def random_experts(text: str, count: int, top_k: int, shared: bool) -> Routed:
    words, width = split_words(text), 32
    layer = seeded(Experts(count, top_k, SwiGLU(64), SwiGLU(64) if shared else None), width, seed=9)
    assert isinstance(layer, ExpertsModule)
    return Routed("random weights", layer, words, weights_of(layer, layer.router(word_vectors(words, width)[0])))


@torch.no_grad()
def served_experts(subject: Subject | None, text: str, layer: int) -> Routed:
    subject, encoded, pieces = read(subject, SERVED, text)
    layers = {name: module for name, module in subject.model.named_modules() if isinstance(module, ExpertsModule)}
    if not layers:
        raise ValueError(f"{subject.name} has no experts; choose random weights")
    layer = min(layer, len(layers) - 1)
    name, module = list(layers.items())[layer]
    with record(subject.model, [f"{name}.router"]) as recorded:
        subject.model(torch.tensor([encoded], device=subject.model.embedding.weight.device))
    place = f"layer of experts {layer} ({len(layers)} in {subject.name})"
    return Routed(place, module, pieces, weights_of(module, recorded[f"{name}.router"]))


def experts(
    subject: Subject | None, text: str, count: int, top_k: int, token: int, shared: bool, of: str, layer: int
) -> list[Panel]:
    served = of == SERVED
    routed = served_experts(subject, text, layer) if served else random_experts(text, count, min(top_k, count), shared)
    words, weights, body = routed.tokens, routed.weights, routed.layer.spec
    token, count = min(token, len(words)) - 1, body.count
    total = sum(p.numel() for p in routed.layer.parameters())
    width = routed.layer.router.proj.in_features
    names = [f"expert {i}" for i in range(count)]
    drawn = [i for i in range(count) if count <= 16 or weights[token, i] > 0]
    nodes = [{"id": "token", "label": words[token], "x": 0.0, "y": 0.5}]
    nodes += [
        {"id": names[i], "label": names[i], "x": 1.0, "y": (n + 0.5) / len(drawn), "value": weights[token, i].item()}
        for n, i in enumerate(drawn)
    ]
    edges = [("token", names[i], weights[token, i].item()) for i in drawn if weights[token, i] > 0]
    return [
        diagram(f"the router's choice for “{words[token]}”; {routed.title}", nodes, edges),
        heatmap(
            f"weights: tokens down, experts across; {routed.title}",
            weights,
            words,
            range(count),
            "unit" if float(weights.max()) <= 1 else "positive",
            sets="token",
            selected=token,
        ),
        bars("tokens per expert", list(zip(names, (weights > 0).sum(0).double().tolist(), strict=True))),
        numbers(
            {
                "active share of this layer": 1 - body.inactive_params(width) / total,
                "sum of the weights": float(weights[token].sum()),
                "Mixtral 8x7B, all weights": format_number(mixtral_parameters().total),
                "Mixtral 8x7B, active per token": format_number(mixtral_parameters().active),
            }
        ),
    ]


@cache
def mixtral_parameters() -> Parameters:
    return count_parameters(mixtral())


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
            OF_UNIT,
            TextField("text", "text for the served model", "the lamp"),
            Slider("layer", "its layer", 0, 127, 0),
        ),
        Quiz(
            "Where is Swish negative, and how far does it go?",
            "For all negative inputs; its minimum is about −0.28 at −1.28. Elsewhere below 0 its slope is not 0, "
            "unlike ReLU's.",
            {"activation": "silu", "gate": -1.3},
        ),
        gated, ("parts/feedforward.py",), reads_model=True,
    ),
    Instrument(
        "experts", "Routing to experts",
        "A router sends each token to a few experts; all weights exist, and only a share of them is used per token.",
        r"y = \sum_{i \in \mathrm{top}_k(s)} \frac{s_i}{\sum_{j\in\mathrm{top}_k} s_j}\, E_i(x), \qquad "
        r"s = \mathrm{softmax}(W_r x)",
        (
            TextField("text", "words", "rain fell on the bridge"),
            Slider("count", "experts", 1, 16, 8),
            Slider("top_k", "experts per token", 1, 8, 2),
            Slider("token", "token", 1, 12, 1),
            Switch("shared", "a shared expert", False),
            OF_UNIT,
            Slider("layer", "layer of the served model", 0, 127, 0),
        ),
        Quiz(
            "With 2 of 8 experts, why is the active share of Mixtral more than a quarter?",
            "Attention and embeddings are used by every token: 12.9 of 46.7 billion weights are active, 28 %.",
            {"count": 8, "top_k": 2},
        ),
        experts, ("parts/experts.py", "parts/router.py"), reads_model=True,
    ),
)  # fmt: skip
