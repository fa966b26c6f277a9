"""The pictures of the pages, drawn from the parts themselves: `python docs/draw.py [name …]`, into docs/pictures.

Backgrounds are transparent and inks of middle tone, so that a picture can be read on a light page and on a dark one.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.at import At
from regard.engine.request import Sampling
from regard.engine.sampling import restrict
from regard.engine.stores.paged import Paged
from regard.kernels.attention.bias import Buckets
from regard.kernels.attention.mask import Causal, Full, Mask, visible
from regard.kernels.attention.patterns.bigbird import BigBird
from regard.kernels.attention.patterns.block_sparse import BlockSparse
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.prefix import PrefixLM
from regard.kernels.attention.patterns.sinks import SinksAndWindow
from regard.kernels.attention.patterns.sparse_transformer import Fixed, Strided
from regard.kernels.attention.patterns.window import Dilated, Window
from regard.kernels.attention.scores import Scores
from regard.kernels.attention.statistics import attend_with_statistics
from regard.kernels.state_space.discretise import bilinear
from regard.kernels.state_space.hippo import legs, rebuild
from regard.kernels.state_space.kernel import System, driven, kernel
from regard.kernels.state_space.transition import Dense
from regard.lens import record
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward, SwiGLU
from regard.parts.latent import LatentAttention
from regard.parts.norm import LayerNorm
from regard.parts.position.alibi import slopes
from regard.parts.position.rope import Rope
from regard.parts.position.scaling import NTK, Linear, Llama3, Scaling, Yarn
from regard.parts.position.sinusoidal import Sinusoidal
from regard.plan import plan
from regard.plan.parts import all_bodies, flops
from regard.plan.published import PUBLISHED
from regard.report.pictures import pyplot
from regard.training.schedule import Constant, Cosine, WarmupStableDecay
from regard.verify.trial import padded

HERE = Path(__file__).parent / "pictures"
INK, FAINT = "#80868f", "#80868f40"
BLUE, ORANGE, GREEN, RED, PURPLE = "#4a86c9", "#d9822b", "#3f9b6c", "#cf5c5c", "#8e6bbf"


def canvas(rows: int = 1, columns: int = 1, width: float = 7.2, height: float = 2.8) -> tuple[Any, list[Any]]:
    plt = pyplot()
    plt.rcParams.update({
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 9,
        "font.family": "DejaVu Sans", "savefig.transparent": True, "savefig.dpi": 144,
    })  # fmt: skip
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for each in axes.flat:
        each.spines[:].set_color(FAINT)
        each.tick_params(color=FAINT)
        each.patch.set_alpha(0)
    return figure, list(axes.flat)


def label(axes: Any, x: float, y: float, text: str, colour: str = INK, **how: Any) -> None:
    """A name beside what it names."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", color=colour, va="center", **how)


def cells(axes: Any, weights: Tensor, title: str, colour: str = BLUE) -> None:
    """A small matrix: the stronger the colour, the larger the number; an outline so that what is empty has a shape."""
    tint(axes, torch.full_like(weights, 0.13), INK)
    tint(axes, weights, colour)
    axes.set_title(title, fontsize=9, color=INK)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def tint(axes: Any, strength: Tensor, colour: str, aspect: str = "equal") -> None:
    """One colour, as opaque as the numbers (rows, columns) are large, from 0 to 1."""
    from matplotlib.colors import to_rgb

    image = torch.cat([torch.tensor(to_rgb(colour)).expand(*strength.shape, 3), strength.float().unsqueeze(-1)], -1)
    axes.imshow(image.clamp(0, 1).numpy(), aspect=aspect, interpolation="nearest")


def seen(mask: Mask, at: At) -> Tensor:
    found = visible(mask, at)
    return torch.ones(at.positions.shape[1], at.key_positions.shape[1]) if found is None else found[0, 0].double()


def masks() -> Any:
    """What a query (row) may see of the keys (columns)."""
    whole, size = At.whole(1, 16), 16
    lengths = (5, 8, 3)
    documents = At(
        torch.cat([torch.arange(n) for n in lengths])[None],
        torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
    )
    left = padded([11], size, left=True)
    source = whole.before_source(At.whole(1, 10))
    panels = {
        "full": seen(Full(), whole),
        "causal": seen(Causal(), whole),
        "prefix of 6": seen(PrefixLM(6), whole),
        "three documents": seen(Causal(), documents),
        "padded on the left": seen(Causal(), left) * left.valid[0].unsqueeze(-1),
        "a source of 10": seen(Full(), source),
    }
    figure, axes = canvas(1, 6, height=1.42)
    for each, (title, weights) in zip(axes, panels.items(), strict=True):
        cells(each, weights, title)
    return figure


