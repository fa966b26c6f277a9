"""Exact match of generated outputs: greedy decoding of tiny models that were trained on a few examples."""

import json

import pytest
import torch
from torch import nn

from regard.data.sources.base import Examples, open_collection
from regard.data.world.tasks import example
from regard.engine.request import GenerationError
from regard.evals.generation import GradedOutput, grade_outputs
from regard.models.decoder import Decoder, DecoderModule
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.objectives.base import Objective
from regard.objectives.next_token import NextToken
from regard.objectives.translation import Translation
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte, character
from regard.training.optimizer import AdamW
from regard.training.step import take_step

PAIRS = [{"source": "ab", "target": "yx"}, {"source": "ba", "target": "xy"}, {"source": "aab", "target": "yxx"}]


def decoder(tokenizer: Tokenizer) -> DecoderModule:
    block = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(64))))
    return Decoder(tokenizer.vocab_size, 32, (Repeat((block,), 1),), context=64).build(0)


def examples_of(rows: list[dict]) -> Examples:
    return open_collection("rows", rows, 0, hold_out=False).train


def fit(model: nn.Module, objective: Objective, rows: list[dict], tokenizer: Tokenizer, length: int) -> None:
    items = [objective.sample(objective.tokenize(row, tokenizer), tokenizer, length, None) for row in rows]
    if not objective.packed:
        batch = objective.collate(items, tokenizer, length)
    else:
        batch = objective.collate([sum(items, [])], tokenizer, length * len(rows))
    optimizer = AdamW().build(model, lr=2e-2)
    for _ in range(150):
        take_step(model, objective, batch, optimizer, clip=1.0)


def test_a_translator_of_three_pairs_is_graded() -> None:
    tokenizer, objective = character(["abxy"]), Translation(label_smoothing=0.0)
    objective.prepare_tokenizer(tokenizer)
    model = transformer_2017(tokenizer.vocab_size, 16, 2, 32, 1, dropout=0.0).build(0)
    fit(model, objective, PAIRS, tokenizer, 8)
    graded = grade_outputs(model, tokenizer, examples_of(PAIRS), count=3, max_new=8, rows=2)
    assert {item.prompt: item.output for item in graded} == {pair["source"]: pair["target"] for pair in PAIRS}
    assert all(item.correct and item.well_formed is None for item in graded)
    short = grade_outputs(model, tokenizer, examples_of(PAIRS), count=3, max_new=1)
    assert not any(item.correct for item in short)


def test_a_request_that_fails_is_no_wrong_answer() -> None:
    tokenizer = byte()
    model = decoder(tokenizer)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(GenerationError, match="not finite"):
        grade_outputs(model, tokenizer, examples_of([{"prompt": "a", "completion": "b"}]), count=1, max_new=4)


@pytest.mark.parametrize("form", ["messages", "completion"])
def test_a_decoder_of_two_answers_is_graded(form: str) -> None:
    rows: list[dict] = [{"prompt": pair["source"], "completion": f'{{"x": "{pair["target"]}"}}'} for pair in PAIRS[:2]]
    if form == "messages":
        roles = ("user", "assistant")
        rows = [
            {"messages": [{"role": r, "content": c} for r, c in zip(roles, row.values(), strict=True)]} for row in rows
        ]
    tokenizer = byte()
    model = decoder(tokenizer)
    fit(model, NextToken(), rows, tokenizer, 32)
    graded = grade_outputs(model, tokenizer, examples_of(rows), count=2, max_new=24, rows=1)
    assert {item.prompt: json.loads(item.output)["x"] for item in graded} == {
        p["source"]: p["target"] for p in PAIRS[:2]
    }
    assert all(item.correct and item.well_formed for item in graded)


def test_the_form_of_a_json_object_counts_apart_from_its_values() -> None:
    target = '{"who": "Anna", "where": null}'
    outputs = {
        '{"where": "barn", "who": "Ben"}': True,
        "Anna": False,
        '{"who": "Anna"}': False,
        "[1]": False,
        "{": False,
    }
    for text, expected in outputs.items():
        output = GradedOutput("", target, text)
        assert output.well_formed is expected and not output.correct
    assert GradedOutput("", target, target).correct


def test_examples_without_a_target_are_refused() -> None:
    tokenizer = character(["ab"])
    model = decoder(tokenizer)
    for row, message in (
        ({"text": "ab"}, "this example has text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "end with an answer"),
    ):
        with pytest.raises(ValueError, match=message):
            grade_outputs(model, tokenizer, examples_of([row]), count=1)


def test_the_people_of_held_out_records_are_not_in_training() -> None:
    train, held_out = (
        [example("record", seed, 3, split)["messages"] for seed in range(200)] for split in ("train", "held-out")
    )
    people = [{json.loads(answer["content"])["who"] for _, answer in rows} - {None} for rows in (train, held_out)]
    assert len(people[0]) > 20 and len(people[1]) > 20 and not people[0] & people[1]
    for prompt, answer in train + held_out:
        values = json.loads(answer["content"])
        assert list(values) == ["verb", "who", "what", "where"]
        last = prompt["content"].splitlines()[0].rstrip(".").rpartition(". ")[2]
        assert all(value in last for key, value in values.items() if value and key != "verb")
