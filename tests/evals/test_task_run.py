"""Results of tasks, against likelihoods and outputs that are computed one by one."""

import math

import pytest
import torch

from regard.evals.local_model import LocalModel
from regard.evals.scoring import continuation_row, text_rows
from regard.evals.task_file import EvalQuestion, EvalTask
from regard.evals.task_run import TaskPrompts, evaluate_task, work_of
from tests.evals.tiny_decoder import TEXT, tiny_decoder

QUESTIONS = [
    EvalQuestion("row 1", "The lamp is in", ("the red box",), ("the kitchen", "the red box", "a")),
    EvalQuestion("row 2", "The box is in", ("the kitchen",), ("the kitchen", "the garden, said Mira")),
    EvalQuestion("row 3", "Mira", ("said",), ("is", "said")),
]
SHOTS = [
    EvalQuestion("shot 1", "They are", ("unable",), ("unable", "red")),
    EvalQuestion("shot 2", "A", ("b",), ("b", "c")),
]


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(tiny_decoder(context=256), rows=4)


def test_choices_are_ranked_by_sum_and_by_mean_over_characters(model: LocalModel) -> None:
    done: list[int] = []
    task = EvalTask("t", "choice", QUESTIONS)
    result = evaluate_task(model, task, on_progress=done.append)
    right, right_norm = [], []
    for question, sample in zip(QUESTIONS, result.samples, strict=True):
        sums = [model.score([continuation_row(model, question.prompt, f" {c}")])[0].logprob for c in question.choices]
        assert sample["logprobs"] == pytest.approx(sums, abs=1e-10)
        answer = question.choices.index(question.answers[0])
        right.append(max(range(len(sums)), key=sums.__getitem__) == answer)
        means = [value / len(choice) for value, choice in zip(sums, question.choices, strict=True)]
        right_norm.append(max(range(len(means)), key=means.__getitem__) == answer)
    assert result.metrics["accuracy"].value == pytest.approx(sum(right) / 3)
    assert result.metrics["accuracy_norm"].value == pytest.approx(sum(right_norm) / 3)
    assert sum(done) == work_of(task, None) == 7 and result.truncated == 0
    assert evaluate_task(model, task, limit=1).rows == 1


def test_shots_come_before_the_prompt_or_are_earlier_turns() -> None:
    task = EvalTask("t", "choice", QUESTIONS, SHOTS, description="Complete.\n")
    assert TaskPrompts(task, SHOTS).prompt(QUESTIONS[0]) == "Complete.\nThey are unable\n\nA b\n\nThe lamp is in"
    assert TaskPrompts(task, SHOTS[:1]).messages(QUESTIONS[0]) == [
        {"role": "user", "content": "Complete.\nThey are"},
        {"role": "assistant", "content": "unable"},
        {"role": "user", "content": "The lamp is in"},
    ]


def test_options_without_effect_are_refused(model: LocalModel) -> None:
    task = EvalTask("t", "choice", QUESTIONS, SHOTS)
    with pytest.raises(ValueError, match="t has 2 examples, fewer than --shots 3"):
        evaluate_task(model, task, shots=3)
    texts = EvalTask("p", "perplexity", QUESTIONS)
    with pytest.raises(ValueError, match="--chat has no effect"):
        evaluate_task(model, texts, chat=True)
    with pytest.raises(ValueError, match="--shots has no effect"):
        evaluate_task(model, texts, shots=1)
    with pytest.raises(ValueError, match="row 9: the text is empty"):
        evaluate_task(model, EvalTask("p", "perplexity", [EvalQuestion("row 9", "", ())]))
    with pytest.raises(ValueError, match="max_new = 256 leaves no room"):
        evaluate_task(model, EvalTask("g", "generation", QUESTIONS, max_new=256))


