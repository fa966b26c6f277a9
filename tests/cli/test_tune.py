"""`regard tune`: methods, adapters and full weights, resuming, wrong values."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from regard import Attention, Block, Decoder, Repeat, Rope, Sublayer, SwiGLU, Tokenizer, load, save
from regard.checkpoint.model_folder import load as load_folder
from regard.cli.tune import METHODS
from regard.engine.engine import Engine
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.training.run import Run
from tests.cli.conftest import regard
from tests.server.conftest import serve

SMALL = ("--train.steps=4", "--train.save_every=2", "--data.rows=2", "--data.length=40", "--data.held_out=1")
REWARD = "tests.cli.test_tune:count_letters"
EXAMPLES: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "Where is Anna?", "completion": " In the park."},
    "distill": {"prompt": "Where is Anna?", "completion": " In the park."},
    **dict.fromkeys(("grpo", "rloo", "ppo"), {"prompt": "Where is Anna?", "answer": "In the park."}),
    "kto": {"prompt": "Where is Anna?", "completion": " In the park.", "label": True},
    **dict.fromkeys(
        ("reward", "dpo", "simpo", "orpo"),
        {"prompt": "Where is Anna?", "chosen": " In the park.", "rejected": " I know."},
    ),
}


def count_letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("a")) for text in completions]


def write_examples(method: str, folder: Path) -> Path:
    """Twelve examples with different prompts; every second one of single completions is bad."""
    path = folder / "examples.jsonl"
    rows = [EXAMPLES[method] | {"prompt": f"Where is Anna {n}?"} for n in range(12)]
    rows = [row | {"label": n % 2 == 0} if "label" in row else row for n, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def weights(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Run.open(run).checkpoint(4).iterdir()}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_and_resumes_with_the_same_result(
    method: str, full: bool, demo_run: Path, tmp_path: Path
) -> None:
    out, stopped = tmp_path / "run", tmp_path / "stopped"
    arguments = ["--full"] if full else ["--adapter.rank=4"] if method in ("sft", "reward") else []
    arguments += {
        "distill": [f"--objective.teacher={demo_run}"],
        "grpo": ["--objective.group=2", "--objective.max_new=4", "--objective.updates=2", "--reward", REWARD],
        "rloo": ["--objective.group=2", "--objective.max_new=4", "--reward", REWARD],
        "ppo": ["--objective.epochs=4", "--objective.max_new=4", "--reward", REWARD],
    }.get(method, [])
    result = regard(
        "tune", method, demo_run, "--data", write_examples(method, tmp_path), "--out", out, *SMALL, *arguments
    )
    assert result.exit_code == 0, result.output
    assert ("adapter" in Run.open(out).config) != full
    if method == "reward":
        assert Run.open(out).config["train"]["lr"] == (1e-5 if full else 1e-4)
    shutil.copytree(out, stopped)
    shutil.rmtree(Run.open(stopped).checkpoint(4))  # as if it had been killed after step 2
    resumed = regard("train", "--resume", stopped)
    assert resumed.exit_code == 0, resumed.output
    assert weights(stopped) == weights(out)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_a_model_tuned_by_ppo_is_chatted_with_served_and_exported(full: bool, demo_run: Path, tmp_path: Path) -> None:
    """With all weights the model has a value head, which only training uses."""
    start, run, exported = tmp_path / "start", tmp_path / "run", tmp_path / "exported"
    tokenizer = Tokenizer.load(demo_run / "tokenizer")
    layer = Block((Sublayer(Attention(2, position=Rope())), Sublayer(SwiGLU(24))))
    save(Decoder(tokenizer.vocab_size, 16, (Repeat((layer,)),), context=64).build(seed=0), start, tokenizer)
    options = ("--objective.max_new=4", "--reward", REWARD, "--train.lr=1e-2", *(["--full"] if full else []))
    data = write_examples("ppo", tmp_path)
    assert regard("tune", "ppo", start, "--data", data, "--out", run, *SMALL, *options).exit_code == 0
    chat = regard("chat", run, "--max-new", 4, "--temperature", 0, stdin="Where is Anna?\n")
    assert chat.exit_code == 0, chat.output
    llm = load(run, "cpu")
    assert llm.model.spec.value_head == full
    answer = llm.generate("Where is Anna?", max_new=6, temperature=0.0)
    with serve(create_app([ServedModel("tuned", llm.tokenizer, Engine(llm.model, rows=2))])) as port:
        body = {"model": "tuned", "prompt": "Where is Anna?", "max_tokens": 6, "temperature": 0}
        response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert response.json()["choices"][0]["text"] == answer
    merge = [] if full else ["--merge"]
    assert regard("export", run, exported, *merge).exit_code == 0
    tokens = torch.tensor([llm.tokenizer.encode("Where is Anna?")])
    model = load_folder(exported)
    with torch.no_grad():
        assert not model.spec.value_head and (model(tokens) - llm.model(tokens)).abs().max() < 1e-4
    gguf = tmp_path / "model.gguf"
    assert regard("export", run, gguf, "--gguf", "f32", *merge).exit_code == 0
    assert not load_folder(gguf).spec.value_head


def test_full_weights_have_a_tenth_of_the_rate_unless_it_is_given(demo_run: Path, tmp_path: Path) -> None:
    data = write_examples("dpo", tmp_path)
    for arguments, rate in (((), "0.0001"), (("--full",), "1e-05"), (("--full", "--train.lr=0.003"), "0.003")):
        result = regard("tune", "dpo", demo_run, "--data", data, "--show", *arguments)
        assert result.exit_code == 0, result.output
        assert f"lr = {rate}\n" in result.output, result.output
        assert ("[adapter]" in result.output) == ("--full" not in arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dop", "RUN", "--data", "DATA"), "did you mean 'dpo'?"),
        (("dpo", "RUN"), "give a file or folder with --data"),
        (("sft", "RUN", "--data", "DATA", "--full", "--adapter.rank=4"), "remove it, or --adapter.rank"),
        (("dpo", "nowhere", "--data", "DATA"), "nowhere"),
        (("kto", "RUN", "--data", "DATA"), "needs examples with prompt, completion, label"),
        (("dpo", "RUN", "--data", "DATA", "--objective.beta=0"), "beta=0.0 must be positive"),
        (("dpo", "RUN", "--data", "DATA", "--objective.loss=huber"), "huber"),
    ],
)
def test_wrong_values_are_refused_and_leave_no_run(
    arguments: tuple[str, ...], message: str, demo_run: Path, tmp_path: Path
) -> None:
    places = {"RUN": demo_run, "DATA": write_examples("dpo", tmp_path)}
    result = regard("tune", *(places.get(argument, argument) for argument in arguments), "--out", tmp_path / "run")
    assert result.exit_code != 0 and message in f"{result.output} {result.exception}"
    assert not (tmp_path / "run").exists()


def test_more_steps_compute_the_missing_log_probabilities_with_the_first_weights(
    demo_run: Path, tmp_path: Path
) -> None:
    """Rows that only the longer run sees are compared with the model before training, not with the trained one."""
    short, long = tmp_path / "short", tmp_path / "long"
    common = ["tune", "dpo", demo_run, "--full", "--data.source=world", "--data.task=preference", "--data.rows=2"]
    constant = ("--train.schedule.kind=constant", "--train.schedule.warmup=0")
    assert regard(*common, "--out", short, "--train.steps=2", *constant).exit_code == 0
    result = regard("train", "--resume", short, "--train.steps=4", "--extend")
    assert result.exit_code == 0, result.output
    assert regard(*common, "--out", long, "--train.steps=4", *constant).exit_code == 0
    files = ("model.safetensors", "optimizer.safetensors")
    assert all(weights(short)[file] == weights(long)[file] for file in files)
