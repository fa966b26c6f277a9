"""`regard compare` and the commands of `regard feedback` on a small model; wrong values."""

import json
import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import regard as regard_package
from regard import language_model
from regard.cli.compare import check_targets, default_reward
from regard.data.readers import read_examples
from regard.data.targets import target_of
from regard.feedback.prompts import WORLD_REWARD, read_prompts
from regard.language_model import LanguageModel
from regard.text.train import byte
from regard.text_generation import checked_sampling
from regard.training.run import newest_checkpoint
from tests.cli.conftest import regard
from tests.feedback.test_address_judge import MODELS, reply, stub_server
from tests.training.tiny import SPEC

SHORT = ("--max-new", 4, "--device", "cpu")


def write_prompts(folder: Path, *names: str) -> Path:
    """Three examples with these columns."""
    rows = [{name: f"Where is {number}?" for name in names} for number in ("Anna", "Ben", "Clara")]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shorter_is_better(completions: list[Any], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def test_two_models_are_shown_side_by_side(demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.compare_models.RUNS", 1)
    (tmp_path / "text.txt").write_text("Anna is in the barn. Ben is in the kitchen. " * 9)
    text = ("--text", tmp_path / "text.txt", "--tokens", 60, "--length", 40, "--device", "cpu")
    result = regard("compare", demo_run, demo_run, "--quantize", "int8", "--cache", "int8", *text, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    first, second = found["a"], found["b"]
    assert first["parameters"] == second["parameters"] and first["bytes_on_disk"] == second["bytes_on_disk"]
    assert second["bytes_in_memory"] < first["bytes_in_memory"] and first["bits_per_weight"] == 32
    assert second["perplexity"] == pytest.approx(first["perplexity"], rel=0.05)
    assert 0.8 < found["agreement"]["equal_tokens"] <= 1 and 0 < found["agreement"]["kl"] < 0.05
    assert first["tokens_per_second"] > 0 < second["tokens_per_second"]
    printed = regard("compare", demo_run, demo_run, *text, "--no-speed").stdout
    assert "perplexity" in printed and "tokens/s" not in printed and "100.00% of the most likely tokens" in printed


def test_models_of_other_tokenizers(demo_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bytes"
    tokenizer = byte()
    regard_package.save(LanguageModel(replace(SPEC, vocab=tokenizer.vocab_size).build(seed=0), tokenizer), folder)
    options = ("--tokens", 50, "--no-speed", "--device", "cpu")
    found = json.loads(regard("compare", demo_run, folder, *options, "--json").stdout)
    assert found["agreement"] is None and "the tokenizers differ" in found["agreement_refused"]
    assert found["a"]["perplexity_per_byte"] < found["b"]["perplexity_per_byte"]
    printed = regard("compare", demo_run, folder, *options).stdout
    assert "perplexity per byte" in printed and "agreement: the tokenizers differ" in printed
    assert "there is no such file" in str(regard("compare", demo_run, demo_run, "--text", "missing").exception)


def test_a_model_whose_logits_are_not_finite_is_named(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.compare_models.RUNS", 1)
    damaged, model = tmp_path / "damaged", regard_package.load(demo_run)
    next(iter(model.model.parameters())).data.fill_(float("nan"))
    regard_package.save(model, damaged)
    for names in ((demo_run, damaged), (damaged, demo_run)):
        result = regard("compare", *names, "--tokens", 50, "--device", "cpu", "--json")
        assert result.exit_code == 0 and "NaN" not in result.stdout, result.output
        found = json.loads(result.stdout)
        entries = {entry["model"]: entry for entry in (found["a"], found["b"])}
        keys = ("perplexity", "perplexity_per_byte", "tokens_per_second")
        assert all(entries[str(damaged)][key] is None for key in keys) and found["agreement"] is None
        assert all(entries[str(demo_run)][key] > 0 for key in keys)
        assert f"the logits of {damaged} are not finite" in found["agreement_refused"]
    printed = regard("compare", demo_run, damaged, "--tokens", 50, "--device", "cpu", "--no-speed").stdout
    assert f"the logits of {damaged} are not finite" in printed and "–" in printed and "nan " not in printed


def test_rates_of_a_text_without_tokens_are_left_out(demo_run: Path, tmp_path: Path) -> None:
    for text in ("", "a"):
        (tmp_path / "short.txt").write_text(text)
        arguments = ("compare", demo_run, demo_run, "--text", tmp_path / "short.txt", "--device", "cpu")
        found = json.loads(regard(*arguments, "--json").stdout)
        assert found["a"]["perplexity"] is found["b"]["perplexity_per_byte"] is found["agreement"] is None
        assert (found["a"]["tokens_per_second"] is None) == (text == "")
    assert "the text has too few tokens to predict one" in regard(*arguments, "--no-speed").stdout


@pytest.fixture
def endless_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer, so that all are cut off, whatever random numbers the machine draws."""
    monkeypatch.setattr(language_model, "checked_sampling", lambda options, stop_ids: checked_sampling(options, ()))


def test_a_model_ties_with_itself_and_its_samples_win_and_lose(
    demo_run: Path, tmp_path: Path, endless_answers: None
) -> None:
    same = regard("compare", demo_run, demo_run, "--prompts", "world", "--count", 3, *SHORT)
    assert same.exit_code == 0, same.output
    assert "50.0%" in same.output and "A and B are the same model" in same.output
    assert "3 answers of A and 3 of B were cut off at" in same.output
    out, prompts = tmp_path / "pairs.jsonl", write_prompts(tmp_path, "prompt")
    options = ("--by", "tests.cli.test_feedback:shorter_is_better", "--temperature", 2.0, "--out", out, "--json")
    sampled = regard("compare", demo_run, demo_run, "--prompts", prompts, *options, *SHORT)
    assert sampled.exit_code == 0, sampled.output
    found, pairs = json.loads(sampled.stdout), read(out)
    assert found["prompts"] == 3 and found["wins"] + found["ties"] + found["losses"] == 3
    assert found["rate"] == sum({"a": 1, "tie": 0.5, "b": 0}[pair["better"]] for pair in pairs) / 3
    assert found["low"] < found["rate"] < found["high"] and found["position_bias"] is None
    assert found["cut_off"] == {"a": 3, "b": 3}
    for pair in pairs:
        assert pair["scores"] == {"a": -len(pair["a"]), "b": -len(pair["b"])} and pair["a"] != pair["b"]


def test_the_default_rule_follows_from_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_reward("world") == WORLD_REWARD
    Path("world").touch()  # a file of the user, which `read_prompts` reads
    assert default_reward("world") == "exact_match"


def test_exact_match_needs_targets() -> None:
    for messages in ([], [{"role": "assistant", "content": "yes"}]):
        with pytest.raises(ValueError, match="not all prompts have answers"):
            check_targets("exact_match", [{"prompt": "?", "answer": "yes"}, {"messages": messages}])
    with pytest.raises(ValueError, match="`answer` of an example must be a string or messages, found 4"):
        check_targets("exact_match", [{"prompt": "2 + 2", "answer": 4}])
    check_targets("exact_match", [{"prompt": "?", "messages": None, "answer": "yes"}])
    check_targets("json", [{"prompt": "?"}])  # any object is right


def test_a_judge_reports_its_bias(demo_run: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "prompt")
    arguments = ("compare", demo_run, demo_run, "--prompts", prompts, "--judge", demo_run, "--temperature", 2.0)
    printed = regard(*arguments, *SHORT)
    assert printed.exit_code == 0, printed.output
    assert "the judge preferred the answer shown first in" in printed.output.replace("\n", " ")
    found = json.loads(regard(*arguments, *SHORT, "--json").stdout)
    assert found["position_bias"]["pairs"] == 3 and found["by"] == str(demo_run) and found["unanswered"] == 0


def test_questions_that_a_judge_does_not_answer_are_reported(demo_run: Path, tmp_path: Path) -> None:
    numbers = count()

    def answer(body: dict[str, Any] | None) -> tuple[Any, ...]:
        return (200, MODELS) if body is None else reply("A" if next(numbers) % 6 else "Neither A nor B")

    prompts, out = write_prompts(tmp_path, "prompt"), tmp_path / "pairs.jsonl"
    with stub_server(answer) as url:
        sampled = ("--prompts", prompts, "--judge", url, "--temperature", 2.0, *SHORT)
        printed = regard("compare", demo_run, demo_run, *sampled)
        labelled = regard("feedback", "label", demo_run, *sampled, "--inconsistent", "average", "--out", out)
        found = json.loads(regard("compare", demo_run, demo_run, *sampled, "--json").stdout)
    for result in (printed, labelled):
        assert "replied to 1 of 6 questions with neither A nor B" in result.output.replace("\n", " "), result.output
    assert found["unanswered"] == 1 and found["position_bias"]["pairs"] == 2


def test_the_result_is_printed_before_the_pairs_are_written(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left")

    out = tmp_path / "pairs.jsonl"
    out.write_text("earlier", encoding="utf-8")
    monkeypatch.setattr(os, "fsync", full)
    result = regard("compare", demo_run, demo_run, "--prompts", "world", "--count", 2, "--out", out, *SHORT)
    assert "no space left" in str(result.exception) and "50.0%" in result.output
    assert list(tmp_path.iterdir()) == [out] and out.read_text(encoding="utf-8") == "earlier"


def test_revisions_are_written_once(demo_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "revised.jsonl"
    arguments = ("feedback", "revise", demo_run, "--prompts", write_prompts(tmp_path, "prompt"), "--out", out, *SHORT)
    assert regard(*arguments, "--rounds", 2).exit_code == 0
    rows = read(out)
    assert [row["messages"][0]["content"] for row in rows] == ["Where is Anna?", "Where is Ben?", "Where is Clara?"]
    assert all(row["messages"][1]["content"] == row["rounds"][1]["revision"] for row in rows)
    before = out.read_bytes()
    out.write_bytes(before[:-10])  # as if it had been killed while writing
    again = regard(*arguments, "--rounds", 2)
    assert "has lines up to prompt 2 of 3; those after it" in again.output and out.read_bytes() == before
    assert "with these prompts and settings" in str(regard(*arguments, "--rounds", 1).exception)


def test_answers_are_conversations_to_learn_from(demo_run: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "answers.jsonl", write_prompts(tmp_path, "prompt")
    arguments = ("feedback", "answer", demo_run, "--prompts", prompts, "--out", out, *SHORT)
    first = regard(*arguments)
    assert first.exit_code == 0 and "3 conversations, 3 of them new" in first.output, first.output
    rows = read(out)
    assert [row["messages"][0]["content"] for row in rows] == ["Where is Anna?", "Where is Ben?", "Where is Clara?"]
    assert all(row["messages"][1]["role"] == "assistant" and row["messages"][1]["content"] for row in rows)
    assert "3 conversations, 0 of them new" in regard(*arguments).output
    before, model = out.read_bytes(), tmp_path / "model"
    shutil.copytree(newest_checkpoint(demo_run), model)
    assert "0 of them new" in regard("feedback", "answer", model, *arguments[3:]).output  # the same weights
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    other = regard("feedback", "answer", model, *arguments[3:])
    assert "line 1: written with another model" in str(other.exception) and out.read_bytes() == before
    student = regard("tune", "sft", demo_run, "--data", out, "--out", tmp_path / "run", "--train.steps=1", "--show")
    assert student.exit_code == 0, student.output


def test_labelled_pairs_are_examples(demo_run: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "pairs.jsonl", write_prompts(tmp_path, "prompt")
    arguments = ("feedback", "label", demo_run, "--prompts", prompts, "--judge", demo_run, "--out", out, *SHORT)
    result = regard(*arguments, "--inconsistent", "average")
    assert result.exit_code == 0, result.output
    assert "3 new pairs of 3 prompts; 0 had equal answers, 0 no verdict" in result.output
    for row in read_examples(out):
        assert row["chosen"] != row["rejected"] and row["prompt"].startswith("Where") and 0.5 <= row["preference"] <= 1
    before = out.read_bytes()
    assert "is complete" in regard(*arguments, "--inconsistent", "average").output and out.read_bytes() == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 5}, "line 1: `messages` must be a list"),
        ({"prompt": []}, "line 1: `messages` must be a list"),
        ({"prompt": ""}, "line 1: the prompt is empty"),
        ({"prompt": "\ud800"}, "line 1: .*surrogates not allowed"),
        ({"prompt": [1]}, "line 1: a message needs `role`"),
        ({"prompt": "Where?", "messages": "x"}, "line 1: `messages` must be a list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 1: this conversation has no message before"),
    ],
)
def test_wrong_prompts_are_refused_with_their_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(str(path))


def test_a_column_of_messages_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Where?", "messages": None, "answer": " here"}), encoding="utf-8")
    (example,) = read_prompts(str(path))
    assert target_of(example) == "here"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--by", "json"), ("--judge", "RUN"), ("--judge-name", "x"), ("--constitution", "x.toml"), ("--count", 3),
        ("--max-new", 4), ("--temperature", 0.0), ("--out", "x.jsonl"),
    ],
)  # fmt: skip
def test_options_of_answers_need_prompts(name: str, value: object) -> None:
    result = regard("compare", "A", "B", name, value)
    assert result.exit_code == 2 and f"{name} is for answers; give prompts with --prompts" in result.output


@pytest.mark.parametrize(
    ("name", "value"),
    [("--text", "x.txt"), ("--tokens", 9), ("--length", 9), ("--quantize", "int8"), ("--cache", "int8"),
     ("--speed", None), ("--no-speed", None)],
)  # fmt: skip
def test_options_of_the_table_exclude_prompts(name: str, value: object) -> None:
    given = [name] if value is None else [name, value]
    result = regard("compare", "A", "B", "--prompts", "world", *given)
    found = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and f"{name} is for the table of sizes and perplexities; leave --prompts out" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "RUN", "nowhere", "--prompts", "world"), "nowhere"),
        (("compare", "RUN", "RUN", "--prompts", "missing.jsonl"), "there is no such file"),
        (("compare", "RUN", "RUN", "--prompts", "EMPTY"), "is empty"),
        (("compare", "RUN", "RUN", "--prompts", "TEXTS"), "line 1: no `prompt` or `messages`; it has text"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS"), "give a rule with --by, or a judge with --judge"),
        (("compare", "RUN", "RUN", "--prompts", "OPEN"), "give a rule with --by, or a judge with --judge"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--out", "nowhere/x.jsonl"), "there is no folder nowhere"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--out", "/dev/null"), "is not a file"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--out", "/proc/x.jsonl"), "files cannot be written in /proc"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS", "--out", "PROMPTS"), "has the prompts"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS", "--by", "exact_match"), "give a rule with --by"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS", "--by", "exact"), "--by='exact' is not a reward"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS", "--by", "RUN"), "is not a reward model"),
        (("compare", "RUN", "RUN", "--prompts", "PROMPTS", "--by", "json", "--judge", "RUN"), "exclude each other"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--constitution", "x"), "give one with --judge"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--judge-name", "x"), "give one with --judge"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--judge", "RUN", "--judge-name", "x"), "for an address"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--judge", "http://example.com"), "not on this machine"),
        (("compare", "RUN", "RUN", "--prompts", "world", "--judge", "http://127.0.0.1:9"), "cannot be reached"),
        (("feedback", "label", "RUN", "--prompts", "PROMPTS", "--judge", "RUN", "--temperature", "0"), "above 0"),
        (("feedback", "label", "RUN", "--prompts", "PROMPTS", "--judge", "nowhere"), "nowhere"),
        (("feedback", "label", "RUN", "--prompts", "PROMPTS", "--judge", "http://127.0.0.1:9"), "cannot be reached"),
        (("feedback", "revise", "RUN", "--prompts", "TEXTS"), "no `prompt` or `messages`"),
        (("feedback", "revise", "RUN", "--prompts", "PROMPTS", "--constitution", "EMPTY"), "principles"),
    ],
)
def test_wrong_values_are_refused(arguments: tuple[str, ...], message: str, demo_run: Path, tmp_path: Path) -> None:
    texts = write_prompts(tmp_path, "text").rename(tmp_path / "texts.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    unanswered = tmp_path / "open.jsonl"
    unanswered.write_text(json.dumps({"messages": [{"role": "user", "content": "Where?"}]}), encoding="utf-8")
    places = {
        "RUN": demo_run,
        "EMPTY": empty,
        "OPEN": unanswered,
        "TEXTS": texts,
        "PROMPTS": write_prompts(tmp_path, "prompt"),
    }
    out = ("--out", tmp_path / "out.jsonl") if arguments[0] == "feedback" else ()
    result = regard(*(places.get(argument, argument) for argument in arguments), *out)
    assert result.exit_code != 0 and message in f"{result.output} {result.exception}"
    assert not (tmp_path / "out.jsonl").exists()
