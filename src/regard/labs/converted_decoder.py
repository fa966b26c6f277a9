"""An embedding model need not be an encoder: a pretrained decoder, converted, embeds as well as an encoder of its size.

Two wordings of a passage of the small world should be more similar than passages that differ in one name. Models of two
layers are pretrained on stories, an encoder by masked words and a decoder by the next word, and then tuned on 300
passages with a second wording and two such negatives. The decoder is converted in two ways: it stays causal and its
last token is the embedding, or its mask is lifted, so that every token attends to all, and the mean of the tokens is.
Both kinds are also tuned without pretraining, and the causal decoder is used without tuning. Measured on held-out
passages: recall@1, the share of passages whose second wording is more similar than all other texts.

Reimers & Gurevych 2019; Wang et al. 2023 (E5-Mistral); BehnamGhader et al. 2024 (LLM2Vec). Which of the leading
embedding models are converted decoders is for their makers to disclose; here both are trained alike.
"""

# ledger: enc.embedders

from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.packing import pad_items
from regard.data.world import stories
from regard.data.world.tasks import example
from regard.kernels.attention.mask import Full
from regard.labs.alignment import split_words
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.labs.small_models import MIXERS, decoder_spec
from regard.models.causal_encoder import EMBEDDINGS, causal_encoder
from regard.models.encoder import Encoder, EncoderModule
from regard.models.heads import MaskedLM, Pooled
from regard.models.stack import replace_bodies
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.masked import masked
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.body import Body

WIDTH, LAYERS, LEVEL = 64, 2, 2
PAD, MASK, FIRST = 0, 1, 2
EMBED = SentenceEmbeddings(symmetric=True)
Weights = dict[str, Tensor]


def run(bench: Bench) -> Findings:
    start = 10_000 * bench.seed
    texts, ids = read_texts(start, bench.setting(300, 10))
    train, held_out = (
        [encode_pair(example("pairs", start + i, LEVEL, split), ids) for i in range(bench.setting(count, 20))]
        for split, count in (("train", 300), ("held-out", 128))
    )
    decoder = decoder_spec(MIXERS["attention"], FIRST + len(ids), WIDTH, LAYERS)
    causal = causal_encoder(decoder, Pooled("last"))
    both = replace(causal, layers=replace_bodies(causal.layers, without_mask), head=Pooled("mean"))
    read_masked = pretrain(bench, replace(both, head=MaskedLM()), texts)
    torch.manual_seed(bench.seed)
    model = decoder.build()
    steps = bench.training(300, 2)
    fit(bench, "next words", model, lambda rng: batch_of(draw_texts(rng, texts)), steps, objective=next_token)
    read_next = {EMBEDDINGS.get(name, name): value for name, value in model.state_dict().items()}
    kinds: dict[str, tuple[Encoder, Weights | None, bool]] = {
        "encoder": (both, read_masked, True),
        "decoder, causal": (causal, read_next, True),
        "decoder, mask lifted": (both, read_next, True),
        "encoder, not pretrained": (both, None, True),
        "causal, not pretrained": (causal, None, True),
        "decoder, not tuned": (causal, read_next, False),
    }
    recall = {name: tuned(bench, name, *kind, train, held_out) for name, kind in kinds.items()}
    encoder, kept, lifted, blank, blank_causal, raw = recall.values()
    checks = [
        Check("the pretrained and tuned encoder has a recall above 0.8", f"{encoder:.2f}", encoder > 0.8),
        Check("the converted decoder that stays causal has the encoder's recall, within 0.05",
              f"{kept:.2f} and {encoder:.2f}", kept >= encoder - 0.05),
        Check("so has the one whose mask is lifted", f"{lifted:.2f} and {encoder:.2f}", lifted >= encoder - 0.05),
        Check("both have a higher recall than the encoder that was not pretrained",
              f"{min(kept, lifted):.2f} and {blank:.2f}", min(kept, lifted) > blank),
        Check("pretraining by next words helps the causal one, by 0.05 or more", f"{kept:.2f} and {blank_causal:.2f}",
              kept >= blank_causal + 0.05),
        Check("without tuning the decoder has a recall lower by 0.2 or more", f"{raw:.2f} and {kept:.2f}",
              raw <= kept - 0.2),
    ]  # fmt: skip
    table = [{"model": name, "recall@1": value} for name, value in recall.items()]
    groups = tuple(name.replace(", ", ",\n").replace("not ", "not\n").replace("mask ", "mask\n") for name in recall)
    plots = [Plot("", "recall@1", {"": list(enumerate(recall.values()))}, "held-out passages", groups=groups)]
    remark = f"{len(held_out)} held-out passages; candidates are their second wordings and two negatives of each."
    return Findings(table, checks, plots, remark)


