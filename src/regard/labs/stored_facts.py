"""Much of what a model knows sits in its feed-forward layers: replacing them loses facts, replacing attention fewer.

SmolLM2 completes "The capital of France is". Only facts that it completes correctly, among all capitals, are used. The
outputs of the feed-forward, or of attention, in a third of the layers are replaced by their mean over all prompts, at
the token of the country or at the last token, so that what they add there about this country is lost. For comparison:
at the last token, which has to get the capital from elsewhere, attention should matter more.

Geva et al. 2020; Meng et al. 2022, who replaced them in this way.
"""

# ledger: ffn.knowledge

from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.trained_model import EncodeText, load_trained
from regard.lens import patch
from regard.lens.hooks import Edit, record
from regard.models.decoder import DecoderModule

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Poland": "Warsaw", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad", "Syria": "Damascus",
    "Cuba": "Havana", "Kenya": "Nairobi", "Peru": "Lima", "Canada": "Ottawa", "Israel": "Jerusalem",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Ukraine": "Kyiv", "Hungary": "Budapest", "Belgium": "Brussels",
    "Afghanistan": "Kabul", "Pakistan": "Islamabad", "Argentina": "Buenos", "Chile": "Santiago", "Lebanon": "Beirut",
    "Libya": "Tripoli", "Jordan": "Amman", "Nepal": "Kathmandu", "Scotland": "Edinburgh", "England": "London",
    "Wales": "Cardiff", "Indonesia": "Jakarta", "Malaysia": "Kuala", "Taiwan": "Taipei", "Morocco": "Rabat",
    "Qatar": "Doha", "Serbia": "Belgrade", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
}  # fmt: skip
WORDINGS = ("The capital of{} is", "The capital city of{} is called", "The government of{} sits in")
BODIES = {"feed-forward": 1, "attention": 0}  # index of the sublayer
THIRDS = ("first third", "second third", "last third")


class FactPrompts(NamedTuple):
    ids: Tensor  # (B, L)
    answers: Tensor  # (B,) first tokens
    subject: Tensor  # (B, L) True at the tokens of the subject


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, encode = load_trained(bench)
    prompts, table = stored(encode, bench.seed), []
    correct = answered(model, prompts)
    known = int(correct.sum())
    if known:  # a random model may know nothing
        prompts = FactPrompts(prompts.ids[correct], prompts.answers[correct], prompts.subject[correct])
    outputs, last = outputs_of(model, prompts), torch.zeros_like(prompts.subject)
    last[:, -1] = True
    lost: dict[str, dict[str, list[float]]] = {}
    for place, tokens in (("the country", prompts.subject), ("the last token", last)):
        lost[place] = {body: [] for body in BODIES}
        for body, third in bench.each(place, [(body, third) for body in BODIES for third in range(3)]):
            edits = replaced(outputs, tokens, body, third)
            share = 1 - float(answered(model, prompts, edits).float().mean())
            lost[place][body].append(share)
            table.append({"at": place, "replaced": body, "layers": THIRDS[third], "known": known, "lost": share})
    shares = {place: {body: sum(values) / 3 for body, values in found.items()} for place, found in lost.items()}
    country, end = shares.values()
    most = max(lost["the country"]["feed-forward"])
    checks = [
        Check("at least 20 facts are known", str(known), known >= 20),
        Check("in some third, replacing the feed-forward at the country loses half of the facts or more",
              f"{most:.2f}", most >= 0.5),
        Check("at the country, mean of the thirds, it loses more facts than replacing attention, by 0.15 or more",
              f"{country['feed-forward']:.2f} and {country['attention']:.2f}",
              country["feed-forward"] >= country["attention"] + 0.15),
        Check("at the last token replacing attention loses more facts than replacing the feed-forward",
              f"{end['attention']:.2f} and {end['feed-forward']:.2f}", end["attention"] > end["feed-forward"]),
    ]  # fmt: skip
    plots = [Plot("", "share of the facts lost", {body: list(enumerate(values)) for body, values in found.items()},
                  f"replaced at {place}", groups=THIRDS) for place, found in lost.items()]  # fmt: skip
    return Findings(table, checks, plots, "One model of 135 million weights, and one kind of stored facts.")


def stored(encode: EncodeText, seed: int) -> FactPrompts:
    """A prompt for each of 40 countries whose name is one token, in one of three wordings."""
    chosen = [(f" {country}", f" {city}") for country, city in CAPITALS.items() if len(encode(f" {country}")) == 1]
    start, end = (encode(part) for part in WORDINGS[seed % 3].split("{}"))
    return as_prompts([([*start, *encode(country), *end], encode(city)[0], encode(country)[0])
                       for country, city in Random(seed).sample(chosen, 40)])  # fmt: skip


def as_prompts(rows: list[tuple[list[int], int, int]]) -> FactPrompts:
    """From ids, the answer's first token, and the subject's token."""
    ids, answers, subjects = (torch.tensor(part) for part in zip(*rows, strict=True))
    return FactPrompts(ids, answers, ids == subjects[:, None])


def answered(model: DecoderModule, prompts: FactPrompts, edits: dict[str, Edit] | None = None) -> Tensor:
    """(B,) True where the answer has the largest logit of all answers."""
    with patch(model, edits or {}):
        logits = model(prompts.ids)
    assert isinstance(logits, Tensor)
    among = prompts.answers.unique()
    return among[logits[:, -1, among].argmax(-1)] == prompts.answers


def outputs_of(model: DecoderModule, prompts: FactPrompts) -> list[dict[str, tuple[str, Tensor]]]:
    """Per layer the name and the output (B, L, D) of each body."""
    with record(model, "stack.blocks.*.body") as recorded:
        model(prompts.ids)
    layers = range(len(model.stack.blocks))
    names = [{body: f"stack.blocks.{i}.sublayers.{index}.body" for body, index in BODIES.items()} for i in layers]
    return [{body: (name, recorded[name]) for body, name in layer.items()} for layer in names]


def replaced(outputs: list[dict[str, tuple[str, Tensor]]], tokens: Tensor, body: str, third: int) -> dict[str, Edit]:
    """Edits that replace the outputs of these bodies, at these tokens (B, L), by the mean over those of all prompts."""
    chosen = outputs[third * len(outputs) // 3 : (third + 1) * len(outputs) // 3]
    means = {name: output[tokens].mean(0) for name, output in (layer[body] for layer in chosen)}
    return {name: lambda x, mean=mean: torch.where(tokens[..., None], mean, x) for name, mean in means.items()}
