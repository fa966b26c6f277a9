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


def loader(split: str = "train", rank: int = 0, ranks: int = 1) -> Loader:
    train, held_out = WorldStories().open()
    examples = train if split == "train" else held_out
    return Loader(examples, NextToken(), TOKENIZER, rows=4, length=24, rank=rank, ranks=ranks)


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
    samples = path / "samples.txt"
    last = Run.open(path).checkpoints[0]
    files = {file.name: file.read_bytes() for file in sorted(last.iterdir()) if file.suffix != ".json"}
    files["training"] = {k: v for k, v in read_training(last).items() if k != "run"}
    text = samples.read_text() if samples.exists() else None
    return {"curve": curve(path), "samples": text, "last": files, "step": last.name}
