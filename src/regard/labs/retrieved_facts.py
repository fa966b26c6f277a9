"""With retrieved facts a model answers what changed after its training and invents less; the encoder sets the quality.

A table gives each of 512 names one of 64 values. One model is trained on the table, so that its weights hold the facts.
Another, the reader, is trained to answer from four facts in its prompt, with values drawn at random, and to answer
"unknown" if none of them is about the name; it is never trained on the table. Then the values of half of the names are
changed, in the table and in the index that is searched, and neither model is trained again.

The four facts are those whose embeddings are nearest to that of the question. An embedding is the mean of the random
vectors of the tokens, in 2 to 64 dimensions: the fewer, the more names are confused. Controls: four random facts, and a
search that always finds the right one.

Lewis et al. 2020. What tools add is measured by the recipe `tools`.
"""

# ledger: rag.grounds

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.data.batch import Batch
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit, generator
from regard.labs.small_models import small_decoder
from regard.labs.tasks import FIRST, QUERY, whole_rows

VALUES, FACTS = 64, 4
UNKNOWN = FIRST  # the ids of values follow, then those of names
DIMENSIONS = (2, 4, 8, 16, 32, 64)


def run(bench: Bench) -> Findings:
    names, rows = bench.setting(512, 16), bench.setting(64, 4)
    rng = generator(1000 + bench.seed)
    table = torch.randint(VALUES, (names,), generator=rng)
    changed = torch.rand(names, generator=rng).argsort() < names // 2
    newer = torch.where(changed, (table + torch.randint(1, VALUES, (names,), generator=rng)) % VALUES, table)

    def from_table(rng: torch.Generator) -> Batch:
        return questions(torch.randint(names, (4 * rows,), generator=rng), table)

    def from_facts(rng: torch.Generator) -> Batch:
        return random_facts(rng, names, rows)

    torch.manual_seed(bench.seed)
    vocabulary = UNKNOWN + 1 + VALUES + names
    memory = small_decoder("attention", vocabulary)
    fit(bench, "facts in the weights", memory, from_table, bench.training(400, 2), 1e-2, stop_below=0.01)
    reader = small_decoder("attention", vocabulary, convolution=True)
    fit(bench, "reader", reader, from_facts, bench.training(600, 2), 1e-2, stop_below=0.01)

    asked = torch.arange(names)
    recalled = answers(memory, questions(asked, table))
    found = {"perfect search": exact_search(rng, names), "random facts": random_search(rng, names)}
    found |= {f"{dim} dimensions": nearest(rng, newer, dim) for dim in DIMENSIONS}
    read = {name: answers(reader, with_facts(asked, facts, newer)) for name, facts in found.items()}
    recall = {name: (facts == asked[:, None]).any(1).float().mean().item() for name, facts in found.items()}

    def share(given: Tensor, of: Tensor) -> float:
        return (given == newer)[of].float().mean().item()

    def invented(given: Tensor, of: Tensor) -> float:
        """The share of answers that are neither right nor "unknown"."""
        return ((given != newer) & (given >= 0))[of].float().mean().item()

    accuracy = {name: share(given, changed | ~changed) for name, given in read.items()}
    best, worst = f"{DIMENSIONS[-1]} dimensions", f"{DIMENSIONS[0]} dimensions"
    gap = max(abs(accuracy[name] - recall[name]) for name in found)
    checks = [
        Check("the weights answer at least 95 % of the names whose values did not change",
              f"{share(recalled, ~changed):.2f}", share(recalled, ~changed) >= 0.95),
        Check("and at most 10 % of those that changed", f"{share(recalled, changed):.2f}",
              share(recalled, changed) <= 0.1),
        Check("the reader answers at least 90 % of those that changed, with the embeddings of most dimensions",
              f"{share(read[best], changed):.2f}", share(read[best], changed) >= 0.9),
        Check("and at most 10 % with random facts", f"{accuracy['random facts']:.2f}", accuracy["random facts"] <= 0.1),
        Check("for changed names the weights invent at least 80 % of the answers, the reader at most 10 %, with random "
              "facts too", f"{invented(recalled, changed):.2f}, {invented(read[best], changed):.2f} and "
              f"{invented(read['random facts'], changed):.2f}", invented(recalled, changed) >= 0.8
              and max(invented(read[name], changed) for name in (best, "random facts")) <= 0.1),
        Check("the reader's accuracy is the share of questions whose fact was found, within 0.1, with every search",
              f"at most {gap:.2f} apart", gap <= 0.1),
        Check("the encoder decides: with the fewest dimensions at most half as many answers are right as with the most",
              f"{accuracy[worst]:.2f} and {accuracy[best]:.2f}", accuracy[worst] <= accuracy[best] / 2),
    ]  # fmt: skip
    systems = {"the weights": recalled} | {f"reader, {name}": given for name, given in read.items()}
    rows_of = [
        {"answers from": name, "fact found": recall.get(name.removeprefix("reader, "), "")}
        | {"right, unchanged": share(given, ~changed), "right, changed": share(given, changed)}
        | {"invented, changed": invented(given, changed)}
        for name, given in systems.items()
    ]
    shown = {"weights": recalled, "reader": read[best], "reader,\nrandom facts": read["random facts"]}
    bars = {
        "right, unchanged": [(i, share(given, ~changed)) for i, given in enumerate(shown.values())],
        "right, changed": [(i, share(given, changed)) for i, given in enumerate(shown.values())],
        "invented, changed": [(i, invented(given, changed)) for i, given in enumerate(shown.values())],
    }
    lines = {what: [(dim, of[f"{dim} dimensions"]) for dim in DIMENSIONS]
             for what, of in (("right", accuracy), ("fact found", recall))}  # fmt: skip
    plots = [
        Plot("", "share of the answers", bars, "after half of the values changed", groups=tuple(shown)),
        Plot("dimensions of the embeddings", "share of the questions", lines, "the reader and its search", "x"),
    ]
    return Findings(rows_of, checks, plots, f"{names} names, {VALUES} values, {FACTS} facts in a prompt.")