def read_texts(start: int, count: int) -> tuple[list[list[int]], dict[str, int]]:
    """All pairs of consecutive sentences of stories as ids, and the ids of the words."""
    texts = []
    for story in islice(stories(LEVEL, "train", start), count):
        words = [split_words(sentence) for sentence in story.sentences]
        texts += [[*first, *second] for first, second in zip(words, words[1:], strict=False)]
    ids = {word: FIRST + i for i, word in enumerate(sorted({word for text in texts for word in text}))}
    return [[ids[word] for word in text] for text in texts], ids


def encode_pair(found: dict, ids: dict[str, int]) -> list[list[int]]:
    """The anchor, the positive and the negatives; unknown words are masked."""
    texts = (found["anchor"], found["positive"], *found["negatives"])
    return [[ids.get(word, MASK) for word in split_words(text)] for text in texts]


def without_mask(body: Body) -> Body:
    return replace(body, mask=Full()) if isinstance(body, Attention) else body


def draw_texts(rng: torch.Generator, texts: list[list[int]]) -> list[list[int]]:
    return [texts[i] for i in torch.randint(len(texts), (32,), generator=rng).tolist()]


def batch_of(texts: list[list[int]], shift: int = 1) -> Batch:
    """Tokens with the next ones as targets, or with shift=0 with themselves."""
    items = [{"tokens": np.array(text[: len(text) - shift]), "targets": np.array(text[shift:])} for text in texts]
    (tokens, valid), (targets, _) = (pad_items(items, name, PAD) for name in ("tokens", "targets"))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).where(valid, 0)
    return Batch(tokens=tokens, targets=targets, weights=valid.float(), positions=positions, segments=valid.long() - 1)


def pretrain(bench: Bench, spec: Encoder, texts: list[list[int]]) -> Weights:
    """Weights of an encoder that predicts a sixth of the words, which are masked."""

    def hide(rng: torch.Generator) -> Batch:
        batch = batch_of(draw_texts(rng, texts), shift=0)
        chosen = (torch.rand(batch.tokens.shape, generator=rng) < 1 / 6) & (batch.weights > 0)
        fields = {**batch, "tokens": batch.tokens.masked_fill(chosen, MASK), "weights": chosen.float()}
        return Batch(**fields)

    torch.manual_seed(bench.seed)
    model = spec.build()
    fit(bench, "masked words", model, hide, bench.training(300, 2), objective=masked)
    return model.state_dict()


def tuned(
    bench: Bench, label: str, spec: Encoder, weights: Weights | None, tune: bool,
    train: list[list[list[int]]], held_out: list[list[list[int]]],
) -> float:  # fmt: skip
    """The recall of the model, with these weights if there are any, after tuning."""
    torch.manual_seed(bench.seed)
    model = spec.build()
    if weights is not None:
        names = set(model.state_dict())
        model.load_state_dict({name: value for name, value in weights.items() if name in names})
    if tune:

        def pairs(rng: torch.Generator) -> Batch:
            return stacked([train[i] for i in torch.randint(len(train), (16,), generator=rng).tolist()])

        fit(bench, label, model, pairs, bench.training(120, 2), 3e-3, objective=EMBED)
    return recall_of(model.eval(), held_out)


def stacked(rows: list[list[list[int]]]) -> Batch:
    """tokens and valid (B, n, L)"""
    tokens, valid = pad_items([{"ids": np.array(text)} for row in rows for text in row], "ids", PAD)
    shape = (len(rows), len(rows[0]))
    return Batch(tokens=tokens.unflatten(0, shape), valid=valid.unflatten(0, shape))


@torch.no_grad()
def recall_of(model: EncoderModule, rows: list[list[list[int]]]) -> float:
    _, count, metrics = EMBED(model, stacked(rows))
    return (metrics["recall@1"] / count).item()
