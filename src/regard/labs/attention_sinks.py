"""Much of every query's attention is on the first token, whose values add little, along with massive activations.

SmolLM2 reads stories of the small world. Per layer: the mean weight of the first token, over all heads and the queries
of the later half, beside that of uniform attention; the largest activation of the residual stream relative to the
median; and how long the first token's values are, relative to those of other tokens. Then the massive activations are
replaced by the mean of their channels over the other tokens, after the layer in which they are largest.
"""

# ledger: lens.sink lens.massive

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.trained_model import read_stories
from regard.lens import attention_maps, massive_activations, patch, record
from regard.models.decoder import DecoderModule

CHANNELS = 5  # at most so many are massive


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, ids = read_stories(bench, rows=bench.setting(6, 2), length=bench.setting(64, 16))
    weights, lengths = first_token_weights(model, ids), value_lengths(model, ids)
    uniform = float((1.0 / torch.arange(ids.shape[1] // 2 + 1, ids.shape[1] + 1)).mean())
    sizes = massive_activations(model, ids)
    ratios = list(sizes.ratios.values())[1:]  # after each block
    largest = max(range(len(ratios)), key=ratios.__getitem__)
    found = {(one.position, one.channel) for one in sizes.found}
    edited = first_token_weights(model, ids, {f"stack.blocks.{largest}": without_massive(sorted(found))})
    later = slice(largest + 1, None)
    before, after = mean(weights[later]), mean(edited[later])
    middle = len(weights) // 2
    checks = [
        Check("in the later half of the layers the mean weight of the first token is ten times the uniform one or more",
              f"{mean(weights[middle:]):.2f}, uniform {uniform:.3f}", mean(weights[middle:]) >= 10 * uniform),
        Check("in the first two layers it is less than a quarter of that", f"{mean(weights[:2]):.3f}",
              mean(weights[:2]) < mean(weights[middle:]) / 4),
        Check("its values are short there: less than half as long as the median of other tokens",
              f"{mean(lengths[middle:]):.2f}", mean(lengths[middle:]) < 0.5),
        Check(f"activations above 100 and 1,000 times the median exist, in at most {CHANNELS} channels",
              f"largest ratio {max(ratios):,.0f}; channels {sorted({c for _, c in found})}",
              0 < len({c for _, c in found}) <= CHANNELS),
        Check("all of them are at the first token", f"positions {sorted({p for p, _ in found})}",
              {p for p, _ in found} == {0}),
        Check("without them the mean weight of the first token in later layers falls to less than half",
              f"{before:.2f} -> {after:.2f}", bool(found) and after < before / 2),
    ]  # fmt: skip
    table = [
        {"layer": i, "first token": weight, "without massive activations": other, "largest / median": ratio}
        for i, (weight, other, ratio) in enumerate(zip(weights, edited, ratios, strict=True))
    ]
    lines = {
        "as trained": list(enumerate(weights)),
        "without massive activations": list(enumerate(edited)),
        "uniform": [(0, uniform), (len(weights) - 1, uniform)],
    }
    plots = [
        Plot("layer", "mean weight of the first token", lines, "attention"),
        Plot("layer", "largest activation / median", {"residual stream": list(enumerate(ratios))}, "stream", "y"),
    ]
    remark = "Seeds draw other stories; the model is the same."
    return Findings(table, checks, plots, remark)


def first_token_weights(model: DecoderModule, ids: Tensor, edits: dict | None = None) -> list[float]:
    """Per layer, over heads, rows and the later half of the queries."""
    with patch(model, edits or {}):
        maps = attention_maps(model, ids)
    return [float(weights[:, :, ids.shape[1] // 2 :, 0].mean()) for weights in maps if weights is not None]


def value_lengths(model: DecoderModule, ids: Tensor) -> list[float]:
    """Per layer: the length of the first token's values over the median length of other tokens, mean over heads."""
    with record(model, "*.body.v") as recorded:
        model(ids)
    norms = [v.norm(dim=-1) for v in recorded.values()]  # (B, K, L)
    return [float((n[:, :, 0] / n[:, :, 1:].median(-1).values).mean()) for n in norms]


def without_massive(places: list[tuple[int, int]]):
    """Set these (position, channel) to the mean of the channel over positions without a massive activation."""

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        for position, channel in places:
            others = [i for i in range(x.shape[1]) if (i, channel) not in places]
            x[:, position, channel] = x[:, others, channel].mean(1)
        return x

    return edit


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
