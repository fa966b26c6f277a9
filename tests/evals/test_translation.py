"""Exact match of translations: greedy decoding of a tiny translator that was trained on a few pairs."""

from regard.data.sources.base import open_collection
from regard.engine.engine import Engine
from regard.evals.translation import grade_translations, translate
from regard.models.presets import transformer_2017
from regard.objectives.translation import Translation
from regard.text.train import character
from regard.training.optimizer import AdamW
from regard.training.step import take_step

PAIRS = [{"source": "ab", "target": "yx"}, {"source": "ba", "target": "xy"}, {"source": "aab", "target": "yxx"}]


def test_a_translator_of_three_pairs_is_graded() -> None:
    examples, tokenizer = open_collection("pairs", PAIRS, 0, hold_out=False).train, character(["abxy"])
    objective = Translation(label_smoothing=0.0)
    objective.prepare_tokenizer(tokenizer)
    model = transformer_2017(tokenizer.vocab_size, 16, 2, 32, 1, dropout=0.0).build(0)
    items = [objective.sample(objective.tokenize(pair, tokenizer), tokenizer, 8, None) for pair in PAIRS]
    batch, optimizer = objective.collate(items, tokenizer, 8), AdamW().build(model, lr=2e-2)
    for _ in range(60):
        take_step(model, objective, batch, optimizer, clip=1.0)
    engine = Engine(model.eval(), rows=2, capacity=16, source_capacity=16)
    graded = grade_translations(engine, tokenizer, examples, count=3, max_new=8)
    assert {item.source: item.output for item in graded} == {pair["source"]: pair["target"] for pair in PAIRS}
    assert all(item.correct for item in graded)
    assert translate(engine, tokenizer, ["ab"], max_new=1) == ["y"]
