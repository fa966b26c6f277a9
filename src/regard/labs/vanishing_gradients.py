"""Gradients vanish with recurrence, unscaled softmax, depth and a sure discriminator, each time with a known cure.

One monitor for all four: the norm of the gradient of a result with respect to an early tensor, while what makes
learning hard grows, without the cure and with it. All networks are new, except for the discriminator.

    recurrence      last state -> first input       over the steps         plain RNN; LSTM with open forget gates
    softmax         output of attention -> scores   over d_k               q kᵀ; q kᵀ / √d_k
    depth           output of a stack -> its input  over the layers        x = f(x); x = x + f(norm(x))
    discriminator   loss -> generated points        over its training      log(1 - D(G(z))); -log D(G(z))

A gradient counts as vanished if it falls by more than a factor of ten from the first to the last point, and as saved if
it falls by less than three. Hochreiter 1991; Goodfellow et al. 2014; He et al. 2015; Vaswani et al. 2017.
"""

# ledger: grad.villain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.labs.experiment import Bench, Check, Findings, Plot, Point
from regard.labs.fit import generator
from regard.labs.gradients_through_time import orthogonal_network
from regard.layout import TokenLayout
from regard.models.base import initialize
from regard.models.stack import Repeat, Stack
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import NoNorm
from regard.parts.recurrent import LSTM, RNN

WIDTH, KEYS = 32, 64
OPEN = 5.0  # the bias of open forget gates, which keep 0.993 of the cell per step
BODIES = Attention(4), FeedForward(4 * WIDTH)
PLAIN = Block(tuple(Sublayer(body, NoNorm()) for body in BODIES), keep=0.0)
RESIDUAL = Block(tuple(Sublayer(body) for body in BODIES))
BothGradients = tuple[list[Point], list[Point]]  # without the cure and with it


def run(bench: Bench) -> Findings:
    torch.manual_seed(bench.seed)
    cases = {
        "recurrence": ("steps", "plain RNN", "LSTM, open gates", recurrence(bench.setting((10, 20, 50, 100), (2, 4)))),
        "softmax": ("d_k", "q kᵀ", "q kᵀ / √d_k", softmax(bench.setting((16, 64, 256, 1024), (4, 8)))),
        "depth": ("layers", "x = f(x)", "x = x + f(norm(x))", depth(bench.setting((2, 6, 12, 24, 48), (1, 2)))),
        "discriminator": ("steps of the discriminator", "log(1 - D)", "-log D",
                          discriminator(bench.setting((10, 100, 1000), (1, 2)))),
    }  # fmt: skip
    table, checks, plots = [], [], []
    for name, (x, ill, cured, (without, with_cure)) in cases.items():
        fall, saved = fall_of(without), fall_of(with_cure)
        span = f"from {without[0][0]:g} to {without[-1][0]:g} {x}"
        table += [{"case": name, "network": network, "falls by a factor of": factor}
                  for network, factor in ((ill, fall), (cured, saved))]  # fmt: skip
        checks += [
            Check(f"{name}: {span} the gradient of {ill} falls by more than 10", f"{fall:.3g}", fall > 10),
            Check(f"{name}: with {cured} it falls by less than 3", f"{saved:.3g}", saved < 3),
        ]
        plots.append(Plot(x, "norm of the gradient", {ill: without, cured: with_cure}, name, "xy"))
    return Findings(table, checks, plots, "The rate at which a gradient falls depends on the initial weights.")


def monitor(result: Tensor, early: Tensor) -> float:
    """The norm of the gradient of a number, or of a fixed random combination of numbers, with respect to `early`."""
    direction = torch.randn(result.shape, generator=generator(0))
    return torch.autograd.grad((result * direction).sum(), early)[0].norm().item()


def fall_of(points: list[Point]) -> float:
    return points[0][1] / max(points[-1][1], 1e-30)


def recurrence(lengths: tuple[int, ...]) -> BothGradients:
    plain = orthogonal_network(RNN(), 0.9)
    gated = LSTM().cell(WIDTH, WIDTH)
    assert gated.bias is not None
    nn.init.constant_(gated.bias[WIDTH : 2 * WIDTH].detach(), OPEN)  # gates in the order of torch.nn.LSTM

    def gradient(cell: nn.Module, length: int) -> float:
        x = torch.randn(1, length, WIDTH)
        first = x[:, :1].requires_grad_()
        hidden = cell(torch.cat([first, x[:, 1:]], 1), TokenLayout.whole(1, length))
        return monitor(hidden[:, -1], first)

    return [(n, gradient(plain, n)) for n in lengths], [(n, gradient(gated, n)) for n in lengths]


def softmax(dims: tuple[int, ...]) -> BothGradients:
    def gradient(dim: int, scale: float) -> float:
        q, k, v = (torch.randn(KEYS, d) for d in (dim, dim, WIDTH))
        scores = (scale * q @ k.T).requires_grad_()
        return monitor(scores.softmax(-1) @ v, scores)

    return [(d, gradient(d, 1.0)) for d in dims], [(d, gradient(d, d**-0.5)) for d in dims]


def depth(depths: tuple[int, ...]) -> BothGradients:
    def gradient(layers: int, block: Block) -> float:
        stack = Stack((Repeat((block,), layers),), WIDTH)
        initialize(stack, layers, "xavier")
        x = torch.randn(1, KEYS, WIDTH, requires_grad=True)
        return monitor(stack(x, TokenLayout.whole(1, KEYS))[0], x)

    return [(n, gradient(n, PLAIN)) for n in depths], [(n, gradient(n, RESIDUAL)) for n in depths]


def discriminator(steps: tuple[int, ...]) -> BothGradients:
    """Real and generated points are far apart, as before the generator has learned."""
    network = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    real, generated = 3 + torch.randn(64, 2) / 2, (-3 + torch.randn(64, 2) / 2).requires_grad_()
    without, with_cure = [], []
    for step in range(steps[-1] + 1):
        if step in steps:
            score = network(generated)  # D = σ(score), so log(1 - D) = -softplus(score), -log D = softplus(-score)
            without.append((step, torch.autograd.grad(-F.softplus(score).mean(), generated)[0].norm().item()))
            score = network(generated)
            with_cure.append((step, torch.autograd.grad(F.softplus(-score).mean(), generated)[0].norm().item()))
        loss = F.softplus(-network(real)).mean() + F.softplus(network(generated.detach())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return without, with_cure
