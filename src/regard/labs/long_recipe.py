"""Long context needs positions, cost, memory and training data at once: a recipe without one of them misses a target.

A decoder of four layers is trained on stories of L = 64 tokens in which one token is a needle that has to be named at
the end. A recipe takes it to 8L: scaled frequencies of RoPE (YaRN); a short further training on rows of 8L; windows of
L tokens in three of the four layers; and one head of keys and values for four of queries. Each part is left out in
turn, and all of them. Targets at 8L: needles at all depths are named (above 0.9); the text is predicted as well as by
the short model at L, within 2 %; and at 64L a forward of the layers takes at most half the time, and the cache at most
an eighth of the bytes, of the decoder without any of the parts.

Peng et al. 2023 (YaRN); Jiang et al. 2023 (windows); Shazeer 2019 (one head of keys and values). The sizes are small:
what a part gives depends on the length.
"""

# ledger: long.stack

import statistics
import time

import torch
from torch import Tensor

from regard.kernels.attention.mask import Causal
from regard.kernels.attention.patterns.window import Window
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.mamba_language import encode_stories
from regard.labs.position_models import rescaled
from regard.labs.short_training import LENGTH, QUESTION, hide_needles, measure
from regard.labs.small_models import mixer_block
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.position.rope import Rope
from regard.parts.position.rope_scaling import Yarn
from regard.planning.cost import body_cache_bytes

WIDTH, HEADS, LAYERS, TIMES = 64, 4, 4, 8
PARTS = ("positions", "long data", "windows", "one k/v head")
VARIANTS = {
    "all parts": PARTS,
    **{f"without {left}": tuple(part for part in PARTS if part != left) for left in PARTS},
    "no part": (),
}
TARGETS = ("needles", "text", "time", "cache")


def run(bench: Bench) -> Findings:
    train, held_out = encode_stories(bench.setting(2000, 40), bench.setting(200, 20))
    costs = {name: costs_of(bench, parts) for name, parts in VARIANTS.items()}
    plain = costs["no part"]
    short: dict[tuple[str, ...], DecoderModule] = {}
    found: dict[str, dict[str, float]] = {}
    for name, parts in VARIANTS.items():
        shape = tuple(part for part in parts if part in PARTS[2:])
        if shape not in short:
            short[shape] = train_short(bench, shape, train)
        _, text = measure(bench, short[shape], held_out, LENGTH)
        model = lengthen(bench, name, short[shape], parts, train)
        needles, long_text = measure(bench, model, held_out, TIMES * LENGTH)
        seconds, size = (value / base for value, base in zip(costs[name], plain, strict=True))
        found[name] = {"needles": min(needles), "text": long_text / text, "time": seconds, "cache": size}
    met = {name: [key for key in TARGETS if meets(key, values[key])] for name, values in found.items()}

    def described(name: str) -> str:
        return ", ".join(f"{key} {found[name][key]:.2f}" for key in TARGETS)

    whole = found["all parts"]
    checks = [
        Check("with all parts every target is met", described("all parts"), len(met["all parts"]) == len(TARGETS))
    ]
    for left, keys in zip(PARTS, (("needles", "text"), ("needles", "text"), ("time",), ("cache",)), strict=True):
        name = f"without {left}"
        checks.append(
            Check(
                f"without {left} a target is missed that is met with all parts: {' or '.join(keys)}",
                described(name),
                any(key in met["all parts"] and key not in met[name] for key in keys),
            )
        )
    checks.append(Check("with no part all targets are missed", described("no part"), not met["no part"]))
    checks.append(
        Check(
            "windows and one head of keys and values lower the share of needles by less than 0.05",
            f"{whole['needles']:.2f}, {found['without windows']['needles']:.2f} without windows and "
            f"{found['without one k/v head']['needles']:.2f} with four heads",
            whole["needles"] > max(found[f"without {part}"]["needles"] for part in PARTS[2:]) - 0.05,
        )
    )
    table = [{"recipe": name, "targets met": len(met[name])} | values for name, values in found.items()]
    groups = tuple(name.replace("without ", "without\n").replace("k/v ", "k/v\n") for name in VARIANTS)
    quality = {
        "needles, at the worst depth": [(i, values["needles"]) for i, values in enumerate(found.values())],
        "loss of text, to that at L": [(i, values["text"]) for i, values in enumerate(found.values())],
    }
    cost = {key: [(i, values[key]) for i, values in enumerate(found.values())] for key in ("time", "cache")}
    plots = [
        Plot("", "", quality, f"rows of {TIMES * LENGTH} tokens", groups=groups),
        Plot("", "to no part", cost, f"{64 * LENGTH:,} tokens", groups=groups),
    ]
    return Findings(table, checks, plots, "Needles are easy, so that some are named without any further training.")


def meets(target: str, value: float) -> bool:
    return {"needles": value > 0.9, "text": value <= 1.02, "time": value <= 0.5, "cache": value <= 0.125}[target]


def mixers(parts: tuple[str, ...]) -> list[Attention]:
    kv_heads = 1 if "one k/v head" in parts else HEADS
    local = Window(LENGTH) if "windows" in parts else Causal()
    masks = [Causal() if i == 2 else local for i in range(LAYERS)]
    return [Attention(HEADS, kv_heads, mask=mask, position=Rope()) for mask in masks]


def train_short(bench: Bench, parts: tuple[str, ...], ids: Tensor) -> DecoderModule:
    torch.manual_seed(bench.seed)
    layers = tuple(Repeat((mixer_block(mixer, WIDTH),)) for mixer in mixers(parts))
    model = Decoder(QUESTION + 1, WIDTH, layers).build()
    rows = bench.setting(8, 4)
    fit(
        bench,
        f"short: {', '.join(parts) or 'plain'}",
        model,
        lambda rng: hide_needles(rng, ids, rows, LENGTH, torch.rand(rows, generator=rng)),
        bench.training(400, 2),
        4e-3,
    )
    return model


def lengthen(bench: Bench, name: str, model: DecoderModule, parts: tuple[str, ...], ids: Tensor) -> DecoderModule:
    """A copy with scaled frequencies, which is trained on long rows, if these are parts of the recipe."""
    longer = rescaled(model, Yarn(float(TIMES), LENGTH) if "positions" in parts else None)
    if "long data" in parts:
        fit(
            bench,
            name,
            longer,
            lambda rng: hide_needles(rng, ids, 1, TIMES * LENGTH, torch.rand(1, generator=rng)),
            bench.training(60, 1),
            1e-3,
        )
    return longer.eval()


@torch.inference_mode()
def costs_of(bench: Bench, parts: tuple[str, ...]) -> tuple[float, int]:
    """Median seconds of a forward of the attention layers, and bytes of their cache, at 64L."""
    length = bench.setting(64, 2) * LENGTH
    x, seconds = torch.randn(1, length, WIDTH, generator=generator(bench.seed)), []
    layers = [mixer.build(WIDTH).eval() for mixer in mixers(parts)]
    for _ in range(bench.setting(4, 2)):
        start = time.process_time()
        for layer in layers:
            layer(x, TokenLayout.whole(1, length))
        seconds.append(time.process_time() - start)
    size = sum(body_cache_bytes(mixer, WIDTH, length, "float32") for mixer in mixers(parts))
    return statistics.median(seconds[1:]), size  # the first is a warm-up