def test_bits_per_byte_of_texts_in_windows() -> None:
    model = LocalModel(tiny_decoder(context=16))
    texts = [TEXT, "Tomás — in the garden", "A"]
    result = evaluate_task(model, EvalTask("p", "perplexity", [EvalQuestion(text, text, ()) for text in texts]))
    nats = -sum(model.score([row])[0].logprob for text in texts for row in text_rows(model, text))
    size, tokens = sum(len(text.encode()) for text in texts), sum(len(model.encode(text)) for text in texts)
    assert result.metrics["bits_per_byte"].value == pytest.approx(nats / size / math.log(2), rel=1e-10)
    assert result.metrics["byte_perplexity"].value == pytest.approx(math.exp(nats / size), rel=1e-10)
    assert result.metrics["perplexity"].value == pytest.approx(math.exp(nats / tokens), rel=1e-10)
    assert result.metrics["bits_per_byte"].error is not None


def greedy(model: LocalModel, ids: list[int], count: int) -> str:
    new: list[int] = []
    for _ in range(count):
        best = int(model.llm.model(torch.tensor([[*ids, *new]]))[0, -1].argmax())
        if best in model.llm.tokenizer.stop_ids:
            break
        new.append(best)
    return model.llm.tokenizer.decode(new)


def test_outputs_are_greedy_and_compared_with_their_references(model: LocalModel) -> None:
    task = EvalTask("g", "generation", QUESTIONS, max_new=5, stop=())
    outputs = [sample["output"] for sample in evaluate_task(model, task).samples]
    assert outputs == [greedy(model, model.encode(question.prompt), 5).strip() for question in QUESTIONS]
    right = [EvalQuestion("", each.prompt, ("x", out)) for each, out in zip(QUESTIONS, outputs, strict=True)]
    metrics = evaluate_task(model, EvalTask("g", "generation", right, max_new=5, stop=())).metrics
    assert metrics["exact_match"] == metrics["normalized_match"] == (1, 0)
    stopped = evaluate_task(model, EvalTask("g", "generation", QUESTIONS[:1], max_new=5, stop=(outputs[0][2:4],)))
    assert stopped.samples[0]["output"] == outputs[0][: outputs[0].index(outputs[0][2:4])].strip()


def test_chats_are_asked_in_the_template(model: LocalModel) -> None:
    result = evaluate_task(model, EvalTask("c", "choice", QUESTIONS[:1], SHOTS), shots=1, chat=True)
    tokenizer = model.llm.tokenizer
    prompt = tokenizer.encode("<|user|> They are<|assistant|> unable<|end|><|user|> The lamp is in<|assistant|>", True)
    expected = []
    for choice in QUESTIONS[0].choices:
        ids = [*prompt, *tokenizer.encode(f" {choice}")]
        logprobs = model.llm.model(torch.tensor([ids])).log_softmax(-1)[0].detach()
        expected.append(float(sum(logprobs[i - 1, ids[i]] for i in range(len(prompt), len(ids)))))
    assert result.samples[0]["logprobs"] == pytest.approx(expected, abs=1e-9)
    outputs = evaluate_task(model, EvalTask("g", "generation", QUESTIONS[:1], max_new=4), chat=True).samples
    assert (
        outputs[0]["output"]
        == greedy(model, model.encode_chat(TaskPrompts(EvalTask("", "", [])).messages(QUESTIONS[0])), 4).strip()
    )


def test_truncated_prompts_are_counted() -> None:
    model = LocalModel(tiny_decoder(context=32), window=12)
    long = EvalQuestion("row 1", TEXT, ("red",), ("red", "box"))
    assert evaluate_task(model, EvalTask("c", "choice", [long, QUESTIONS[2]])).truncated == 1
    generated = evaluate_task(model, EvalTask("g", "generation", [long, QUESTIONS[2]], max_new=4, stop=()))
    assert generated.truncated == 1
    assert generated.samples[0]["output"] == greedy(model, model.encode(TEXT)[-8:], 4).strip()