def patterns() -> Any:
    whole = At.whole(1, 32)
    layout = tuple(tuple(sorted({0, max(row - 1, 0), row})) for row in range(8))
    panels = {
        "Window(8)": Window(8),
        "Window(4, causal=False)": Window(4, causal=False),
        "Dilated(6, 3)": Dilated(6, 3),
        "SinksAndWindow(2, 8)": SinksAndWindow(2, 8),
        "Strided(6)": Strided(6),
        "Fixed(6)": Fixed(6),
        "BlockSparse(4, …)": BlockSparse(4, layout),
        "Longformer(4, 2)": Longformer(4, 2),
        "BigBird(2, …)": BigBird(2, window=3, globals=1, random=2, length=32),
        "BigBird, causal": BigBird(2, window=3, globals=1, random=2, length=32, causal=True),
    }
    figure, axes = canvas(2, 5, height=3.3)
    for each, (title, mask) in zip(axes, panels.items(), strict=True):
        cells(each, seen(mask, whole), title)
    return figure


def sinusoids() -> Any:
    """Sines and cosines of every place; orange above zero, blue below."""
    at = At.whole(1, 300)
    table = Sinusoidal(layout="half").build(64, 1).embed(torch.zeros(1, 300, 64), at)[0].T  # (D, L)
    figure, (axes,) = canvas(height=2.4)
    tint(axes, table.clamp_min(0), ORANGE, "auto")
    tint(axes, (-table).clamp_min(0), BLUE, "auto")
    axes.set_yticks([2, 16, 29, 34, 48, 61], labels=["fast", "sine", "slow", "fast", "cosine", "slow"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.axhline(31.5, color=INK, linewidth=0.8)
    axes.set_xlabel("position")
    axes.spines[:].set_visible(False)
    return figure


def distances() -> Any:
    """What distance does to a score, by scheme."""
    figure, (rope, alibi, t5) = canvas(1, 3, height=2.5)
    steps = torch.arange(0, 4001)
    theta = Rope().frequencies(128, At.whole(1, 1))
    mean = (steps.unsqueeze(-1) * theta).cos().mean(-1)
    rope.plot(steps[1:].numpy(), mean[1:].numpy(), color=BLUE, linewidth=1)
    rope.set(title="RoPE: mean cosine, q = k", xscale="log", xlabel="distance", ylim=(-0.2, 1))
    rope.set_xticks([1, 10, 100, 1000], labels=["1", "10", "100", "1000"])
    rope.minorticks_off()
    near = torch.arange(0, 65)
    for head, slope in list(enumerate(slopes(8).tolist()))[::2]:
        alibi.plot(near.numpy(), (-slope * near).numpy(), color=ORANGE, linewidth=1.4)
        reach = min(64.0, 9.6 / slope)
        label(alibi, reach, -slope * reach, f"head {head + 1}", ORANGE, fontsize=8)
    alibi.set(title="ALiBi: bias of 8 heads", xlabel="distance", ylim=(-10, 0.5), xlim=(0, 84))
    far = torch.arange(0, 201)
    buckets = Buckets(torch.zeros(32, 1), 128, False)
    t5.plot(far.numpy(), buckets.bucket(-far).numpy(), color=GREEN, linewidth=1.6, drawstyle="steps-post")
    t5.set(title="T5: bucket of 32", xlabel="distance", yticks=[0, 16, 31])
    for each in (rope, alibi, t5):
        each.title.set(fontsize=9, color=INK)
    return figure


def scalings() -> Any:
    """How many times slower each pair turns, for eight times the trained length."""
    figure, (axes,) = canvas(height=3.0)
    whole, dim = At.whole(1, 1), 128
    plain = Rope(500000.0).frequencies(dim, whole)
    lines: dict[str, tuple[Scaling, str, float, float]] = {
        "Linear": (Linear(8.0), ORANGE, 8, 8.8),
        "NTK": (NTK(8.0), PURPLE, 9, 1.75),
        "Yarn": (Yarn(8.0, 8192), BLUE, 21.5, 1.7),
        "Llama3": (Llama3(8.0, 8192), GREEN, 30, 1.45),
    }
    turns = 8192 * plain / (2 * torch.pi)
    for name, (scaling, colour, x, y) in lines.items():
        slower = plain / Rope(500000.0, scaling=scaling).frequencies(dim, whole)
        axes.plot(slower.numpy(), color=colour, linewidth=2)
        axes.text(x, y, name, color=colour)
    once = int((turns > 1).sum())
    axes.axvline(once, color=FAINT, linewidth=1)
    label(axes, once, 1.25, "from here on less than one turn\nin the trained length", fontsize=8)
    axes.set(xlabel="pair (fast to slow)", ylabel="times slower", yscale="log", xlim=(0, 63), ylim=(0.9, 11))
    axes.set_yticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
    axes.minorticks_off()
    return figure


def scales() -> Any:
    """Mean entropy of attention over 256 keys by the width of a head, for three divisors of the score."""
    figure, (axes,) = canvas(height=2.6)
    generator, widths = torch.Generator().manual_seed(0), [4, 8, 16, 32, 64, 128, 256]
    at, found = At.whole(1, 256), {power: [] for power in (0, 0.5, 1)}
    for width in widths:
        q, k = torch.randn(2, 1, 2, 256, width, generator=generator)
        for power, means in found.items():
            _, statistics = attend_with_statistics(q, k, k, at, Scores(Full(), width**-power))
            means.append(statistics.entropy.mean().item())
    names = {0: ("q·k", RED), 0.5: ("q·k / √E", BLUE), 1: ("q·k / E", ORANGE)}
    for power, means in found.items():
        name, colour = names[power]
        axes.plot(widths, means, color=colour, linewidth=2, marker="o", markersize=3)
        label(axes, widths[-1], means[-1], name, colour)
    top = torch.tensor(256.0).log().item()
    axes.plot([4, 256], [top, top], color=FAINT, linewidth=1)
    label(axes, 4, top + 0.3, "log 256: every key alike", fontsize=8)
    axes.set(xlabel="width of a head, E", ylabel="entropy (nats)", xscale="log", ylim=(0, 6.3), xlim=(3.6, 420))
    axes.set_xticks(widths, labels=[str(width) for width in widths])
    axes.minorticks_off()
    return figure


def caches() -> Any:
    """Numbers that a layer keeps of a token."""
    kinds = {
        "multi-head, 32 of 32": Attention(32),
        "grouped, 8 of 32": Attention(32, 8),
        "latent, rank 512": LatentAttention(32, rank=512, nope_dim=128, rope_dim=64),
        "multi-query, 1 of 32": Attention(32, 1),
    }
    figure, (axes,) = canvas(height=1.7)
    for place, body in enumerate(kinds.values()):
        size = sum(heads * dim for heads, dim in body.memory(4096).arrays.values())
        axes.barh(place, size, color=BLUE, height=0.62)
        label(axes, size, place, f"{size:,}")
    axes.set_yticks(range(len(kinds)), labels=list(kinds))
    axes.set(xlim=(0, 9200), xticks=[])
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def routing() -> Any:
    """Tokens, and which two of eight experts each goes to."""
    experts = fresh(Experts(8, 2, SwiGLU(32)), 32)
    tokens = torch.randn(24, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        routing = experts.router(tokens)
    weights = torch.zeros(24, 8).scatter(1, routing.chosen, routing.weights).T  # (X, T)
    figure, (left, right) = canvas(1, 2, height=2.1)
    left.get_gridspec().set_width_ratios([4, 1])
    cells(left, weights, "weight of an expert (row) for a token (column)")
    left.set_aspect("auto")
    load = (weights > 0).sum(1)
    right.barh(range(8), load.numpy(), color=ORANGE, height=0.62)
    right.axvline(6, color=INK, linewidth=1, linestyle=":")
    right.set(xticks=[0, 6], yticks=[], ylim=(7.5, -0.5))
    right.set_title("tokens (even: 6)", fontsize=9, color=INK)
    right.spines[:].set_visible(False)
    return figure


def fresh(body: Body, width: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return body.build(width).eval()


def depth() -> Any:
    """The size of the stream on top of fresh stacks, by their depth."""
    figure, (axes,) = canvas(height=2.6)
    depths, tokens = [2, 4, 8, 16, 32, 64], torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(0))
    pre = Block((Sublayer(Attention(4)), Sublayer(SwiGLU(344))))
    post = Block(tuple(Sublayer(body, LayerNorm()) for body in (Attention(4), FeedForward(512))), style="post")
    shapes = {
        "pre-norm, xavier": (pre, "xavier", RED),
        "pre-norm, fan_in": (pre, "fan_in", BLUE),
        "pre-norm, gpt2": (pre, "gpt2", ORANGE),
        "post-norm": (post, "xavier", GREEN),
    }
    for name, (block, scheme, colour) in shapes.items():
        sizes = []
        for count in depths:
            model = Decoder(512, 128, (Repeat((block,), count),)).build(seed=0, scheme=scheme)
            with torch.no_grad(), record(model, f"stack.blocks.{count - 1}") as passed:
                model(tokens)
            sizes.append(passed[f"stack.blocks.{count - 1}"].square().mean().sqrt().item())
        axes.plot(depths, sizes, color=colour, linewidth=2, marker="o", markersize=3)
        label(axes, depths[-1], sizes[-1], name, colour)
    axes.set(xlabel="blocks in the stack", ylabel="size of its output\n(root mean square)", xscale="log", yscale="log")
    axes.set_xticks(depths, labels=[str(count) for count in depths])
    axes.set_yticks([0.1, 1, 10], labels=["0.1", "1", "10"])
    axes.set_xlim(1.9, 150)
    axes.minorticks_off()
    return figure


def schedules() -> Any:
    figure, (axes,) = canvas(height=2.2)
    lines = {
        "Constant": (Constant(100), INK, 1000, 1.0),
        "Cosine": (Cosine(100), BLUE, 1000, 0.1),
        "WarmupStableDecay": (WarmupStableDecay(100), ORANGE, 1000, 0.0),
    }
    for name, (schedule, colour, x, y) in lines.items():
        axes.plot([schedule.factor(step, 1000) for step in range(1000)], color=colour, linewidth=2)
        label(axes, x, y, name, colour)
    axes.set(xlabel="step", ylabel="share of the peak rate", xlim=(0, 1260), ylim=(-0.05, 1.08), yticks=[0, 0.5, 1])
    axes.set_xticks([0, 100, 500, 1000])
    return figure


def pages() -> Any:
    """Four rows that have grown in turns, and the blocks of the pool that each owns."""
    store = Paged((), rows=4, capacity=96, blocks=20, dtype=torch.float32, block=16)
    for row, length in ((0, 20), (1, 40), (2, 16), (0, 50), (3, 30), (1, 90), (2, 40)):
        assert store.reserve(row, length)
    figure, (axes,) = canvas(height=1.5)
    for row, (owned, colour) in enumerate(zip(store.owned, (BLUE, ORANGE, GREEN, PURPLE), strict=True)):
        for order, block in enumerate(owned):
            axes.barh(0, 0.92, left=block - 0.46, height=0.8, color=colour)
            axes.text(block, 0, f"{'abcd'[row]}{order}", ha="center", va="center", color="white", fontsize=9)
    for block in store.free:
        axes.barh(0, 0.92, left=block - 0.46, height=0.8, color=FAINT)
    axes.set(xlim=(0.4, 20.6), ylim=(-0.6, 0.6), yticks=[], xlabel="the pool; a0 a1 … are the blocks of row a in order")
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.spines[:].set_visible(False)
    return figure


def filters() -> Any:
    """One distribution, and what each setting leaves of it."""
    logits = torch.tensor([2.2, 1.9, 1.5, 1.1, 0.5, 0.2, -0.2, -0.8, -1.2, -1.9])
    panels = {
        "as it is": Sampling(),
        "temperature 0.5": Sampling(temperature=0.5),
        "temperature 2": Sampling(temperature=2.0),
        "top_k 3": Sampling(top_k=3),
        "top_p 0.8": Sampling(top_p=0.8),
        "min_p 0.2": Sampling(min_p=0.2),
    }
    figure, axes = canvas(1, 6, height=1.5)
    for each, (title, sampling) in zip(axes, panels.items(), strict=True):
        kept = restrict(logits[None], [sampling]).softmax(-1)[0]
        each.bar(range(10), logits.softmax(-1).numpy(), color=FAINT, width=0.8)
        each.bar(range(10), kept.numpy(), color=BLUE, width=0.5)
        each.set_title(title, fontsize=9, color=INK)
        each.set(xticks=[], yticks=[], ylim=(0, 0.52))
        each.spines[["left", "bottom"]].set_visible(False)
    return figure


def crossover() -> Any:
    """A token's FLOPs of Llama 3.1 8B by what comes before it."""
    spec = PUBLISHED["llama-3.1-8b"].spec()
    lengths = [2**n for n in range(8, 18)]
    bodies = all_bodies(spec)
    rest = sum(flops(body, width, 1, 0) for body, width in bodies)
    pairs = [sum(flops(body, width, 1, n) for body, width in bodies) - rest for n in lengths]
    figure, (axes,) = canvas(height=2.6)
    axes.plot(lengths, [rest] * len(lengths), color=BLUE, linewidth=2)
    axes.plot(lengths, pairs, color=ORANGE, linewidth=2)
    label(axes, lengths[-1], rest, "weights of the blocks", BLUE)
    label(axes, lengths[-1], pairs[-1], "scores and blend", ORANGE)
    cache = plan(spec, 1, dtype="bfloat16").kv_bytes_per_token
    axes.set(xscale="log", yscale="log", xlabel="tokens before it", ylabel="FLOPs of a token", xlim=(220, 900000))
    axes.set_xticks([256, 1024, 4096, 16384, 65536], labels=["256", "1k", "4k", "16k", "64k"])
    axes.minorticks_off()
    axes.set_title(f"Llama 3.1 8B, which also keeps {cache // 1024} KiB a token", fontsize=9, color=INK)
    return figure


def history() -> Any:
    """The weights by which HiPPO's first numbers gather the past; and a signal, read back from the state."""
    figure, (weights, past) = canvas(1, 2, height=2.3)
    A, b = bilinear(*legs(4), 0.01)
    units = System(Dense(A.expand(4, 4, 4)), b.expand(4, 4), torch.eye(4, dtype=torch.float64))
    gathered = kernel(units, 300, torch.float64) / 0.01  # (4, 300)
    for n, (line, colour) in enumerate(zip(gathered, (BLUE, ORANGE, GREEN, PURPLE), strict=True)):
        weights.plot((torch.arange(300) * 0.01).numpy(), line.numpy(), color=colour, linewidth=1.5, label=f"n = {n}")
    weights.set(title="weights of the past, n = 0 … 3", xlabel="time ago", yticks=[0], xlim=(2.4, 0))
    weights.legend(frameon=False, fontsize=8, labelcolor="linecolor", handlelength=0, loc="upper left")
    step, count = 0.002, 4000
    time = torch.arange(count, dtype=torch.float64) * step
    u = torch.sin(3 * time) + 0.5 * torch.cos(7.3 * time)
    ages = time[:1200]
    past.plot(ages.numpy(), u.flip(0)[:1200].numpy(), color=INK, linewidth=3, alpha=0.5)
    for size, colour in ((8, ORANGE), (64, BLUE)):
        A, b = bilinear(*legs(size), step)
        state = driven(System(Dense(A[None]), b[None], b[None]), u[None, None])[0, 0]
        past.plot(ages.numpy(), rebuild(state, ages).numpy(), color=colour, linewidth=1.3, label=f"N = {size}")
    past.set(title="what the state says of the past", xlabel="time ago", yticks=[0], ylim=(-2, 2), xlim=(2.4, 0))
    past.legend(frameon=False, fontsize=8, labelcolor="linecolor", handlelength=0, loc="upper left")
    for each in (weights, past):
        each.title.set(fontsize=9, color=INK)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        masks, patterns, sinusoids, distances, scalings, scales, caches, routing, depth, schedules, pages, filters,
        crossover, history,
    )
}  # fmt: skip


def draw(names: Iterable[str], folder: Path) -> None:
    for name in names:
        figure = PICTURES[name]()
        figure.savefig(folder / f"{name}.png", metadata={"Software": None}, pil_kwargs={"optimize": True})
        figure.clear()


if __name__ == "__main__":
    draw(sys.argv[1:] or PICTURES, HERE)
