"""Some heads link a verb to its subject, a noun to its determiner and a pronoun to its noun, better than fixed offsets.

Sentences are made from templates with known links, of varying distance. For each head of SmolLM2 the choice is the
earlier word with the largest weight, the first word (the sink) excluded. The best head for each link is chosen on half
of the sentences and tested on the other half, beside the best fixed offset, chosen and tested in the same way. Verbs
have another noun between them and their subject in half of the sentences. Pronouns follow a woman and a man, in either
order, so that position alone tells nothing. Clark et al. 2019 found such heads in BERT.
"""

# ledger: lens.syntax lens.coref

from random import Random

import torch
from torch import Tensor

from regard.data.world.english import HE, INDOORS, SHE, THINGS
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.trained_model import EncodeText, load_trained
from regard.lens import attention_maps
from regard.models.decoder import DecoderModule

ADJECTIVES = ("old", "small", "red", "heavy", "new", "broken", "clean", "dark")
WORKERS = ("farmer", "teacher", "doctor", "painter", "baker", "driver", "singer", "writer")
VERBS = ("finds", "sees", "takes", "brings", "likes", "sells", "paints", "moves")
ADVERBS = ("often", "never", "always", "quietly")
Sentence = tuple[list[str], int, int]  # words, the word that links, the word that it links to


def noun_to_determiner(rng: Random) -> Sentence:
    adjectives = rng.sample(ADJECTIVES, rng.randrange(3))
    determiner = rng.choice(("the", "this", "every", "that"))
    words = ["Today", rng.choice(SHE + HE), rng.choice(VERBS), determiner, *adjectives, rng.choice(THINGS)]
    return words, len(words) - 1, 3


def verb_to_subject(rng: Random) -> Sentence:
    words = ["Today", "the", *rng.sample(ADJECTIVES, rng.randrange(2)), rng.choice(WORKERS)]
    subject = len(words) - 1
    if rng.random() < 0.5:
        words += ["near", "the", rng.choice(INDOORS)]
    words += rng.sample(ADVERBS, rng.randrange(2))
    return [*words, rng.choice(VERBS)], len(words), subject


def pronoun_to_noun(rng: Random) -> Sentence:
    names = [rng.choice(SHE), rng.choice(HE)]
    rng.shuffle(names)
    chosen = rng.randrange(2)
    place = ["in", "the", rng.choice(INDOORS)] if rng.random() < 0.5 else []
    words = ["Today", names[0], "met", names[1], *place, "because"]
    return [*words, "she" if names[chosen] in SHE else "he"], len(words), 1 + 2 * chosen


LINKS = {"noun, determiner": noun_to_determiner, "verb, subject": verb_to_subject, "pronoun, noun": pronoun_to_noun}


@torch.no_grad()
def run(bench: Bench) -> Findings:
    model, encode = load_trained(bench)
    count, table, checks = bench.setting(80, 4), [], []
    bars: dict[str, list[tuple[float, float]]] = {"best head": [], "best fixed offset": []}
    for index, (link, make) in enumerate(LINKS.items()):
        rng = Random(bench.seed)
        sentences = [make(rng) for _ in range(2 * count)]
        right = torch.stack([correct_heads(model, encode, *one) for one in bench.each(link, sentences)])  # (n, heads)
        offsets = torch.tensor([[float(word - offset == target) for offset in range(1, 9)]
                                for _, word, target in sentences])  # fmt: skip
        head, head_accuracy = choose_and_test(right, count)
        offset, offset_accuracy = choose_and_test(offsets, count)
        per_layer = right.shape[1] // len(model.stack.blocks)
        bars["best head"].append((index, head_accuracy))
        bars["best fixed offset"].append((index, offset_accuracy))
        place = f"{head // per_layer}.{head % per_layer}"
        table.append({"link": link, "head": place, "accuracy": head_accuracy, "offset": str(offset + 1),
                      "accuracy of the offset": offset_accuracy})  # fmt: skip
        checks.append(
            Check(f"{link}: the best head is right more often than the best fixed offset, by 0.15 or more",
                  f"{head_accuracy:.2f} against {offset_accuracy:.2f}", head_accuracy >= offset_accuracy + 0.15)
        )  # fmt: skip
    plots = [Plot("", "accuracy on sentences not used to choose", bars, groups=tuple(LINKS))]
    remark = "One model and made-up sentences. A head that is right is not shown to be used: see maps-and-reasons."
    return Findings(table, checks, plots, remark)


def correct_heads(model: DecoderModule, encode: EncodeText, words: list[str], word: int, target: int) -> Tensor:
    """(layers · heads,) 1.0 for heads whose largest weight is on the target word, from the last token of the word."""
    pieces = [encode(text if i == 0 else f" {text}") for i, text in enumerate(words[: word + 1])]
    word_of = torch.tensor([i for i, ids in enumerate(pieces) for _ in ids])
    maps = attention_maps(model, [id for ids in pieces for id in ids])
    rows = torch.cat([weights[:, -1] for weights in maps if weights is not None])  # (heads, L)
    by_word = rows.new_zeros(len(rows), word + 1).index_add(1, word_of, rows)
    return (by_word[:, 1:word].argmax(-1) + 1 == target).float()  # neither the first word nor the word itself


def choose_and_test(right: Tensor, count: int) -> tuple[int, float]:
    """The column that is right most often in the first `count` rows, and its accuracy in the others."""
    best = int(right[:count].mean(0).argmax())
    return best, float(right[count:, best].mean())
