"""Every command on a small model, as a user would call it."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard.cli import app, main
from regard.engine.engine import Engine
from regard.engine.request import GenerationError
from tests.cli.conftest import regard


def test_demo_writes_a_summary_and_a_report(demo_run: Path) -> None:
    summary = json.loads((demo_run / "summary.json").read_text())
    assert {"exact_match", "train_seconds", "parameters", "val_loss"} <= set(summary)
    report = (demo_run / "report.html").read_text()
    assert report.count("data:image/png;base64") == 3 and "http" not in report


def test_a_second_demo_does_not_train_again(demo_run: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in demo_run.rglob("*"))
    second = regard("demo", "--out", demo_run)
    assert second.exit_code == 0 and "is trained (exact match" in second.output and "no effect" not in second.output
    assert "no effect" in regard("demo", "--out", demo_run, "--questions", 7).output
    assert sorted((path, path.stat().st_mtime_ns) for path in demo_run.rglob("*")) == before


def test_generate_prints_ids_text_and_logprobs(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 6, "--temperature", 0, "--json")
    first, second = (json.loads(regard(*arguments).stdout) for _ in range(2))
    assert first == second
    assert len(first["ids"]) == len(first["logprobs"]) <= 6 and isinstance(first["text"], str)


def test_generate_draws_n_texts_in_one_batch_with_the_seeds_after_the_first(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 5, "--json")
    texts = [json.loads(line)["text"] for line in regard(*arguments, "--n", 3, "--seed", 7).stdout.splitlines()]
    assert texts == [json.loads(regard(*arguments, "--seed", seed).stdout)["text"] for seed in (7, 8, 9)]
    printed = regard(*arguments[:-1], "--n", 3, "--seed", 7).stdout
    assert printed == "\n".join(f"Anna is in{text}\n" for text in texts)


def test_generate_and_chat_reserve_memory_for_their_requests_only(
    demo_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    class Recorded(Engine):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            rows.append(self.store.rows)

    monkeypatch.setattr("regard.language_model.Engine", Recorded)
    assert regard("generate", demo_run, "--prompt", "Anna", "--max-new", 2, "--n", 3).exit_code == 0
    assert regard("chat", demo_run, "--max-new", 2, stdin="Where?\n").exit_code == 0
    assert rows == [3, 1]


def test_generate_prints_the_most_likely_tokens(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 5, "--temperature", 0)
    found = json.loads(regard(*arguments, "--json", "--logprobs", 3).stdout)
    assert [top[0]["id"] for top in found["top_logprobs"]] == found["ids"]
    assert [top[0]["logprob"] for top in found["top_logprobs"]] == found["logprobs"]
    assert all(len(top) == 3 and isinstance(top[0]["token"], str) for top in found["top_logprobs"])
    assert found["finish"] in ("stop", "length")
    assert "with --json only" in str(regard(*arguments, "--logprobs", 3).exception)


def test_generate_follows_a_schema_an_expression_or_choices(demo_run: Path, tmp_path: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 60, "--seed", 3, "--json")

    def text(*options: object) -> str:
        found = json.loads(regard(*arguments, *options).stdout)
        assert found["finish"] == "stop"
        return found["text"]

    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"age": {"type": "integer", "maximum": 120}}, "required": ["age"]}'
    )
    assert json.loads(text("--schema", schema))["age"] <= 120
    assert re.fullmatch("[0-9]{3}-[a-f]", text("--regex", "[0-9]{3}-[a-f]"))
    assert text("--choice", "the barn", "--choice", "the house") in ("the barn", "the house")
    assert "exclude each other" in str(regard(*arguments, "--regex", "a", "--choice", "b").exception)
    assert "needs a CUDA GPU" in str(regard(*arguments, "--batch-invariant", "--device", "cpu").exception)
    schema.write_text("{")
    assert "the schema is not JSON" in str(regard(*arguments, "--schema", schema).exception)


def test_generate_with_a_smaller_cache(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 300, "--temperature", 0, "--json")
    endless = json.loads(regard(*arguments, "--cache", "sinks:2+14").stdout)
    assert len(endless["ids"]) == 300 or endless["finish"] == "stop"
    assert "there is no cache 'int'" in str(regard(*arguments, "--cache", "int").exception)
    refused = regard(*arguments, "--cache", "window:8", "--batch-invariant").exception
    assert "--cache does not support --batch-invariant" in str(refused)


def test_generate_with_drafts_prints_the_same_text_and_statistics(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in the barn. Anna is", "--max-new", 30, "--temperature", 0)
    plain = regard(*arguments, "--json").stdout
    for method in ("ngram", "lookahead", "self:1", f"draft:{demo_run}"):
        assert json.loads(regard(*arguments, "--json", "--speculate", method).stdout)["ids"] == json.loads(plain)["ids"]
    printed = regard(*arguments, "--speculate", f"draft:{demo_run}", "--draft-tokens", 3, "--stats").stderr
    assert "tokens/s" in printed and "by position in the draft" in printed and "per forward with a draft" in printed
    errors = {
        "eagles": "there is no method 'eagles'",
        "draft": "use --speculate draft:MODEL, the smaller model",
        "medusa": "use --speculate medusa:FOLDER, written by regard speculate train",
        "eagle:nowhere": "nowhere has no drafter; train one: regard speculate train MODEL nowhere",
        "self:x": "'x' is not a number of layers",
        "self:٣": "'٣' is not a number of layers",
        "self:9": "choose from 1 to 2 of them",
        "self": "the model has no blocks `ahead`",
        "ngram:3": "use --speculate ngram",
    }
    for method, message in errors.items():
        assert message in str(regard(*arguments, "--speculate", method).exception)
    for method in ("ngram", "self:1"):
        refused = regard(*arguments, "--speculate", method, "--draft-chains", 2).exception
        assert "--draft-chains 2 needs --speculate medusa:FOLDER, eagle:FOLDER or self" in str(refused)
    refused = regard(*arguments, "--speculate", "ngram", "--batch-invariant").exception
    assert "--speculate does not support --batch-invariant" in str(refused)


def test_generate_with_few_bits_a_smaller_cache_and_drafts(demo_run: Path) -> None:
    """The tokens with drafts are those of the same weights and cache without them."""
    arguments = ("generate", demo_run, "--prompt", "Anna is in the barn. Anna is", "--max-new", 12, "--temperature", 0)
    for cache in ("int4:4", "sinks:2+14", "h2o:16"):
        given = (*arguments, "--json", "--quantize", "int8", "--cache", cache)
        plain, drafted = (json.loads(regard(*given, *more).stdout) for more in ((), ("--speculate", "ngram")))
        assert drafted["ids"] == plain["ids"], cache


def test_a_drafter_is_trained_and_used(demo_run: Path, tmp_path: Path) -> None:
    steps = ("--train.steps=2", "--data.length=32", "--data.rows=1", "--data.held_out=1")
    arguments = ("generate", demo_run, "--prompt", "Anna is in the barn. Anna is", "--max-new", 20, "--temperature", 0)
    plain = json.loads(regard(*arguments, "--json").stdout)["ids"]
    for method in ("medusa", "eagle"):
        out = tmp_path / method
        trained = regard("speculate", "train", demo_run, out, "--method", method, "--data.source=world", *steps)
        assert "accepted on held-out text: " in trained.stdout and f"--speculate {method}:{out}" in trained.stdout
        with_drafts = regard(*arguments, "--json", "--speculate", f"{method}:{out}", "--draft-chains", 3).stdout
        assert json.loads(with_drafts)["ids"] == plain
    refused = regard(*arguments, "--speculate", f"eagle:{tmp_path / 'medusa'}").exception
    assert "has a drafter of kind medusa; use --speculate medusa:" in str(refused)
    refused = regard("speculate", "train", demo_run, tmp_path / "other", "--method", "eagle", "--shared").exception
    assert "options of --method medusa" in str(refused)
    refused = regard("speculate", "train", demo_run, tmp_path / "other").exception
    assert "there are no examples; give a file or folder with --data" in str(refused)


@pytest.mark.parametrize("command", ["quantize", "export", "import", "speculate train"])
def test_the_place_of_a_new_model_is_checked_first(command: str, demo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    options = ("--data.source=world",) if command == "speculate train" else ()
    for out, message in {
        tmp_path / "file": "exists; choose another name",
        tmp_path / "link": "exists; choose another name",
        tmp_path / "file" / "out": f"files cannot be written in {tmp_path / 'file'} (Not a directory)",
        Path("/proc/new/out"): "files cannot be written in /proc",
    }.items():
        assert message in str(regard(*command.split(), demo_run, out, *options).exception)


def test_generate_ends_before_a_stop_string(demo_run: Path) -> None:
    arguments = ("generate", demo_run, "--prompt", "Anna is in", "--max-new", 20, "--temperature", 0, "--json")
    text = json.loads(regard(*arguments).stdout)["text"]
    stop = text[len(text) // 2 :][:2]
    assert json.loads(regard(*arguments, "--stop", stop).stdout)["text"] == text[: text.index(stop)]


def test_a_smaller_context_limits_prompt_and_output(demo_run: Path) -> None:
    result = regard("generate", demo_run, "--prompt", "Anna is in the barn. " * 3, "--context", 8)
    assert isinstance(result.exception, ValueError) and "must fit into 8" in str(result.exception)
    short = regard("generate", demo_run, "--prompt", "Anna is", "--context", 8, "--temperature", 0, "--json")
    assert len(json.loads(short.stdout)["ids"]) <= 6


def test_plan_takes_the_vocabulary_from_the_tokenizer(demo_run: Path) -> None:
    def parameters(*options: str) -> int:
        return json.loads(regard("plan", "demo", "--json", *options).stdout)["parameters"]["total"]

    assert parameters("--tokenizer.by=byte") == parameters("--model.vocab=261")
    assert "depends on the data" in str(regard("plan", "demo", "--tokenizer.by=character").exception)
    assert "cannot change it" in str(regard("plan", demo_run, "--model.width=256").exception)


def test_plan_accepts_recipes_runs_and_overrides(demo_run: Path) -> None:
    recipe_plan = json.loads(regard("plan", "demo", "--json").stdout)
    model_plan = json.loads(regard("plan", demo_run, "--json").stdout)
    assert recipe_plan["parameters"]["total"] >= model_plan["parameters"]["total"]
    wider_plan = json.loads(regard("plan", "demo", "--json", "--model.width=256").stdout)
    assert wider_plan["parameters"]["total"] > recipe_plan["parameters"]["total"]


def test_an_exported_and_imported_model_generates_the_same_text(demo_run: Path, tmp_path: Path) -> None:
    options = ("--prompt", "Anna is in", "--max-new", 12, "--temperature", 0, "--json")
    run = tmp_path / "run"
    short_training = ("--train.steps=2", "--data.rows=2", "--data.length=64", "--tokenizer.documents=50")
    assert regard("train", "llama", "--out", run, *short_training).exit_code == 0
    assert "short_convolution" in str(regard("export", demo_run, tmp_path / "no").exception)  # Llama has none
    assert regard("export", run, tmp_path / "out", "--family", "llama").exit_code == 0
    assert f"name it {tmp_path / 'no'}.gguf" in str(regard("export", run, tmp_path / "no", "--gguf", "q8_0").exception)
    imported = regard("import", tmp_path / "out", tmp_path / "back")
    assert imported.exit_code == 0 and "try: regard generate" in imported.output
    assert regard("generate", tmp_path / "back", *options).stdout == regard("generate", run, *options).stdout
    assert "exists" in str(regard("import", tmp_path / "out", tmp_path / "back").exception)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_an_unavailable_device_is_refused(demo_run: Path, device: str) -> None:
    refused = regard("generate", demo_run, "--prompt", "Anna", "--device", device)
    assert isinstance(refused.exception, ValueError)
    assert f"there is no device {device!r} here; choose one of auto, cpu" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("models", "--json"), 0, ""),
        (("chat", "smolm2"), 1, "regard: 'smolm2' is neither a file or folder nor a known name"),
        (("chat",), 2, "Missing argument 'MODEL'"),
    ],
)
def test_commands_exit_with_a_code_and_a_message_without_a_traceback(
    arguments: tuple[str, ...], code: int, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["regard", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    printed = capsys.readouterr().err
    assert exited.value.code == code and error in printed and "Traceback" not in printed


@pytest.mark.parametrize("error, reported", [(GenerationError, True), (RuntimeError, False)])
def test_a_failed_generation_is_reported_and_a_bug_keeps_its_traceback(
    error: type[Exception], reported: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(name: object) -> None:
        raise error("no finite logits")

    monkeypatch.setattr("regard.cli.open_model.find_model", fail)
    monkeypatch.setattr("sys.argv", ["regard", "chat", "smollm2"])
    with pytest.raises(SystemExit if reported else error):
        main()
    assert ("regard: no finite logits" in capsys.readouterr().err) == reported


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.open_model.find_model", interrupt)
    monkeypatch.setattr("sys.argv", ["regard", "chat", "smollm2"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 130


def test_an_interrupt_of_the_imports_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "regard.cli", Interrupted("regard.cli"))
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("regard", run_name="__main__")
    assert exited.value.code == 130


def test_version_is_printed_and_wrong_usage_exits_with_2() -> None:
    assert regard("--version").stdout.strip()
    assert regard("no-such-command").exit_code == 2
    assert regard("generate").exit_code == 2


@pytest.mark.parametrize("command", [c.name for c in app.registered_commands])
def test_help_has_an_example(command: str) -> None:
    result = regard(command, "--help")
    assert result.exit_code == 0 and "Example" in result.output and f"regard {command}" in result.output


def test_flags_are_frozen() -> None:
    """Scripts depend on these flags; removing one is a breaking change."""
    from typer.main import get_command

    commands = get_command(app).commands  # ty: ignore
    options = {name: [o for p in c.params for o in (*p.opts, *p.secondary_opts)] for name, c in commands.items()}
    flags = {name: {option for option in found if option.startswith("--")} for name, found in options.items()}
    assert flags["generate"] >= {
        "--prompt",
        "--image",
        "--max-new",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--stop",
        "--json",
        "--n",
        "--logprobs",
        "--schema",
        "--regex",
        "--choice",
        "--tensor-parallel",
        "--batch-invariant",
        "--quantize",
        "--cache",
        "--speculate",
        "--draft-tokens",
        "--draft-chains",
        "--stats",
    }
    for name in ("chat", "serve", "batch", "bench serve"):
        assert {"--quantize", "--cache", "--speculate", "--draft-tokens", "--draft-chains"} <= flags[name], name
    assert "--quantize" in flags["eval"]
    assert flags["serve"] >= {"--host", "--port", "--key", "--name", "--rows", "--context", "--device"}
    assert flags["serve"] >= {"--memory", "--queue", "--max-body", "--dtype", "--compile", "--no-compile", "--adapter"}
    assert flags["serve"] >= {"--allow-host", "--allow-origin", "--access-log", "--replicas", "--tensor-parallel"}
    assert flags["serve"] >= {"--lora-modules", "--lora-folder", "--max-loras", "--max-cpu-loras", "--batch-invariant"}
    assert "--runs" in flags["serve"]
    assert flags["batch"] >= {
        "--memory",
        "--name",
        "--rows",
        "--context",
        "--device",
        "--adapter",
        "--dtype",
        "--compile",
        "--batch-invariant",
    }
    assert flags["bench serve"] >= {"--concurrency", "--rate", "--requests", "--duration", "--file", "--json", "--key"}
    assert flags["bench serve"] >= {"--prompt-tokens", "--output-tokens", "--shared-prefix", "--name", "--seed"}
    assert flags["train"] >= {"--out", "--resume", "--device"}
    assert flags["speculate train"] >= {"--method", "--data", "--heads", "--shared", "--device"}
    assert flags["transcribe"] >= {"--language", "--translate", "--timestamps", "--format", "--output", "--prompt"}
    assert flags["plan"] >= {"--context", "--batch", "--dtype", "--json"}
    assert flags["lens"] >= {"--text", "--layer", "--head", "--out", "--json"}
    assert flags["lens names"] >= {"--text", "--all", "--json"} and flags["lens logits"] >= {
        "--text",
        "--top",
        "--json",
    }
    assert flags["lens attribute"] >= {"--text", "--token", "--minus", "--by", "--json"}
    assert flags["lens patch"] >= {
        "--clean",
        "--corrupted",
        "--answer",
        "--wrong",
        "--names",
        "--by",
        "--out",
        "--json",
    }
    assert flags["chat"] >= {"--system", "--max-new", "--temperature", "--top-p", "--seed"}
    assert flags["demo"] >= {"--out", "--steps", "--questions"}
    assert flags["export"] >= {"--family", "--gguf"} and flags["models"] >= {"--json"} and flags["doctor"] >= {"--json"}


def test_the_name_of_several_commands_lists_them() -> None:
    for arguments in (("feedback",), ("feedback", "--help"), ("bench", "-h")):
        result = regard(*arguments)
        assert result.exit_code == 0, result.output
        assert f"regard {arguments[0]} " in result.output
    assert "No such command" in regard("feedback", "lable").output
