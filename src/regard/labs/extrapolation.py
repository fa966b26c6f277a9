"""Beyond the training length sinusoidal and learned positions fail, RoPE needs scaling, and ALiBi holds.

Decoders that differ in the position scheme only are trained on stories of the small world in rows of L = 64 tokens.
Then each predicts the same tokens, the last half L of held-out rows, with a context of L, 2L, 4L and 8L. A model that
extrapolates loses nothing, since a longer context contains the shorter one. RoPE is also evaluated with scaled
frequencies, without any further training: position interpolation (PI), NTK-aware scaling and YaRN with the factor that
the length needs, and dynamic NTK with factor 2. The learned table has rows for all lengths, of which only the first L
are trained; otherwise longer sequences would be an error.

The loss is compared with guessing by frequency: "share lost" is (loss - loss at L) / (loss of guessing - loss at L), so
0 is as good as at L and 1 as bad as knowing the frequencies of tokens only.

Vaswani et al. 2017; Su et al. 2021; Press et al. 2021; Chen et al. 2023; Peng et al. 2023; Kazemnejad et al. 2023.
"""

# ledger: pos.sin.extrapolate
# ledger: pos.learned.better
# ledger: pos.rope.extrapolate
# ledger: pos.alibi.extrapolate
# ledger: pos.table

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.mamba_language import VOCAB, draw_rows, encode_stories
from regard.labs.position_models import SCHEMES, decoder_with, rescaled
from regard.models.decoder import DecoderModule
from regard.parts.position.rope_scaling import NTK, DynamicNTK, LinearScaling, Scaling, Yarn

TIMES = (1, 2, 4, 8)  # the training length
SCALINGS = ("RoPE, PI", "RoPE, NTK", "RoPE, YaRN", "RoPE, dynamic")


def run(bench: Bench) -> Findings:
    steps, rows, length = bench.training(300, 2), bench.setting(16, 2), bench.setting(64, 32)
    train, held_out = encode_stories(bench.setting(3000, 40), bench.setting(200, 20))
    losses = {}
    for scheme in SCHEMES:
        torch.manual_seed(bench.seed)
        model = decoder_with(scheme, VOCAB, 3, length, TIMES[-1] * length)
        fit(bench, scheme, model, lambda rng: draw_rows(rng, train, rows, length), steps, 4e-3)
        losses[scheme] = losses_by_length(bench, model, held_out, length)
        for name in SCALINGS if scheme == "RoPE" else ():
            losses[name] = losses_by_length(bench, model, held_out, length, name)
    guess = guess_by_frequency(train, held_out)
    lost = {name: {n: (points[n] - points[1]) / (guess - points[1]) for n in TIMES} for name, points in losses.items()}
    table = [
        {"positions": name} | {f"nats at {n}L": points[n] for n in TIMES} | {"share lost at 8L": lost[name][8]}
        for name, points in losses.items()
    ] + [{"positions": "guessing"} | {f"nats at {n}L": guess for n in TIMES} | {"share lost at 8L": 1.0}]
    plots = [
        Plot("context in tokens", "nats per token", {
            name: [(n * length, losses[name][n]) for n in TIMES] for name in names
        }, title, "x")
        for title, names in (("position schemes", SCHEMES), ("RoPE, scaled after training", ("RoPE", *SCALINGS)))
    ]  # fmt: skip
    remark = (
        f"Guessing by frequency: {guess:.2f} nats. Every model took {steps:,} steps of {rows * length:,} tokens, and "
        "a scaling changes nothing at L, where its factor is 1 (but dynamic NTK's, which grows from L on)."
    )
    return Findings(table, predictions(losses, lost), plots, remark)


def predictions(losses: dict[str, dict[int, float]], lost: dict[str, dict[int, float]]) -> list[Check]:
    at_8 = {name: shares[8] for name, shares in lost.items()}
    best = min(SCALINGS, key=at_8.__getitem__)
    worst = ("sinusoidal", "learned")

    def shown(*names: str) -> str:
        return ", ".join(f"{name} {at_8[name]:.2f}" for name in names)

    return [
        *(Check(f"{name} collapses: it loses more than half of what it learned at 2L, 4L and 8L",
                ", ".join(f"{lost[name][n]:.2f}" for n in TIMES[1:]), min(lost[name][n] for n in TIMES[1:]) > 0.5)
          for name in worst),
        Check("at L learned positions have a loss no higher than sinusoids",
              f"{losses['learned'][1]:.3f} and {losses['sinusoidal'][1]:.3f}",
              losses["learned"][1] <= losses["sinusoidal"][1]),
        Check("plain RoPE fails: it loses more than a tenth at 8L", shown("RoPE"), at_8["RoPE"] > 0.1),
        *(Check(f"{name} loses less than half as much as plain RoPE at 8L", shown(name, "RoPE"),
                at_8[name] < at_8["RoPE"] / 2) for name in SCALINGS),
        Check("the best scaling loses less than a tenth at 8L", shown(best), at_8[best] < 0.1),
        Check("ALiBi loses less than a twentieth at 8L, and less than every other scheme",
              shown("ALiBi", *(name for name in SCHEMES if name != "ALiBi")),
              at_8["ALiBi"] < 0.05 and min(at_8, key=at_8.__getitem__) == "ALiBi"),
        Check("T5, whose last bucket starts at L, loses less than a tenth at 8L", shown("T5"), at_8["T5"] < 0.1),
        Check("without positions a small model is fair: it loses less than half at 8L", shown("none"),
              at_8["none"] < 0.5),
        Check("the order at 8L: sinusoidal and learned lose most, then plain RoPE, then the best scaling and ALiBi",
              shown(*worst, "RoPE", best, "ALiBi"),
              min(at_8[name] for name in worst) > at_8["RoPE"] > max(at_8[best], at_8["ALiBi"])),
    ]  # fmt: skip


def scaling_of(name: str, factor: int, length: int) -> Scaling:
    return {
        "RoPE, PI": LinearScaling(float(factor)),
        "RoPE, NTK": NTK(float(factor)),
        "RoPE, YaRN": Yarn(float(factor), length),
        "RoPE, dynamic": DynamicNTK(2.0, length),
    }[name]


@torch.no_grad()
def losses_by_length(
    bench: Bench, model: DecoderModule, ids: Tensor, length: int, scaled: str = ""
) -> dict[int, float]:
    """The loss of the last length/2 tokens of the same rows, by how many times `length` the context is."""
    batch = draw_rows(generator(0), ids, bench.setting(64, 2), TIMES[-1] * length)
    targets, found = batch.targets[:, -length // 2 :, None], {}
    for n in TIMES:
        used = rescaled(model, scaling_of(scaled, n, length)) if scaled else model
        logits = used(batch.tokens[:, -n * length :])[:, -length // 2 :]
        found[n] = -logits.log_softmax(-1).gather(-1, targets).mean().item()
    return found


def guess_by_frequency(train: Tensor, held_out: Tensor) -> float:
    """The loss of predicting each token by its frequency in training, plus one."""
    counts = torch.bincount(train, minlength=VOCAB).float() + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()
