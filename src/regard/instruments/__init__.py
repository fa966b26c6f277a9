"""Instruments: small live experiments with the parts of the package, in the order of a course.

    INSTRUMENTS["masks"].panels({"kind": "window", "tokens": 8})

Each answers a question. The page draws their panels; /regard/instruments serves them.
"""

from regard.instruments import (
    adversarial,
    ancestors,
    architecture,
    attention,
    blocks,
    codes,
    drafts,
    efficient,
    feedforward,
    generative_table,
    language,
    lora_findings,
    paged,
    phases,
    positions,
    precision,
    prefill,
    retrieval,
    serving,
    translation,
    vision,
    vocabulary,
)
from regard.instruments.instrument import Instrument, Panel, Subject, subject_of

COURSE: dict[str, tuple[str, ...]] = {  # chapter: ids, in order
    "Before attention": ("feed-forward", "recurrence", "lstm", "bottleneck", "alignment"),
    "Text as numbers": ("tokens", "embeddings"),
    "Attention": ("one-query", "self-attention", "five-tokens", "heads", "masks", "cross-attention"),
    "Blocks": ("feed-forward-layer", "norms", "residual", "gated-unit"),
    "Positions": ("sinusoids", "rope", "position-choice"),
    "Models": ("encoder-decoder", "trace", "sandwich", "generation", "masked-words", "patches"),
    "Long sequences": ("window", "tiles", "memory-wall", "associativity", "convolution-recurrence", "experts"),
    "Serving": ("kv-cache", "blocks", "prefill-decode", "sharing", "precision", "speculative-rounds", "retrieval"),
    "Training and adapting": ("phases", "lora", "lora-rates"),
    "Generative models": (
        "adversarial-training",
        "best-discriminator",
        "code-size",
        "dots-and-clouds",
        "two-pulls",
        "generative-table",
    ),
}
MODULES = (
    ancestors, translation, vocabulary, attention, feedforward, blocks, positions, architecture, language, vision,
    efficient, serving, paged, prefill, precision, drafts, retrieval, phases, lora_findings, adversarial, codes,
    generative_table,
)  # fmt: skip
DEFINED = {instrument.id: instrument for module in MODULES for instrument in module.INSTRUMENTS}
INSTRUMENTS: dict[str, Instrument] = {id: DEFINED[id] for ids in COURSE.values() for id in ids}

__all__ = ["COURSE", "INSTRUMENTS", "Instrument", "Panel", "Subject", "subject_of"]
