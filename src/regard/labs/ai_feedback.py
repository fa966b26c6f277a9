"""Critiques and verdicts of a model itself replace most labels of people.

A small model learns to answer questions about passages of the simulated world, plainly (`the museum`) as often as in
the preferred form (`Answer: the museum.`), and sometimes wrongly; to criticise and rewrite an answer by the principle
that it has this form; and to judge which of two answers is better. It is then tuned in two ways, and every answer is
graded by rule.

Critique and revision: the model answers 1,280 further prompts, criticises and rewrites its answers, and is trained on
the revisions; as a control, on its first answers. An answer without the form violates the principle.

AI feedback: two sampled answers per prompt are labelled by the rule, as people would, or by the model as judge, asked
in both orders. DPO trains on 16 to 512 of these pairs, always for 120 steps. Quality is the share of sampled
answers that are correct and have the form.

Bai et al. 2022 (Constitutional AI); Lee et al. 2023 (RLAIF).
"""

# ledger: cai.critique cai.rlaif

import copy
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import open_collection
from regard.data.world.answers import grade, in_preferred_form
from regard.data.world.english import write_sentences
from regard.data.world.tasks import draw_passages
from regard.feedback.constitution import Constitution, Principle
from regard.feedback.judge import JudgeVerdict, ModelJudge, judge_pairs, position_bias, question_of
from regard.feedback.prompts import AnswerOptions, ModelAnswers
from regard.feedback.revise import assistant, revise, user
from regard.labs.experiment import Bench, Check, Findings, Plot
from regard.labs.fit import fit
from regard.language_model import LanguageModel
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.objectives.base import LossResult, Objective
from regard.objectives.next_token import NextToken
from regard.objectives.preference import DPO
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.short_convolution import ShortConvolution
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe
from regard.training.reference import reference_logprobs

WIDTH, LAYERS, LENGTH, SENTENCES = 64, 3, 192, 2
FORM = Principle("form", "The answer has the form Answer: X.")
RULES = Constitution(
    (FORM,), "Criticise: {principle}", "Rewrite: {principle}", "{prompt} A: {first} B: {second} Better?"
)
HELD_OUT, FURTHER = 1 << 40, 1 << 41  # first seeds of passages that the model has not been trained on
LABELS = (16, 64, 256, 512)
SAMPLED = AnswerOptions(max_new=12, temperature=1.0)


class Asked(NamedTuple):
    prompt: list[dict[str, Any]]
    answer: str
    wrong: str

    def candidates(self) -> list[str]:
        """From the best to the worst."""
        return [in_preferred_form(self.answer), self.answer, in_preferred_form(self.wrong), self.wrong]

    def score(self, text: str) -> float:
        return grade(text, self.answer).score


class AnswerQuality(NamedTuple):
    """Shares of sampled answers."""

    formatted: float
    correct: float
    both: float


def run(bench: Bench) -> Findings:
    steps, count, held_out = bench.training(2400, 2), bench.setting(1280, 8), bench.setting(1000, 8)
    torch.manual_seed(bench.seed)
    examples = [instruction(number, bench.seed) for number in range(bench.setting(12_000, 60))]
    texts = (message["content"] for example in examples for message in example["messages"])
    tokenizer = bpe(texts, bench.setting(1024, 300))
    model = small_assistant(tokenizer)
    train(bench, "the first model", model, NextToken(), examples, tokenizer, steps, 3e-3)
    asked = [ask(FURTHER + number, bench.seed, "train") for number in range(count)]
    test = [ask(HELD_OUT + number, bench.seed, "held-out") for number in range(held_out)]
    before = measure(model, tokenizer, test)
    revised = critique_and_revision(bench, model, tokenizer, asked, test)
    judged, tuned = ai_feedback(bench, model, tokenizer, asked, test)
    return findings(before, revised, judged, tuned)


def critique_and_revision(
    bench: Bench, model: DecoderModule, tokenizer: Tokenizer, asked: Sequence[Asked], test: Sequence[Asked]
) -> dict[str, AnswerQuality]:
    """Trained on the model's own first answers, and on its revisions."""
    answer = ModelAnswers(LanguageModel(model, tokenizer, rows=64), SAMPLED)
    found = revise(answer, [item.prompt for item in asked], range(len(asked)), RULES, seed=bench.seed)
    data = {
        "first answers": [{"messages": [*item.prompt, assistant(item.initial)]} for item in found],
        "revisions": [{"messages": item.as_line()["messages"]} for item in found],
    }
    results = {}
    for name, rows in data.items():
        tuned = copy.deepcopy(model)
        train(bench, name, tuned, NextToken(), rows, tokenizer, bench.training(60, 1), 5e-4)
        results[name] = measure(tuned, tokenizer, test)
    return results


