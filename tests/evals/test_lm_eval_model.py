"""lm-evaluation-harness on our models: its numbers on its model of `transformers`, on ours, and our own are equal.

lm-eval is not in requirements.lock, because of what it depends on (docs/log.md); where it is missing, these tests are
skipped, and tests/server/test_lm_eval.py holds the requests and responses of its clients.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'regard[lm-eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports

from regard.checkpoint.model_folder import export  # noqa: E402
from regard.evals.lm_eval_model import LmEvalModel, estimates, run_lm_eval  # noqa: E402
from regard.evals.local_model import LocalModel  # noqa: E402
from regard.evals.task_file import read_task  # noqa: E402
from regard.evals.task_run import TaskResult, evaluate_task  # noqa: E402
from regard.families import llama  # noqa: E402
from regard.load_model import load  # noqa: E402
from regard.text.chat import DEFAULT_TEMPLATE  # noqa: E402
from regard.text.train import bpe  # noqa: E402
from tests.cli.conftest import regard  # noqa: E402
from tests.evals.tiny_decoder import TEXT  # noqa: E402

CONTEXT = 48  # tokens: longer texts have windows, longer prompts are truncated
DOCUMENTS = [
    {"story": TEXT, "question": "Where is the lamp?", "choices": ["the red box", "the kitchen", "unable"], "answer": 0},
    {"story": "Mira sat.", "question": "Who?", "choices": ["Mira", "the garden, said Mira", "a"], "answer": 0},
    {"story": f"{TEXT} {TEXT}", "question": "What?", "choices": ["box", "lamp"], "answer": 1},
    {"story": "Tomás — är här. The lamp?", "question": "Är?", "choices": ["på", "the lamp", "x y z"], "answer": 2},
]
PROMPT = "{{story}}\nQuestion: {{question}}\nAnswer:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lm_eval")
    tokenizer = bpe([TEXT] * 8, vocab=330)
    tokenizer.chat_template = DEFAULT_TEMPLATE
    config = {
        "vocab_size": 330, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    model = llama.spec(config).build(seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= 4  # far from uniform, so errors would show
    export(model, path / "model", "llama", tokenizer)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    outputs = [{"prompt": row["question"], "answer": row["choices"][0]} for row in DOCUMENTS]
    (path / "outputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in outputs))
    (path / "choice.toml").write_text(f'kind = "choice"\ndata = "rows.jsonl"\nprompt = {json.dumps(PROMPT)}')
    (path / "text.toml").write_text('kind = "perplexity"\ndata = "rows.jsonl"\ntext = "{{story}}"')
    keys = 'stop = ["\\n"]\nmax_new = 12\nanswer = "reference"\nprompt = "{{question}}"'
    references = [row | {"reference": row["choices"][row["answer"]]} for row in DOCUMENTS]
    (path / "references.jsonl").write_text("".join(json.dumps(row) + "\n" for row in references))
    (path / "generation.toml").write_text(f'kind = "generation"\ndata = "references.jsonl"\n{keys}')
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    return LocalModel(load(folder / "model", device="cpu"), rows=3, special=True)


def configurations(folder: Path) -> list[dict[str, Any]]:
    """The same tasks for lm-eval."""
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "references.jsonl")}},
        "test_split": "test", "num_fewshot": 0, "doc_to_text": PROMPT,
    }  # fmt: skip
    return [
        shared
        | {
            "task": "choice", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        shared
        | {
            "task": "text", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "story",
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
        },
        shared
        | {
            "task": "generation", "output_type": "generate_until", "doc_to_target": "reference",
            "doc_to_text": "{{question}}", "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        },
    ]  # fmt: skip


@pytest.fixture(scope="module")
def of_transformers(folder: Path) -> dict[str, Any]:
    """lm-eval's results on its own model, one sequence at a time."""
    options = {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu", "batch_size": 1}
    found = lm_eval.simple_evaluate("hf", options, tasks=configurations(folder), bootstrap_iters=1000)
    return {name: (estimates(values), found["samples"][name]) for name, values in found["results"].items()}


def check(found: TaskResult, expected: tuple[dict, list], names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        (value, error), other = found.metrics[ours], expected[0][theirs]
        assert value == pytest.approx(other.value, rel=1e-5, abs=1e-5), ours
        assert other.error is None or error == pytest.approx(other.error, rel=1e-5, abs=1e-5), ours


def test_our_tasks_have_the_numbers_of_lm_eval_on_transformers(folder, model, of_transformers) -> None:
    results = {name: evaluate_task(model, read_task(folder / f"{name}.toml")) for name in of_transformers}
    check(results["choice"], of_transformers["choice"], {"accuracy": "acc", "accuracy_norm": "acc_norm"})
    names = {"bits_per_byte": "bits_per_byte", "byte_perplexity": "byte_perplexity"}
    check(results["text"], of_transformers["text"], names)
    check(results["generation"], of_transformers["generation"], {"exact_match": "exact_match"})
    assert results["choice"].truncated > 0
    for sample, other in zip(results["choice"].samples, of_transformers["choice"][1], strict=True):
        logprobs = [logprob for logprob, _ in other["filtered_resps"]]
        assert sample["logprobs"] == pytest.approx(logprobs, rel=1e-5, abs=1e-5)
    for sample, other in zip(results["text"].samples, of_transformers["text"][1], strict=True):
        assert sample["logprob"] == pytest.approx(other["filtered_resps"][0], rel=1e-5)
    for sample, other in zip(results["generation"].samples, of_transformers["generation"][1], strict=True):
        assert sample["output"] == other["filtered_resps"][0].strip()


def test_lm_eval_has_the_same_numbers_on_our_model(folder, model, of_transformers) -> None:
    tasks = configurations(folder)
    results = {result.task: result for task in tasks for result in run_lm_eval(model, task, None, 0, False)}
    assert results["choice"].truncated == evaluate_task(model, read_task(folder / "choice.toml")).truncated > 0
    for name, (metrics, _) in of_transformers.items():
        check(results[name], of_transformers[name], {metric: metric for metric in metrics})
        assert results[name].rows == len(DOCUMENTS)


def test_chat_templates_are_parsed(folder, model, of_transformers) -> None:
    asked = LmEvalModel(model)
    messages = [{"role": "user", "content": "Where?"}]
    assert model.encode(asked.apply_chat_template(messages)) == model.encode_chat(messages)
    (found,) = run_lm_eval(model, configurations(folder)[2], 2, 0, True)
    assert found.rows == 2


def test_sampled_outputs_are_refused(model) -> None:
    with pytest.raises(ValueError, match="these are greedy"):
        LmEvalModel(model).settings({"do_sample": True, "temperature": 0.7})


def test_a_yaml_file_is_a_task_of_the_command(folder, of_transformers) -> None:
    config = configurations(folder)[0]
    (folder / "choice.yaml").write_text(json.dumps(config))  # JSON is YAML
    tasks = f"{folder}/choice.toml,{folder}/choice.yaml"
    result = regard("eval", folder / "model", "--tasks", tasks, "--json")
    assert result.exit_code == 0, result.exception
    ours, theirs = json.loads(result.stdout[result.stdout.index("{") :])["tasks"]
    assert ours["metrics"]["accuracy"] == theirs["metrics"]["acc"]
