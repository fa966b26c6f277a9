"""`regard eval`: greedy outputs of a run, of the examples that it holds out or of a file."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from regard.checkpoint.model_folder import save
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.text.train import byte
from regard.training.run import newest_checkpoint
from tests.cli.conftest import regard

SMALL = (
    "--model.width=16", "--model.layers.0.times=1", "--tokenizer.by=byte", "--data.task=record", "--data.rows=2",
    "--data.length=256", "--data.held_out=1", "--train.steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "run"
    assert regard("train", "demo", "--out", path, *SMALL).exit_code == 0
    return path


def test_the_held_out_examples_of_the_run_are_graded(run: Path) -> None:
    result = regard("eval", run, "--count", 2, "--max-new", 4)
    assert result.exit_code == 0, result.exception
    assert "2 examples of world record level 1, held-out" in result.stdout
    assert "exact match                 0.0%\nobjects with the right keys 0.0%\n" in result.stdout
    graded = json.loads(regard("eval", run, "sft", "--data.level=2", "--count", 2, "--max-new", 4, "--json").stdout)
    assert graded["exact_match"] == graded["form"] == 0 and len(graded["outputs"]) == 2


def test_all_examples_of_a_file_are_graded(run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ", "completion": "a", "messages": None} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    graded = json.loads(regard("eval", run, "--data", tmp_path / "rows.jsonl", "--max-new", 1, "--json").stdout)
    assert sorted(output["prompt"] for output in graded["outputs"]) == ["0 ", "1 ", "2 "] and "form" not in graded


def test_a_model_is_graded_in_few_bits(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    options = ("eval", run, "--data", tmp_path / "rows.jsonl", "--max-new", 2, "--json")
    assert len(json.loads(regard(*options, "--quantize", "int8").stdout)["outputs"]) == 1
    assert "format='int9' is unknown" in str(regard(*options, "--quantize", "int9").exception)


def test_a_target_may_be_messages(run: Path, tmp_path: Path) -> None:
    answer = [{"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "a"}], "completion": answer})
    )
    found = json.loads(regard("eval", run, "--data", tmp_path / "rows.jsonl", "--max-new", 1, "--json").stdout)
    assert found["outputs"][0]["target"] == "b"


def test_outputs_are_rated_by_a_function(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts without targets, also of conversations that end with a question."""
    (tmp_path / "eval_rules.py").write_text(
        "def rule(prompts, completions, sign, **columns):\n    return [s * len(p) for s, p in zip(sign, prompts)]\n"
    )
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a" * n, "sign": -1} for n in (1, 2)]
    chat = {"messages": [{"role": "user", "content": "a"}], "sign": 1}
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, chat])))
    options = ("eval", run, "--data", "rows.jsonl", "--max-new", 1, "--reward", "eval_rules:rule")
    rated = json.loads(regard(*options, "--json").stdout)
    assert rated.keys() == {"reward", "outputs"} and rated["reward"] == pytest.approx(-2 / 3)
    assert sorted(output["reward"] for output in rated["outputs"]) == [-2, -1, 1]
    assert "mean reward                 -0.667\n" in regard(*options).stdout


def test_a_run_that_learned_from_preferences_has_a_perplexity(run: Path, tmp_path: Path) -> None:
    Path(tmp_path / "other.txt").write_text("Some other text. " * 40)
    options = ("--data", tmp_path / "other.txt", "--json", "--objective.kind=dpo")
    found = json.loads(regard("eval", newest_checkpoint(run), *options).stdout)
    assert found["objective"] == "next_token" and found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_the_perplexity_is_that_of_the_next_token_alone(tmp_path: Path) -> None:
    tokenizer, block = byte(), Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(16))))
    plain = Decoder(tokenizer.vocab_size, 16, (Repeat((block,), 1),)).build(seed=0)
    ahead = Decoder(tokenizer.vocab_size, 16, (Repeat((block,), 1),), ahead=(block,)).build(seed=1)
    ahead.load_state_dict(plain.state_dict(), strict=False)
    (tmp_path / "text.txt").write_text("Some other text. " * 40)
    found = {}
    for name, model, z_loss in (("plain", plain, 0.0), ("ahead", ahead, 0.1)):
        save(model, tmp_path / name, tokenizer)
        objective = ("--objective.kind=next_token", f"--objective.z_loss={z_loss}")
        options = ("--data", tmp_path / "text.txt", *objective, "--json")
        found[name] = json.loads(regard("eval", tmp_path / name, *options).stdout)
    assert found["plain"]["perplexity"] == pytest.approx(math.exp(found["plain"]["loss"]))
    assert found["ahead"]["ahead_1"] > 0
    assert found["ahead"]["perplexity"] == pytest.approx(found["plain"]["perplexity"], rel=1e-5)


def test_reinforcement_learning_is_evaluated_by_the_reward_of_the_run(run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "answer": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = "--objective.reward=tests.cli.test_evaluate:always_two"
    options = ("--data", tmp_path / "rows.jsonl", "--max-new", 1, "--json", "--objective.kind=grpo", reward)
    rated = json.loads(regard("eval", newest_checkpoint(run), *options).stdout)
    assert rated["reward"] == 2 and len(rated["outputs"]) == 3


def test_completions_with_labels_are_not_targets(run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": text, "label": text == "b"} for text in "bcbc"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    checkpoint = newest_checkpoint(run)
    options = ("--data", tmp_path / "rows.jsonl", "--json", "--objective.kind=kto", f"--from={checkpoint}")
    result = regard("eval", checkpoint, *options)
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["objective"] == "kto" and found["loss"] == pytest.approx(0.5)
    unused = regard("eval", checkpoint, "--data", tmp_path / "rows.jsonl", "--reward", "json", "--from", checkpoint)
    assert unused.exit_code == 2 and "--from is for objectives" in " ".join(unused.output.split())


def always_two(completions: list[Any], **columns: Any) -> list[float]:
    return [2.0] * len(completions)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prompt": "a"}, {"text": "b"}], ("--reward", "tests.cli.test_evaluate:always_two"),
         r"rows\.jsonl.* line 2: --reward tests.* needs `prompt`, `messages` or `source`; this example has text"),
        ([{"prompt": "a"}], ("--reward", "nowhere"), "--reward='nowhere' is not a reward"),
        ([{"completion": "a"}], (), r"line 1: a generated output needs `prompt`.*; this example has completion"),
    ],
)  # fmt: skip
def test_rows_without_a_prompt_are_named(
    rows: list[dict], options: tuple[str, ...], message: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = regard("eval", run, "--data", tmp_path / "rows.jsonl", "--max-new", 1, *options)
    assert isinstance(result.exception, ValueError) and re.search(message, str(result.exception))


def test_wrong_uses_are_refused(run: Path, tmp_path: Path) -> None:
    assert "not a run with a recipe" in regard("eval", tmp_path).stderr
    assert "omit sft" in regard("eval", run, "sft", "--data", "x.jsonl").stderr
    assert "this example has text, label" in str(regard("eval", run, "classify").exception)
