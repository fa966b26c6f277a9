"""Deep stacks need residual connections and pre-norm: without residuals none trains, with post-norm gradients fade.

Stacks of thin layers, of three kinds, read characters of stories. Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x)).
Without residuals: f(norm(x)), so that the signal keeps its size and only the direct path is missing. Initial weights
are Xavier's, without a factor for depth. Measured before training: the norm of the gradient of every layer's weights.
If gradients shrink by a constant factor per layer, its logarithm is a straight line over the layers. Then the stacks
are trained, all alike, with warmup. A stack that learns nothing from its input can still learn how frequent each
character is, so a stack counts as trained if its loss on held-out stories is below the entropy of those frequencies by
0.3 nats, and as not trained if it is not below it by 0.1.

He et al. 2015; Xiong et al. 2020. A thin layer is 32 wide with 2 heads and 64 hidden channels.
"""

# ledger: res.needed blk.depth

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.gradients_through_time import log_slope
from regard.labs.gru_or_lstm import VOCAB, encode_stories, mean_loss
from regard.labs.mamba_language import draw_rows
from regard.models.base import Scheme
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.rope import Rope

WIDTH, ROWS, LENGTH = 32, 16, 32
ATTENTION, FEEDFORWARD = Sublayer(Attention(2, position=Rope()), LayerNorm()), Sublayer(FeedForward(64), LayerNorm())
BLOCKS = {
    "pre-norm": Block((ATTENTION, FEEDFORWARD)),
    "post-norm": Block((ATTENTION, FEEDFORWARD), style="post"),
    "without residuals": Block((ATTENTION, FEEDFORWARD), keep=0.0),
}


def run(bench: Bench) -> Findings:
    depths, deepest = bench.setting((6, 12, 96), (2, 3)), bench.setting(192, 4)
    train, held_out = (encode_stories(split, bench.setting(1000, 10)) for split in ("train", "held-out"))
    test = draw_rows(generator(0), held_out, bench.setting(128, 4), LENGTH)
    frequencies = entropy_of(test.targets)
    gradients = {name: gradient_by_layer(thin_stack(name, deepest, bench.seed), train) for name in BLOCKS}
    losses = {}
    for name in BLOCKS:
        for depth in depths[:-1] if name == "post-norm" else depths:  # of post-norm only the gradients are judged
            model = thin_stack(name, depth, bench.seed)
            fit(bench, f"{name}, {depth} layers", model, lambda rng: draw_rows(rng, train, ROWS, LENGTH),
                bench.training(100, 2))  # fmt: skip
            losses[name, depth] = mean_loss(model, test)
    learned = {key: frequencies - loss for key, loss in losses.items()}
    slope, fit_of_line = log_slope(gradients["post-norm"])
    checks = [
        *(Check(f"pre-norm: {depth} layers train", f"{learned['pre-norm', depth]:.2f} nats below the frequencies",
                learned["pre-norm", depth] > 0.3) for depth in depths),
        *(Check(f"without residuals {depth} layers do not train",
                f"{learned['without residuals', depth]:.2f} nats below the frequencies",
                learned["without residuals", depth] < 0.1) for depth in depths),
        Check(f"post-norm: gradients of {deepest} new layers are a straight line on a logarithmic scale, r² above 0.9",
              f"a factor of {10**slope:.3f} per layer, r² {fit_of_line:.2f}", fit_of_line > 0.9),
        Check("and their norms differ by a factor above 100", f"{spread(gradients['post-norm']):.0f}",
              spread(gradients["post-norm"]) > 100),
        Check(f"pre-norm: gradients of {deepest} new layers differ by a factor below 10",
              f"{spread(gradients['pre-norm']):.1f}", spread(gradients["pre-norm"]) < 10),
    ]  # fmt: skip
    table = [{"stack": name, "layers": depth, "held-out loss": loss, "below the frequencies": learned[name, depth]}
             for (name, depth), loss in losses.items()]  # fmt: skip
    lines = {name: [(depth, loss) for (other, depth), loss in losses.items() if other == name] for name in BLOCKS}
    lines["frequencies of characters"] = [(depth, frequencies) for depth in depths]
    plots = [
        Plot("layers", "nats per character", lines, "held-out stories after training", "x"),
        Plot("layer, from the input", "norm of the gradient", gradients, f"{deepest} new layers", "y"),
    ]
    return Findings(
        table,
        checks,
        plots,
        "Without residuals the norms stay. All stacks have one learning rate, 0.003, and 100 steps.",
    )


def thin_stack(name: str, depth: int, seed: int, scheme: Scheme = "xavier") -> DecoderModule:
    norm = NoNorm() if name == "post-norm" else LayerNorm()  # a post-norm block ends in a norm
    return Decoder(VOCAB, WIDTH, (Repeat((BLOCKS[name],), depth),), norm=norm).build(seed, scheme)


def gradient_by_layer(model: DecoderModule, ids: Tensor) -> list[tuple[float, float]]:
    """(layer, norm of the gradient of its weights) for one batch."""
    loss, count, _ = next_token(model, draw_rows(generator(0), ids, ROWS, LENGTH))
    (loss / count).backward()
    norms = [torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm().item()
             for block in model.stack.blocks]  # fmt: skip
    model.zero_grad()
    return list(enumerate(norms))


def spread(points: Sequence[tuple[float, float]]) -> float:
    """The largest divided by the smallest value."""
    values = [y for _, y in points]
    return max(values) / min(values) if min(values) > 0 else math.inf


def entropy_of(ids: Tensor) -> float:
    """The entropy in nats of the frequencies of these ids."""
    return torch.distributions.Categorical(torch.bincount(ids.flatten()).double()).entropy().item()
