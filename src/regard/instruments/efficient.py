"""Long sequences: windows, tiles, memory, the order of products, and state spaces."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider
from regard.instruments.panels import bars, heatmap, lines, numbers, table
from regard.instruments.words import random_matrix
from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Full
from regard.kernels.attention.online_softmax import empty_partial, partial_softmax
from regard.kernels.attention.patterns.window import Window
from regard.kernels.attention.reference import attend, attention_scores
from regard.kernels.recurrent.linear_attention import bidirectional_linear_attention
from regard.kernels.recurrent.state_space import state_space
from regard.kernels.recurrent.state_space.kernel import System, kernel
from regard.kernels.recurrent.state_space.transition import DiagonalTransition, as_real
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.planning.flops import causal_pairs, linear_crossover, window_pairs, window_reach
from regard.planning.groups import format_bytes
from regard.planning.memory import attention_bytes, standard_traffic, tiled_traffic


def window(layers: int, size: int, tokens: int) -> list[Panel]:
    block = Block((Sublayer(Attention(1, mask=Window(size))),))
    model = Decoder(8, 8, (Repeat((block,), layers),)).build(seed=0).double().eval()
    layout = TokenLayout.whole(1, tokens)
    x = torch.randn(1, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out, _ = model.stack(x, layout)
    (gradient,) = torch.autograd.grad(out[0, -1].sum(), x)
    influence = gradient[0].norm(dim=-1)
    reached = int((influence > 0).sum())
    places = torch.arange(tokens)
    cells = Window(size).allows(places[:, None], places).double()
    return [
        bars(
            "influence of each token on the last one, measured by the Jacobian; random weights",
            [(str(i + 1), v) for i, v in enumerate(influence.tolist())],
        ),
        heatmap("one layer's window", cells, range(1, tokens + 1), range(1, tokens + 1), shows_numbers=False),
        numbers(
            {
                "measured reach, tokens": reached,
                "L(w − 1) + 1, at most the tokens": min(window_reach(layers, size), tokens),
                "L · w, if a window does not count the token itself": layers * size,
                "pairs of the window": window_pairs(tokens, size),
                "pairs of causal attention": causal_pairs(tokens),
                "32 layers with 4,096": window_reach(32, 4096),
            }
        ),
    ]


def flash(tiles: int, tile: int, done: int, head_dim: int) -> list[Panel]:
    keys, done = tiles * tile, min(done, tiles)
    q, k, v = (random_matrix(n, head_dim, seed).double()[None, None] for seed, n in enumerate((1, keys, keys)))
    layout = TokenLayout(torch.tensor([[0]])).with_keys(torch.arange(keys)[None])
    options = ScoreOptions(Full(), head_dim**-0.5)
    scores = attention_scores(q, k, layout, options)[0, 0]  # (1, S)
    state, steps = empty_partial(q, head_dim), []
    for i in range(done):
        columns = slice(i * tile, (i + 1) * tile)
        state = state.merge(partial_softmax(scores[:, columns].clone()[None, None], v[:, :, columns]))
        steps.append((i + 1, state.m.item(), state.l.item(), state.out()[0, 0, 0, 0].item()))
    plain = attend(q, k, v, layout, options)
    long = 8192
    cells = [[s if i // tile < done else None for i, s in enumerate(scores[0].tolist())]]
    return [
        heatmap(
            "scores of one query; tiles still to come are crossed",
            cells,
            ["query"],
            range(1, keys + 1),
            "signed",
            shows_numbers=keys <= 16,
        ),
        table("after each tile", ("tiles", "maximum m", "sum l", "output, first coordinate"), steps),
        numbers(
            {
                "difference from plain attention": float((state.out() - plain).abs().max())
                if done == tiles
                else "unfinished",
                "scores in fast memory at a time": tile,
                "scores of the whole row": keys,
            }
        ),
        bars(
            f"bytes read and written per head at {long:,} tokens, 16 bits",
            {
                "scores written": 2.0 * standard_traffic(long, head_dim),
                "tiles in 100 KB": 2.0 * tiled_traffic(long, head_dim, 50_000),
            },
        ),
    ]


def wall(tokens: int, heads: int, head_dim: int, window: int) -> list[Panel]:
    lengths = [2**i for i in range(7, 21)]
    at = {n: attention_bytes(n, heads, head_dim, window) for n in lengths}
    here = at[2**tokens]
    series = {name: [(n, at[n][name] / 2**20) for n in lengths] for name in here}
    return [
        lines(
            "memory of one layer's attention, 16 bits",
            series,
            "tokens n",
            "MiB",
            log_x=True,
            log_y=True,
            marks={"n": 2**tokens},
        ),
        bars(f"at n = {2**tokens:,}", {name: value / 2**20 for name, value in here.items()}, "MiB"),
        numbers({name: format_bytes(value) for name, value in here.items()}),
    ]


def best_of_five(product: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result and the least seconds of five calls: the first one of a shape is often slower."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = product()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def associativity(tokens: int, head_dim: int) -> list[Panel]:
    q, k, v = (random_matrix(tokens, head_dim, seed).double().abs() for seed in range(3))
    left, seconds_left = best_of_five(lambda: (q @ k.T) @ v)
    right, seconds_right = best_of_five(
        lambda: bidirectional_linear_attention(*(x[None, None] for x in (q, k, v)), normalize=False)[0, 0]
    )
    difference = float((left - right).abs().max() / left.abs().max())
    crossover = linear_crossover(head_dim, head_dim)
    return [
        bars("entries of the matrix in the middle", {"(QKᵀ)V: n²": tokens**2, "Q(KᵀV): d²": head_dim**2}),
        bars("FLOPs", {"(QKᵀ)V: 4n²d": 4 * tokens**2 * head_dim, "Q(KᵀV): 4nd²": 4 * tokens * head_dim**2}),
        numbers(
            {
                "relative difference of the results": difference,
                "equal cost at n": crossover,
                "(QKᵀ)V here, best of five, ms": 1000 * seconds_left,
                "Q(KᵀV) here, best of five, ms": 1000 * seconds_right,
            }
        ),
    ]


def state_space_duality(decay: float, turn: float, steps: int, signal: str) -> list[Panel]:
    value = torch.polar(torch.tensor([[decay]], dtype=torch.float64), torch.tensor([[turn]], dtype=torch.float64))
    one = as_real(torch.ones(1, 1, dtype=torch.complex128))
    system = System(DiagonalTransition(value), one, one)
    t = torch.arange(steps)
    inputs = {"impulse": (t == 0).double(), "step": torch.ones(steps).double(), "wave": torch.sin(t.double() * 0.3)}
    u = inputs[signal][None, :, None]  # (1, L, 1)
    convolved, _ = state_space(system, u)
    state, outputs = torch.zeros(1, 1, 2, dtype=torch.float64), []
    for x in u.unbind(1):
        y, state = state_space(system, x[:, None], state)
        assert state is not None
        outputs.append(y.item())
    curve = convolved[0, :, 0].tolist()
    return [
        lines("output", {"convolution": list(enumerate(curve)), "recurrence": list(enumerate(outputs))}, "step", "y"),
        lines(
            "kernel K = C Āᵏ B̄", {"kernel": list(enumerate(kernel(system, steps, torch.float64)[0].tolist()))}, "k", "K"
        ),
        numbers(
            {
                "largest difference": max(abs(a - b) for a, b in zip(curve, outputs, strict=True)),
                "state in generation, numbers": state.numel(),
                "inputs that the convolution reads": steps,
            }
        ),
    ]


INSTRUMENTS = (
    Instrument(
        "window", "Windows and depth",
        "A layer attends to its window only; stacked layers reach further, w − 1 tokens per layer.",
        r"\text{reach} = L\,(w-1) + 1 \quad (w \text{ counts the token itself})",
        (
            Slider("layers", "layers L", 1, 6, 4),
            Slider("size", "window w", 1, 8, 3),
            Slider("tokens", "tokens", 2, 32, 16),
        ),
        Quiz(
            "How far back do 4 layers with a window of 3 reach?",
            "9 tokens, the last one included, if the window counts the token itself: 4 · 2 + 1. The often printed "
            "4 · 3 = 12 counts 3 tokens besides it, and then the exact number is 13.",
            {"layers": 4, "size": 3, "tokens": 16},
        ),
        window, ("kernels/attention/patterns/window.py", "planning/flops.py"),
    ),
    Instrument(
        "tiles", "Attention in tiles",
        "A running maximum and sum make the softmax exact tile by tile; the whole row of scores never exists.",
        r"m' = \max(m, m_j), \qquad l' = l\,e^{m-m'} + l_j\,e^{m_j-m'}, \qquad o' = o\,e^{m-m'} + o_j\,e^{m_j-m'}",
        (
            Slider("tiles", "tiles of keys", 1, 8, 4),
            Slider("tile", "keys per tile", 1, 8, 4),
            Slider("done", "tiles processed", 0, 8, 4),
            Slider("head_dim", "head dimension", 16, 128, 64, 16),
        ),
        Quiz(
            "Is the result an approximation?",
            "No. After the last tile it equals plain attention up to rounding; only the traffic differs.",
            {"done": 8, "tiles": 8},
        ),
        flash, ("kernels/attention/online_softmax.py", "planning/memory.py"),
    ),
    Instrument(
        "memory-wall", "Where n² appears",
        "Stored scores grow with the square of the length; tiles, linear attention and short windows do not.",
        r"\text{scores} = h\,n^2, \qquad \text{tiles} = O(n), \qquad \text{state} = h\,d\,(d+1)",
        (
            Slider("tokens", "log₂ of the tokens", 7, 20, 14),
            Slider("heads", "heads", 1, 64, 32),
            Slider("head_dim", "head dimension", 16, 256, 128, 16),
            Slider("window", "window", 128, 8192, 4096, 128),
        ),
        Quiz(
            "By how much do the stored scores grow when the text is twice as long?",
            "By 4. With q, k, v and the output the memory grows 3.94 times from 16,384 to 32,768 tokens; that of tiles "
            "doubles.",
            {"tokens": 15},
        ),
        wall, ("planning/memory.py", "planning/flops.py"),
    ),
    Instrument(
        "associativity", "The order of two products",
        "Without the softmax, (QKᵀ)V and Q(KᵀV) are the same numbers at different cost.",
        r"(QK^\top)V = Q(K^\top V), \qquad n^2 \text{ entries against } d^2",
        (
            Slider("tokens", "tokens n", 1, 512, 4),
            Slider("head_dim", "head dimension d", 1, 128, 2),
        ),
        Quiz(
            "For n = 4 and d = 2, how many entries has the matrix in the middle?",
            "16 for (QKᵀ)V and 4 for Q(KᵀV). The second order needs fewer FLOPs once n exceeds d.",
            {"tokens": 4, "head_dim": 2},
        ),
        associativity, ("kernels/recurrent/linear_attention.py", "planning/flops.py"),
    ),
    Instrument(
        "convolution-recurrence", "One system, two ways to compute it",
        "A linear state space trains as a convolution over the whole sequence and generates as a recurrence.",
        r"x_t = \bar A x_{t-1} + \bar B u_t,\; y_t = C x_t \qquad\Longleftrightarrow\qquad y = K * u,\; "
        r"K_k = C\bar A^k\bar B",
        (
            Slider("decay", "decay |a|", 0.0, 1.0, 0.9, 0.01),
            Slider("turn", "angle of a, radians", 0.0, 3.0, 0.0, 0.05),
            Slider("steps", "steps", 2, 64, 32),
            Selection("signal", "input", ("impulse", "step", "wave"), "impulse"),
        ),
        Quiz(
            "What does the impulse response look like for |a| = 0.9 and an angle of 0.5?",
            "A damped oscillation: powers of a complex number rotate and shrink.",
            {"decay": 0.9, "turn": 0.5, "signal": "impulse"},
        ),
        state_space_duality, ("kernels/recurrent/state_space/__init__.py", "kernels/recurrent/state_space/kernel.py"),
    ),
)  # fmt: skip