class Agreement(NamedTuple):
    both_orders: float  # shares of pairs on which judge and rule agree
    one_order: float
    chosen_first: float
    inconsistent: float


def ai_feedback(
    bench: Bench, model: DecoderModule, tokenizer: Tokenizer, asked: Sequence[Asked], test: Sequence[Asked]
) -> tuple[Agreement, dict[str, list[tuple[int, AnswerQuality]]]]:
    """How far the judge agrees with the rule, and the quality after DPO by the labels of each, by their number."""
    llm = LanguageModel(model, tokenizer, rows=64)
    twice = [item.prompt for item in asked for _ in range(2)]
    answers = [text.strip() for text in ModelAnswers(llm, SAMPLED)(twice, range(len(twice)))]
    sampled = list(zip(asked, answers[::2], answers[1::2], strict=True))
    pairs = [(item, a, b) for item, a, b in sampled if item.score(a) != item.score(b)]
    pairs = pairs or [(item, a, b) for item, a, b in sampled if a != b]  # of a model that is not trained (quick)
    verdicts = judge_pairs(ModelJudge(llm), [(item.prompt, a, b) for item, a, b in pairs], RULES.judge)
    labels = {
        "rule": [item.score(a) > item.score(b) for item, a, b in pairs],
        "judge": [verdict.log_odds > 0 for verdict in verdicts],
    }
    tuned: dict[str, list[tuple[int, AnswerQuality]]] = {}
    for source, labelled in labels.items():
        rows = [pair_row(item.prompt, a, b, label) for (item, a, b), label in zip(pairs, labelled, strict=True)]
        tuned[source] = []
        for number in bench.setting(LABELS, (2, 4)):
            policy = copy.deepcopy(model)
            train(bench, f"DPO, {number} by the {source}", policy, DPO(), rows[:number], tokenizer,
                  bench.training(120, 1), 3e-4)  # fmt: skip
            tuned[source].append((number, measure(policy, tokenizer, test)))
    return agreement(verdicts, labels["rule"]), tuned


def agreement(verdicts: Sequence[JudgeVerdict], labels: Sequence[bool]) -> Agreement:
    pairs = list(zip(verdicts, labels, strict=True))
    bias = position_bias(verdicts)
    assert bias is not None, "there are pairs"
    single = [((v.shown_first > 0) == label) + ((v.shown_second > 0) == label) for v, label in pairs]
    both = sum((verdict.log_odds > 0) == label for verdict, label in pairs) / len(pairs)
    return Agreement(both, sum(single) / (2 * len(pairs)), bias.chosen_first, bias.inconsistent)


def pair_row(prompt: list[dict[str, Any]], first: str, second: str, first_wins: bool) -> dict[str, Any]:
    chosen, rejected = (first, second) if first_wins else (second, first)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def measure(model: DecoderModule, tokenizer: Tokenizer, test: Sequence[Asked]) -> AnswerQuality:
    llm = LanguageModel(model, tokenizer, rows=64)
    answers = ModelAnswers(llm, SAMPLED)([item.prompt for item in test], range(len(test)))
    grades = [grade(text, item.answer) for text, item in zip(answers, test, strict=True)]
    correct, formatted = (sum(values) / len(grades) for values in zip(*grades, strict=True))
    return AnswerQuality(formatted, correct, sum(all(values) for values in grades) / len(grades))


def train(
    bench: Bench, label: str, model: DecoderModule, objective: Objective, rows: Sequence[dict[str, Any]],
    tokenizer: Tokenizer, steps: int, rate: float,
) -> None:  # fmt: skip
    examples = open_collection(label, rows, bench.seed, hold_out=False).train
    batches = iter(Loader(examples, objective, tokenizer, rows=16, length=LENGTH, seed=bench.seed))
    reference = copy.deepcopy(model).eval()

    def loss(model: torch.nn.Module, batch: Batch) -> LossResult:
        if objective.needs_reference:
            batch = Batch(**batch, reference=reference_logprobs(reference, batch))
        return objective(model, batch)

    fit(bench, label, model, lambda rng: next(batches), steps, rate, objective=loss)


def small_assistant(tokenizer: Tokenizer) -> DecoderModule:
    block = Block((Sublayer(ShortConvolution(6)), Sublayer(Attention(4)), Sublayer(SwiGLU(2 * WIDTH))))
    return Decoder(tokenizer.vocab_size, WIDTH, (Repeat((block,), LAYERS),)).build()


def ask(number: int, seed: int, split: str) -> Asked:
    """A passage whose sentences each say where somebody or something is, and a question about one of them."""
    for events, rng in draw_passages(number * 1009 + seed, 1, split, SENTENCES):
        subjects, places = [event.who or event.what for event in events], [event.where for event in events]
        if len({*subjects}) == len({*places} - {""}) == SENTENCES and "" not in subjects:
            chosen = rng.randrange(SENTENCES)
            name = subjects[chosen] if events[chosen].who else f"the {subjects[chosen]}"
            text = f"{' '.join(write_sentences(events, rng))} Where is {name}?"
            return Asked([user(text)], f"the {places[chosen]}", f"the {places[chosen - 1]}")
    raise AssertionError("unreachable: passages are endless")


