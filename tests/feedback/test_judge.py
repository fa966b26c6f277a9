"""A judge: exact log-odds of the letters, both orders, the bias of the position, templates."""

import math
from collections.abc import Sequence

import pytest
import torch

from regard.feedback.judge import (
    LIMIT,
    JudgeVerdict,
    ModelJudge,
    count_unanswered,
    fill_template,
    judge_pairs,
    position_bias,
    question_of,
)
from regard.language_model import LanguageModel
from tests.feedback.conftest import BiasedJudge, sigmoid

PAIRS = [("Where is Anna?", "In the barn.", "Barn"), ("And Ben?", "No", "He left the park."), ("Why?", "ab", "abc")]


def test_a_model_has_the_log_odds_of_its_logits(letters: LanguageModel) -> None:
    questions = [question_of("{prompt} A: {first} B: {second}", *pair, ()) for pair in PAIRS]
    expected = []
    for question in questions:
        ids = letters.encode_chat(question)
        with torch.no_grad():
            logits = letters.model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
        a, b = letters.tokenizer.encode("AB")
        expected.append((logits[a] - logits[b]).item())
    assert ModelJudge(letters).ask(questions) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3


def test_a_start_that_both_replies_share_precedes_the_letter(letters: LanguageModel) -> None:
    spaced = LanguageModel(letters.model, type(letters.tokenizer)(letters.tokenizer.core, eos="<|end|>"))
    spaced.tokenizer.chat_template = letters.tokenizer.chat_template.replace('"|>"', '"|> "')
    ids, a, b = ModelJudge(spaced).encode("Which?")
    assert spaced.tokenizer.decode(ids).endswith(" ") and [a, b] == spaced.tokenizer.encode("AB")


@pytest.mark.ledger("cai.rlaif")
@pytest.mark.parametrize("bias", [0.0, 2.5, -7.0])
def test_both_orders_are_asked_and_the_bias_cancels(bias: float) -> None:
    judge = BiasedJudge(bias)
    verdicts = judge_pairs(judge, PAIRS)
    assert len(judge.questions) == 6
    assert "Answer A:\nIn the barn.\n\nAnswer B:\nBarn\n" in judge.questions[0]
    assert "Answer A:\nBarn\n\nAnswer B:\nIn the barn.\n" in judge.questions[1]
    assert [verdict.log_odds for verdict in verdicts] == [8.0, -15.0, -1.0]
    assert verdicts[2].preference == pytest.approx(sigmoid(-1))
    measured = position_bias(verdicts)
    assert measured is not None and measured.log_odds == bias and measured.pairs == 3
    # only the third pair, one nat apart, follows the bias
    assert measured.inconsistent == pytest.approx(0 if not bias else 1 / 3)
    assert measured.chosen_first == pytest.approx(0.5 + (bias > 0) / 6 - (bias < 0) / 6)


def test_extreme_and_missing_replies_are_bounded() -> None:
    class Extreme:
        def ask(self, questions):
            return [1e9, None]

    (verdict,) = judge_pairs(Extreme(), PAIRS[:1])
    assert verdict == JudgeVerdict(LIMIT, 0.0, 1) and not verdict.consistent
    assert verdict.log_odds == 0  # the bias of one order does not cancel
    assert JudgeVerdict(LIMIT, -LIMIT).preference == 0.5 and not JudgeVerdict(LIMIT, -LIMIT).consistent
    assert position_bias([]) is None


def test_unanswered_questions_are_counted_and_have_no_bias() -> None:
    verdicts = [JudgeVerdict(3.0, 1.0), JudgeVerdict(LIMIT, 0.0, 1), JudgeVerdict(0.0, 0.0, 2)]
    assert count_unanswered(verdicts) == 3
    assert position_bias(verdicts) == (1, 0.5, 1.0, 0.0) and position_bias(verdicts[1:]) is None


class Replies:
    """A judge that replies the same to every question."""

    def __init__(self, reply: float | None):
        self.reply, self.asked = reply, 0

    def ask(self, questions: Sequence[str]) -> list[float | None]:
        self.asked += len(questions)
        return [self.reply] * len(questions)


def test_a_judge_that_never_replies_with_a_letter_is_refused_at_once() -> None:
    judge = Replies(None)
    with pytest.raises(ValueError, match="replied to none of 64 questions with A or B"):
        judge_pairs(judge, PAIRS * 50)
    assert judge.asked == 64
    assert count_unanswered(judge_pairs(judge, PAIRS, answered=True)) == 6
    assert judge_pairs(judge, []) == []


def test_log_odds_that_are_not_a_number_are_refused() -> None:
    with pytest.raises(ValueError, match="log-odds are not a number"):
        judge_pairs(Replies(math.nan), PAIRS)


def test_answers_cannot_fill_the_template() -> None:
    question = question_of("{prompt}|{first}|{second}|{other}", "{second}", "{prompt}", "x", ())
    assert question == "{second}|{prompt}|x|{other}"
    assert fill_template("{a}{b}", {"a": "{b}", "b": "1"}) == "{b}1"


def test_principles_and_conversations_are_in_the_question() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    judge = BiasedJudge()
    judge_pairs(judge, [(messages, "a", "b")], principles=("Be short.", "Be right."))
    assert "system: Be kind.\nuser: Hi\n" in judge.questions[0]
    assert "principles:\n- Be short.\n- Be right.\n" in judge.questions[0]