def value_ids(values: Tensor) -> Tensor:
    return UNKNOWN + 1 + values


def name_ids(names: Tensor) -> Tensor:
    return UNKNOWN + 1 + VALUES + names


def questions(names: Tensor, table: Tensor) -> Batch:
    """One question per name (B,); its target is the value in the table."""
    return as_batch(torch.empty(len(names), 0, dtype=torch.int64), names[:, None], value_ids(table[names])[:, None])


def with_facts(names: Tensor, facts: Tensor, table: Tensor) -> Batch:
    """The facts (B, FACTS), as name and value, and a question; the target is the value if its name is among them."""
    known = (facts == names[:, None]).any(1)
    targets = torch.where(known, value_ids(table[names]), UNKNOWN)
    return as_batch(pairs(facts, value_ids(table[facts])), names[:, None], targets[:, None])


def random_facts(rng: torch.Generator, names: int, rows: int) -> Batch:
    """Facts with random values about different names, and questions about all of them and about one other name."""
    drawn = torch.rand(rows, names, generator=rng).argsort(1)[:, : FACTS + 1]
    values = value_ids(torch.randint(VALUES, (rows, FACTS), generator=rng))
    targets = torch.cat([values, torch.full((rows, 1), UNKNOWN)], 1)
    order = torch.rand(rows, FACTS + 1, generator=rng).argsort(1)
    return as_batch(pairs(drawn[:, :-1], values), drawn.gather(1, order), targets.gather(1, order))


def pairs(facts: Tensor, values: Tensor) -> Tensor:
    return torch.stack([name_ids(facts), values], -1).flatten(1)  # (B, 2 · FACTS)


def as_batch(context: Tensor, names: Tensor, targets: Tensor) -> Batch:
    """The context, then QUERY and a name for each of the names (B, Q), whose answers are the targets (B, Q)."""
    asked = torch.stack([torch.full_like(names, QUERY), name_ids(names)], -1).flatten(1)
    tokens = torch.cat([context, asked], 1)
    answers = torch.cat([context, torch.stack([name_ids(names), targets], -1).flatten(1)], 1)
    weights = torch.zeros_like(tokens)
    weights[:, context.shape[1] + 1 :: 2] = 1
    return whole_rows(tokens, answers, weights)


@torch.no_grad()
def answers(model: nn.Module, batch: Batch) -> Tensor:
    """(B,) The values with the largest logits; -1 for "unknown"."""
    logits = model(batch.tokens)[:, -1]
    return logits[:, UNKNOWN : UNKNOWN + 1 + VALUES].argmax(-1) - 1


def nearest(rng: torch.Generator, table: Tensor, dim: int) -> Tensor:
    """(names, FACTS) The facts whose embeddings have the largest cosine to that of each name's question."""
    name_vectors, value_vectors = (torch.randn(n, dim, generator=rng) for n in (len(table), VALUES))
    documents = normalize(name_vectors + value_vectors[table], dim=-1)
    return (normalize(name_vectors, dim=-1) @ documents.T).topk(FACTS).indices


def random_search(rng: torch.Generator, names: int) -> Tensor:
    return torch.rand(names, names, generator=rng).argsort(1)[:, :FACTS]


def exact_search(rng: torch.Generator, names: int) -> Tensor:
    """The right fact at a random place among others."""
    others = (torch.rand(names, names, generator=rng) - torch.eye(names)).argsort(1)[:, -FACTS:]
    place = torch.randint(FACTS, (names, 1), generator=rng)
    return others.scatter(1, place, torch.arange(names)[:, None])
