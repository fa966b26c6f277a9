"""Attention maps show where a model attends, not why it predicts: other maps give the same prediction (Jain, Wallace).

SmolLM2 reads stories of the small world; the prediction is the distribution of the last token's successor. First, the
rows of a head are replaced by the same weights in random order, one head at a time and all heads of a layer at once:
how much does the map change, and how much the prediction (total variation)? Second, tokens are replaced, one at a time:
is the effect on the prediction larger for tokens to which the last token attends more in the last layer?
"""

# ledger: lens.notexplain

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import generator
from regard.labs.trained_model import read_stories
from regard.lens import attention_heads, attention_maps, names, patch
from regard.models.decoder import DecoderModule

MUCH, LITTLE = 0.5, 0.05  # total variation


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, ids = read_stories(bench, rows=bench.setting(2, 1), length=bench.setting(48, 12))
    rng, expected = generator(bench.seed), predict(model, ids)
    patterns = names(model, "*.body.pattern")
    heads = [(layer, head) for layer, count in enumerate(attention_heads(model)) for head in range(count)]
    chosen = [heads[i] for i in torch.randperm(len(heads), generator=rng)[: bench.setting(60, 3)].tolist()]
    single = [shuffled(model, ids, expected, {patterns[layer]: [head]}, rng)
              for layer, head in bench.each("heads", chosen)]  # fmt: skip
    layers = [shuffled(model, ids, expected, {name: None}, rng) for name in bench.each("layers", patterns)]
    of_heads, of_layers = ([change for map_change, change in found if map_change > MUCH] for found in (single, layers))
    quiet_heads, quiet_layers = (share(found, LITTLE) for found in (of_heads, of_layers))
    tokens = [token_effects(model, ids[i : i + 1], expected[i], rng) for i in range(len(ids))]
    weights, changes = (torch.cat(found) for found in zip(*tokens, strict=True))
    low = weights < weights.median()
    strongest = max(zip(weights.tolist(), changes.tolist(), strict=True))[1]
    correlation = rank_correlation(weights, changes)
    unattended = float(changes[low].max()) if low.any() else 0.0
    checks = [
        Check("one head: of the maps that change by more than half, most leave the prediction within 0.05",
              f"{quiet_heads:.2f} of {len(of_heads)}", quiet_heads > 0.5),
        Check("all heads of a layer: some such change leaves the prediction within 0.05",
              f"{quiet_layers:.2f} of {len(of_layers)}", quiet_layers > 0),
        Check("all heads of a layer: some such change moves the prediction by more than 0.3",
              f"largest {max(of_layers, default=0.0):.2f}", max(of_layers, default=0.0) > 0.3),
        Check("a token with less than the median weight in the last layer changes the prediction by more than 0.1",
              f"{unattended:.2f}", unattended > 0.1),
        Check("the order of the weights in the last layer is not the order of the effects: rank correlation below 0.7",
              f"{correlation:.2f}", correlation < 0.7),
    ]  # fmt: skip
    same = float(strongest < LITTLE)
    table = [
        {"replaced": "one head", "maps changed": len(of_heads), "same prediction": quiet_heads},
        {"replaced": "all heads of a layer", "maps changed": len(of_layers), "same prediction": quiet_layers},
        {"replaced": "the token with the largest weight", "maps changed": 1, "same prediction": same},
    ]
    by_layer = [(i, change) for i, (_, change) in enumerate(layers)]
    by_weight = [(i, float(changes[token])) for i, token in enumerate(weights.argsort().tolist())]
    effect = "change of the prediction"
    plots = [
        Plot("layer", effect, {"all heads of the layer": by_layer}, "shuffled maps"),
        Plot("rank of the token's weight in the last layer", effect, {"tokens": by_weight}, "replaced tokens"),
    ]
    remark = "Single heads of a large model matter little each; the claim is about maps, not about the model's heads."
    return Findings(table, checks, plots, remark)


def predict(model: DecoderModule, ids: Tensor) -> Tensor:
    """(B, V): the distribution of the next token"""
    return model(ids)[:, -1].float().softmax(-1)


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1) / 2


def shuffled(
    model: DecoderModule, ids: Tensor, expected: Tensor, heads: dict[str, list[int] | None], rng: torch.Generator
) -> tuple[float, float]:
    """The change of the last query's map, and of the prediction, with the weights of these heads in random order."""
    changes: list[Tensor] = []

    def edit(indices: list[int] | None):
        def shuffle(weights: Tensor) -> Tensor:
            new = weights.clone()
            for head in range(weights.shape[1]) if indices is None else indices:
                for query in range(1, weights.shape[2]):
                    order = torch.randperm(query + 1, generator=rng)
                    new[:, head, query, : query + 1] = weights[:, head, query, order]
            selected = slice(None) if indices is None else indices
            changes.append(total_variation(new[:, selected, -1], weights[:, selected, -1]).mean())
            return new

        return shuffle

    with patch(model, {name: edit(indices) for name, indices in heads.items()}):
        found = predict(model, ids)
    return float(torch.stack(changes).mean()), float(total_variation(found, expected).mean())


def token_effects(model: DecoderModule, ids: Tensor, expected: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Per token, without the first and the last: its weight in the last layer, and the change if it is replaced."""
    (weights,) = attention_maps(model, ids, layer=-1)
    assert weights is not None
    places = torch.arange(1, ids.shape[1] - 1)
    replaced = ids.repeat(len(places), 1)
    others = ids[0, torch.randint(ids.shape[1], (len(places),), generator=rng)]
    replaced[torch.arange(len(places)), places] = torch.where(others == ids[0, places], ids[0, 0], others)
    found = torch.cat([predict(model, part) for part in replaced.split(16)])
    return weights[0, :, -1, 1:-1].mean(0), total_variation(found, expected)


def share(values: list[float], below: float) -> float:
    return sum(value < below for value in values) / max(1, len(values))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's"""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
