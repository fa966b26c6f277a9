"""Words that are used alike end up close to each other in the embedding table.

A decoder is trained on stories of the small world, with one token per word. The words of five categories (people,
places, things, containers, feelings) occur in the same places of a sentence as the other words of their category. The
purity of a word is the share of its five nearest neighbours, by the cosine of their rows in the table and among the
words of all categories, that are of the same category. It is measured before and after training.
"""

# ledger: emb.similar

import re
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.world import stories
from regard.data.world.english import CONTAINERS, FEELINGS, PEOPLE, PLACES, THINGS
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.mamba_language import draw_rows
from regard.labs.small_models import small_decoder

CATEGORIES = {
    "people": PEOPLE, "places": PLACES, "things": THINGS, "containers": CONTAINERS, "feelings": FEELINGS
}  # fmt: skip
WIDTH, NEIGHBOURS = 64, 5


def run(bench: Bench) -> Findings:
    texts = [story.text for story in islice(stories(3, "train", bench.seed << 20), bench.setting(2000, 400))]
    words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    vocabulary = {word: id for id, word in enumerate(sorted({word for text in words for word in text}))}
    ids = torch.tensor([vocabulary[word] for text in words for word in text])
    torch.manual_seed(bench.seed)
    model = small_decoder("attention", len(vocabulary), WIDTH)
    known = {name: [vocabulary[word] for word in group if word in vocabulary] for name, group in CATEGORIES.items()}
    before = purities(model.embedding.weight, known)
    fit(bench, "decoder", model, lambda rng: draw_rows(rng, ids, 16, 64), bench.training(400, 2))
    after = purities(model.embedding.weight, known)
    sizes = [len(group) for group in known.values()]
    chance = sum(n * (n - 1) for n in sizes) / (sum(sizes) * (sum(sizes) - 1))
    table = [
        {"category": name, "words": len(group), "before": before[name], "after": after[name]}
        for name, group in known.items()
    ]
    means = [sum(found[name] * len(group) for name, group in known.items()) / sum(sizes) for found in (before, after)]
    checks = [
        Check("before training the purity is that of chance, within 0.1",
              f"{means[0]:.2f}, chance {chance:.2f}", abs(means[0] - chance) < 0.1),
        Check("after training the mean purity is above 0.8", f"{means[1]:.2f}", means[1] > 0.8),
        *(Check(f"{name}: the purity grows", f"{before[name]:.2f} -> {after[name]:.2f}", after[name] > before[name])
          for name in CATEGORIES),
    ]  # fmt: skip
    lines = {label: list(enumerate(found.values())) for label, found in (("before", before), ("after", after))}
    plots = [Plot("", "share of neighbours of the same category", lines, groups=tuple(CATEGORIES))]
    remark = "The decoder's output layer has the same table, so that words that are predicted alike become similar too."
    return Findings(table, checks, plots, remark)


def purities(weight: Tensor, known: dict[str, list[int]]) -> dict[str, float]:
    """The mean purity of the words of each category."""
    category = torch.tensor([i for i, group in enumerate(known.values()) for _ in group])
    rows = F.normalize(weight.detach()[[id for group in known.values() for id in group]], dim=-1)
    nearest = (rows @ rows.T).fill_diagonal_(-torch.inf).topk(NEIGHBOURS).indices  # (words, neighbours)
    pure = (category[nearest] == category[:, None]).float().mean(1)
    return {name: pure[category == i].mean().item() for i, name in enumerate(known)}
