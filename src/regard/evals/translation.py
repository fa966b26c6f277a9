"""Exact match of an encoder-decoder: held-out sources, decoded greedily, compared with their targets as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.data.sources.base import Examples
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GradedTranslation:
    source: str
    target: str
    output: str  # the model's

    @property
    def correct(self) -> bool:
        return self.output == self.target


def translate(
    engine: Engine, tokenizer: Tokenizer, sources: Sequence[str], start: int | None = None, max_new: int = 128
) -> list[str]:
    """The greedy outputs for all sources. `start` is the decoder's first token, by default that of the tokenizer."""
    start = tokenizer.decoder_start if start is None else start
    if start is None:
        raise ValueError("the tokenizer has no token that starts an output; set start")
    sampling = Sampling(max_new=max_new, temperature=0, stop_ids=tokenizer.stop_ids)
    outputs = []
    for first in range(0, len(sources), engine.store.rows):
        batch = [
            engine.submit([start], sampling, source=tokenizer.encode_with_special_tokens(source))
            for source in sources[first : first + engine.store.rows]
        ]
        while not engine.idle:
            engine.step()
        for request in batch:
            ids = [token.id for token in request.new if token.finish != "stop"]
            outputs.append(tokenizer.decode(ids).strip())
    return outputs


def grade_translations(
    engine: Engine, tokenizer: Tokenizer, examples: Examples, count: int, max_new: int = 128
) -> list[GradedTranslation]:
    """Translate the first `count` examples, which have `source` and `target`."""
    pairs = [examples.example(index) for index in range(count)]
    outputs = translate(engine, tokenizer, [pair["source"] for pair in pairs], max_new=max_new)
    return [
        GradedTranslation(pair["source"], pair["target"], output) for pair, output in zip(pairs, outputs, strict=True)
    ]
