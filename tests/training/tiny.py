"""A run of a few seconds for the tests of this package, with dropout, packing, evaluation and samples."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from regard.data.loader import Loader
from regard.data.sources.world import WorldStories
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.objectives.next_token import NextToken, next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.text import train as tokenizers
from regard.training.loop import Trainer
from regard.training.recipe import Training
from regard.training.run import Run, read_training
from regard.training.schedule import Cosine

SETTINGS = Training(steps=10, lr=3e-3, schedule=Cosine(warmup=2), save_every=3, evaluate_every=5, seed=7)
TOKENIZER = tokenizers.byte()
SPEC = Decoder(
    vocab=TOKENIZER.vocab_size,
    width=16,
    layers=(
        Repeat((Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))), dropout=0.1),)),
        Repeat((Block((Sublayer(LinearAttention(2)),), dropout=0.1),)),
    ),
)


def loader(split: str = "train") -> Loader:
    train, held_out = WorldStories().open()
    return Loader(train if split == "train" else held_out, NextToken(), TOKENIZER, rows=4, length=24)


def trainer(path: Path, settings: Training = SETTINGS, **overrides: Any) -> Trainer:
    """A trainer that starts or resumes a run at this path."""
    run = Run.open(path) if (path / "config.json").exists() else Run.create(path, {"train": settings.to_dict()})
    defaults = {
        "model": SPEC.build(settings.seed),
        "loader": loader(),
        "objective": next_token,
        "prefetch": 2,
        "held_out": list(islice(loader("held-out"), 2)),
        "sample": lambda model: f"a text, and a number drawn on the way: {torch.rand(())}",
    }
    return Trainer(settings=settings, run=run, **(defaults | overrides))


def curve(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def outcome(path: Path) -> dict[str, Any]:
    """Everything that is bit-identical in two equal runs, which have different ids."""
    folders = Run.open(path).checkpoints
    last = {file.name: file.read_bytes() for file in sorted(folders[0].iterdir()) if file.suffix != ".json"}
    last["training"] = {k: v for k, v in read_training(folders[0]).items() if k != "run"}
    return {"curve": curve(path), "samples": (path / "samples.txt").read_text(), "last": last, "step": folders[0].name}
