"""Gated units beat ReLU and GELU at equal weights, a feed-forward of 4 times the width one of 1; centring adds nothing.

Decoders that differ in one part are trained on the same tokens of stories in the same order, and judged by their loss
on held-out stories. The feed-forward: ReLU or GELU with 256 channels, or gated units with 171, of as many weights. Its
width: as many weights in all, in a narrower stack with a wider feed-forward or the reverse; and, in a stack of the
same width, a feed-forward of only 1 times the width, with fewer weights. The norm: RMSNorm or LayerNorm. A difference
within 1 % counts as none, and one in order must occur with every seed. The time of both norms alone, forward and
backward, is measured as torch has them and as their formulas, and that of a step of training with both.

Shazeer 2020; Zhang & Sennrich 2019.
"""

# ledger: ffn.swiglu.better ffn.width norm.rms.gain

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator, step_seconds
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories, held_out_loss
from regard.labs.small_models import parameter_count
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import FeedForward, Gated, SwiGLU
from regard.parts.norm import LayerNorm, Norm, RMSNorm
from regard.parts.position.rope import Rope

ROW, SAME = 64, 0.01


@dataclass(frozen=True)
class Variant:
    feedforward: Body = FeedForward(256, "gelu", bias=False)
    width: int = 64
    norm: Norm = RMSNorm()

    def build(self, seed: int) -> DecoderModule:
        attention = Sublayer(Attention(4, position=Rope()), self.norm)
        block = Block((attention, Sublayer(self.feedforward, self.norm)))
        return Decoder(VOCAB, self.width, (Repeat((block,), 2),), norm=self.norm).build(seed)


def gelu(hidden: int) -> FeedForward:
    return FeedForward(hidden, "gelu", bias=False)


VARIANTS = {
    "GELU": Variant(),
    "ReLU": Variant(FeedForward(256, "relu", bias=False)),
    "SwiGLU": Variant(SwiGLU(171)),
    "GEGLU": Variant(Gated(171, "gelu")),
    "0.9 × 88": Variant(gelu(77), width=88),  # hidden channels relative to the width, and the width
    "1.6 × 80": Variant(gelu(128), width=80),
    "9.3 × 48": Variant(gelu(448), width=48),
    "1 × 64, fewer weights": Variant(gelu(64)),
    "LayerNorm": Variant(norm=LayerNorm()),
}


def run(bench: Bench) -> Findings:
    steps, rows = bench.training(500, 2), bench.setting(8, 2)
    train, held_out = encode_stories(bench.setting(1000, 40), bench.setting(200, 20))
    losses, weights = {}, {}
    for name, variant in VARIANTS.items():
        model = variant.build(bench.seed)
        fit(bench, name, model, lambda rng: draw_rows(rng, train, rows, ROW), steps)
        losses[name] = held_out_loss(model, held_out, bench.setting(64, 2), ROW)
        weights[name] = parameter_count(model)
    torch_ratio, formula_ratio, step_ratio = time_ratios(bench, train)

    def lower(name: str, other: str) -> Check:
        return Check(f"{name} has a lower loss than {other}", f"{losses[name]:.4f} and {losses[other]:.4f}",
                     losses[name] < losses[other])  # fmt: skip

    checks = [
        *(lower(gated, plain) for gated in ("SwiGLU", "GEGLU") for plain in ("ReLU", "GELU")),
        replace(lower("GELU", "0.9 × 88"), expected="as many weights: a feed-forward of 4 times the width has a lower "
                "loss than one of 0.9 times"),
        replace(lower("GELU", "1 × 64, fewer weights"), expected="the same width: a feed-forward of 4 times the width "
                "has a lower loss than one of 1 times"),
        Check("RMSNorm has the loss of LayerNorm or a lower one, within 1 %",
              f"{losses['GELU']:.4f} and {losses['LayerNorm']:.4f}", losses["GELU"] < (1 + SAME) * losses["LayerNorm"]),
        Check("as torch has them RMSNorm takes at least 10 % less time than LayerNorm", f"{torch_ratio:.2f} of it",
              torch_ratio <= 0.9),
        Check("as formulas RMSNorm takes at least 10 % less time", f"{formula_ratio:.2f} of it", formula_ratio <= 0.9),
        Check("the time of a training step changes by less than 10 %", f"{step_ratio:.2f}", abs(step_ratio - 1) < 0.1),
    ]  # fmt: skip
    table = [{"variant": name, "weights": weights[name], "held-out loss": loss} for name, loss in losses.items()]
    units, widths = ("ReLU", "GELU", "SwiGLU", "GEGLU"), ("0.9 × 88", "1.6 × 80", "GELU", "9.3 × 48")
    plots = [
        Plot("", "nats per token", {"": [(i, losses[name]) for i, name in enumerate(units)]}, "units", groups=units),
        Plot("channels, relative to the width", "nats per token",
             {"as many weights": [(x, losses[name]) for x, name in zip((0.9, 1.6, 4, 9.3), widths, strict=True)]},
             "feed-forward", "x"),
        Plot("", "time, relative to LayerNorm", {"": list(enumerate((torch_ratio, formula_ratio, step_ratio)))},
             "RMSNorm", groups=("torch", "formula", "step")),
    ]  # fmt: skip
    return Findings(table, checks, plots, f"{steps * rows * ROW:,} tokens of training, two layers.")


def time_ratios(bench: Bench, ids: Tensor) -> tuple[float, float, float]:
    """The time of RMSNorm as a share of LayerNorm's: torch's operations, the formulas, and a step of training."""
    x, rounds = torch.randn(bench.setting(4096, 8), 512, requires_grad=True), bench.setting(30, 2)
    norms = {
        "torch rms": RMSNorm().build(512),
        "torch layer": LayerNorm().build(512),
        "formula rms": FormulaNorm(512, centred=False),
        "formula layer": FormulaNorm(512, centred=True),
    }
    alone = step_seconds(norms, lambda norm: norm(x).sum(), rounds)
    models = {name: VARIANTS[name].build(bench.seed) for name in ("GELU", "LayerNorm")}
    batch = draw_rows(generator(0), ids, 8, ROW)
    steps = step_seconds(models, lambda model: next_token(model, batch)[0], rounds)
    return (alone["torch rms"] / alone["torch layer"], alone["formula rms"] / alone["formula layer"],
            steps["GELU"] / steps["LayerNorm"])  # fmt: skip


class FormulaNorm(nn.Module):
    """RMSNorm, or LayerNorm if it is centred, operation by operation."""

    def __init__(self, width: int, centred: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if centred else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias
