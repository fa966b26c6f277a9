"""Cross-attention weights line up the words of a translation with their sources, although the order is another.

An encoder-decoder of words learns to translate sentences of the small world into its second language, whose order is
reversed: "Anna gave the cup to Beth" becomes "Beth-to cup-object gave Anna". A noun has one source, the English noun of
the same stem. For each noun of held-out translations: is the largest weight of the decoder's cross-attention on its
source, for the mean of the heads of a layer, and for each head? The layer and the head are chosen on half of the
sentences and tested on the other half. For comparison: the best diagonal, from the first word to the last and from the
last to the first, and a model that has not been trained.

Bahdanau et al. 2014; Vaswani et al. 2017.
"""

# ledger: cross.align

from itertools import islice

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.world import stories
from regard.data.world.second_language import NOUN_STEMS, translate_sentence
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.lens import named_attention_maps
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat
from regard.objectives.base import layout_of, padded_layout
from regard.objectives.translation import translation, translation_batch
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope

WIDTH, HEADS, LAYERS, LEVEL = 64, 4, 2, 2
START, END, FIRST = 0, 1, 2  # ids; FIRST is the first word's
SentencePair = tuple[list[str], list[str]]


def run(bench: Bench) -> Findings:
    train, held_out = (
        read_pairs(split, bench.setting(count, 10)) for split, count in (("train", 600), ("held-out", 60))
    )
    words = sorted({word for pair in train for side in pair for word in side})
    ids = {word: FIRST + i for i, word in enumerate(words)}
    held_out = [pair for pair in held_out if all(word in ids for side in pair for word in side)][
        : bench.setting(300, 8)
    ]

    def batch_of(pairs: list[SentencePair]) -> Batch:
        sources, targets = ([[ids[word] for word in side] for side in sides] for sides in zip(*pairs, strict=True))
        return translation_batch(sources, targets, START, END)

    def draw(rng: torch.Generator) -> Batch:
        return batch_of([train[i] for i in torch.randint(len(train), (32,), generator=rng).tolist()])

    model = build(bench.seed, FIRST + len(words))
    links = links_of(held_out)
    untrained = chosen_and_tested(correct_heads(model, batch_of(held_out), links))
    fit(bench, "translation", model, draw, bench.training(500, 2), objective=translation)
    share = accuracy_of(model, batch_of(held_out))
    right = correct_heads(model, batch_of(held_out), links)
    found = chosen_and_tested(right)
    diagonal = best_diagonal(held_out, links)
    table = [
        {"of": "best mean of a layer's heads", "trained": found["layer"], "untrained": untrained["layer"]},
        {"of": "best head", "trained": found["head"], "untrained": untrained["head"]},
        {"of": "best diagonal", "trained": diagonal, "untrained": diagonal},
    ]
    checks = [
        Check("the model translates: more than 0.9 of the words of held-out sentences are right", f"{share:.3f}",
              share > 0.9),
        Check("the largest mean weight of a layer's heads is on the source of a noun for more than 0.8 of them",
              f"{found['layer']:.2f}", found["layer"] > 0.8),
        Check("that of the best head for more than 0.9", f"{found['head']:.2f}", found["head"] > 0.9),
        Check("the best head is right more often than the best diagonal, by 0.2 or more", f"{diagonal:.2f}",
              found["head"] >= diagonal + 0.2),
        Check("and than the best head before training, by 0.2 or more", f"{untrained['head']:.2f}",
              found["head"] >= untrained["head"] + 0.2),
    ]  # fmt: skip
    by_head = right.float().mean(0)
    lines = {f"layer {layer}": [(h, float(by_head[layer, h])) for h in range(HEADS + 1)] for layer in range(LAYERS)}
    groups = (*(f"head {h}" for h in range(HEADS)), "mean")
    plots = [Plot("", "nouns with the largest weight on their source", lines, "cross-attention", groups=groups)]
    return Findings(table, checks, plots, f"{len(links)} nouns of {len(held_out)} held-out sentences.")


def build(seed: int, vocab: int) -> nn.Module:
    torch.manual_seed(seed)
    own, cross = Sublayer(Attention(HEADS, position=Rope())), Sublayer(CrossAttention(HEADS))
    feedforward = Sublayer(SwiGLU(2 * WIDTH))
    source = Encoder(Tokens(vocab), WIDTH, (Repeat((Block((own, feedforward)),), LAYERS),), norm=RMSNorm())
    target = Decoder(vocab, WIDTH, (Repeat((Block((own, cross, feedforward)),), LAYERS),))
    return EncoderDecoder(source, target).build()


def read_pairs(split: str, count: int) -> list[SentencePair]:
    """Sentences of this many stories and their translations, as words; each pair once."""
    sentences = {sentence: None for story in islice(stories(LEVEL, split), count) for sentence in story.sentences}
    return [(split_words(sentence), split_words(translate_sentence(sentence))) for sentence in sentences]


def split_words(sentence: str) -> list[str]:
    return sentence.replace(".", "").replace(",", "").split()


def links_of(pairs: list[SentencePair]) -> list[tuple[int, int, int]]:
    """(pair, word of the target, its word of the source) for every noun that has one source."""
    links = []
    for row, (source, target) in enumerate(pairs):
        for i, word in enumerate(target):
            places = [j for j, english in enumerate(source) if word.startswith(NOUN_STEMS.get(english, "-"))]
            if len(places) == 1:
                links.append((row, i, places[0]))
    return links


@torch.no_grad()
def correct_heads(model: nn.Module, batch: Batch, links: list[tuple[int, int, int]]) -> Tensor:
    """(links, layers, heads + 1) whether the largest weight is on the source; the last is the mean of the heads."""
    source_layout = padded_layout(batch.source_valid)
    maps = named_attention_maps(model, batch.source, batch.tokens, source_layout, layout_of(batch))
    cross = torch.stack([weights for name, weights in maps.items() if name.startswith("target") and ".1.body" in name])
    weights = torch.cat([cross, cross.mean(2, keepdim=True)], 2)  # (layers, B, heads + 1, L, S)
    row, word, source = (torch.tensor(part) for part in zip(*links, strict=True))
    return weights[:, row, :, word].argmax(-1) == source[:, None, None]  # the row of a target is that which predicts it


def chosen_and_tested(right: Tensor) -> dict[str, float]:
    """The accuracy of the layer and of the head that are best on the first half, on the second half."""
    half = len(right) // 2
    layers, heads = right[:, :, -1].float(), right[:, :, :-1].flatten(1).float()
    return {name: float(part[half:, part[:half].mean(0).argmax()].mean())
            for name, part in (("layer", layers), ("head", heads))}  # fmt: skip


def best_diagonal(pairs: list[SentencePair], links: list[tuple[int, int, int]]) -> float:
    """The share of the sources that a line through the sentence meets, forwards or backwards, the better one."""
    hits = {False: 0, True: 0}
    for row, word, place in links:
        source, target = (len(side) for side in pairs[row])
        along = round(word / max(1, target - 1) * (source - 1))
        hits[False] += along == place
        hits[True] += source - 1 - along == place
    return max(hits.values()) / len(links)


@torch.no_grad()
def accuracy_of(model: nn.Module, batch: Batch) -> float:
    """The share of words that are right, given the earlier ones."""
    _, count, metrics = translation(model, batch)
    return (metrics["accuracy"] / count).item()