def instruction(number: int, seed: int) -> dict[str, Any]:
    """A conversation: an answer, a critique with its revision, or, half of the time, a verdict on two answers."""
    asked, rng = ask(number, seed, "train"), Random(f"instruction/{seed}/{number}")
    if number % 4 == 0:
        return {"messages": [*asked.prompt, assistant(rng.choice(asked.candidates()[:2]))]}
    if number % 4 == 1:
        answer = rng.choice([*asked.candidates()[:2], *asked.candidates()])  # wrong in a third of the cases
        formatted = grade(answer, asked.answer).formatted
        critique = "It has the form." if formatted else "It lacks the form."
        revision = answer if formatted else in_preferred_form(answer)
        return {
            "messages": [
                *asked.prompt, assistant(answer), user(RULES.critique_request(FORM)), assistant(critique),
                user(RULES.revision_request(FORM)), assistant(revision),
            ]
        }  # fmt: skip
    first, second = rng.sample(asked.candidates(), 2)
    question = question_of(RULES.judge, asked.prompt, first, second, ())
    return {"messages": [user(question), assistant("A" if asked.score(first) > asked.score(second) else "B")]}


def findings(
    before: AnswerQuality,
    revised: dict[str, AnswerQuality],
    judged: Agreement,
    tuned: dict[str, list[tuple[int, AnswerQuality]]],
) -> Findings:
    stages = {"before": ("", before)} | {name: ("", quality) for name, quality in revised.items()}
    last = {source: results[-1][1] for source, results in tuned.items()}
    few, many = tuned["rule"][0][1], last["rule"]
    rows = [{"trained on": name, "labels": labels, **quality._asdict()} for name, (labels, quality) in stages.items()]
    for source, results in tuned.items():
        rows += [
            {"trained on": f"pairs by the {source}", "labels": number, **quality._asdict()}
            for number, quality in results
        ]
    violations = {name: 1 - quality.formatted for name, (_, quality) in stages.items()}
    return Findings(rows, checks(before, revised, violations, judged, last, few, many), [
        Plot("trained on", "share of answers", {"violations": list(enumerate(violations.values()))},
             "answers that violate the principle", groups=tuple(violations)),
        Plot("", "share of pairs", {"": list(enumerate(judged))}, "the judge",
             groups=("agrees,\nboth orders", "agrees,\none order", "chose\nthe first", "depends\non order")),
        Plot("labelled pairs", "correct and in form",
             {f"labels by the {source}": [(number, q.both) for number, q in results]
              for source, results in tuned.items()} | {
                  "before": [(results[0], before.both) for results in tuned["rule"]]},
             "after DPO", "x"),
    ], REMARK)  # fmt: skip


REMARK = (
    "Answers are sampled at temperature 1. The judge is the first model, whose training had verdicts on other answers; "
    "its labels cost no further ones. Only pairs whose two answers differ in quality are labelled."
)


def checks(
    before: AnswerQuality, revised: dict[str, AnswerQuality], violations: dict[str, float], judged: Agreement,
    last: dict[str, AnswerQuality], few: AnswerQuality, many: AnswerQuality,
) -> list[Check]:  # fmt: skip
    start, control, after = (violations[name] for name in ("before", "first answers", "revisions"))
    kept = revised["revisions"].correct
    return [
        Check("training on revisions leaves less than a quarter of the violations", f"{start:.2f} to {after:.2f}",
              after < start / 4),
        Check("training on the first answers leaves more than three quarters of them", f"{start:.2f} to {control:.2f}",
              control > 0.75 * start),
        Check("training on revisions keeps the share of correct answers, within 0.05",
              f"{before.correct:.2f} to {kept:.2f}", kept > before.correct - 0.05),
        Check("the judge agrees with the rule on at least 90 % of pairs", f"{judged.both_orders:.3f}",
              judged.both_orders >= 0.9),
        Check("both orders agree with the rule at least as often as one", f"{judged.both_orders:.3f} and "
              f"{judged.one_order:.3f}", judged.both_orders >= judged.one_order),
        Check("the most labels by the judge are as good for DPO as as many by the rule, within 0.05",
              f"{last['judge'].both:.2f} and {many.both:.2f}", last["judge"].both > many.both - 0.05),
        Check("they are better than the fewest labels by the rule", f"{last['judge'].both:.2f} and {few.both:.2f}",
              last["judge"].both > few.both),
    ]  # fmt: skip
