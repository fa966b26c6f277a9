"""lm-eval (EleutherAI's evaluation harness) on `regard serve` and on `transformers`, with the same weights.

Four tasks over stories of the simulated world, nothing is downloaded: multiple choice and rolling perplexity
(log-likelihoods of echoed prompts of token ids, in batches), greedy completions, and greedy chat completions. Every
metric and every log-likelihood may differ by 1e-4 of max(1, |value|), and no generated text may differ.

lm-eval is not a dependency of the project. Install it into a folder, which is searched after the environment:

uv pip install --target FOLDER "lm-eval[api]"
python -m benchmarks.lm_eval_agreement --packages FOLDER [--model smollm2] [--documents 20]

Without --model, a random model of the Llama family with a BPE tokenizer of the stories is made.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from regard.checkpoint.model_folder import export
from regard.cli.bench_serve import open_server
from regard.cli.export import export as export_command
from regard.cli.open_engine import EngineOptions
from regard.data.world import stories
from regard.families import llama
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe

TOLERANCE = 1e-4
BATCH = 32  # prompts in a request


class Row(NamedTuple):
    task: str
    quantity: str
    reference: float
    served: float
    difference: float  # relative to max(1, |reference|); of texts, how many differ


def save_random_model(folder: Path) -> None:
    tokenizer = bpe([story.text for story, _ in zip(stories(), range(200), strict=False)], vocab=512)
    tokenizer.chat_template = DEFAULT_TEMPLATE
    config = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    model = llama.spec(config).build(seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= 3  # larger logits: the distributions are far from uniform, so errors would show
    export(model, folder, "llama", tokenizer)


def write_documents(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for story, _ in zip(stories(split="held-out"), range(count), strict=False):
            question = story.questions[0]
            others = {answer for _, answer, _ in story.questions} | {"the garden", "the red box", "nobody"}
            wrong = sorted(others - {question.answer})[:3]
            document = {"story": story.text, "question": question.text, "choices": [question.answer, *wrong]}
            print(json.dumps(document), file=file)


def configurations(documents: Path) -> list[dict[str, Any]]:
    """Of lm-eval's tasks."""
    ask = "{{story}}\nQuestion: {{question}}\nAnswer:"
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}, "test_split": "test",
        "num_fewshot": 0, "doc_to_text": ask,
    }  # fmt: skip
    generated = shared | {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
    }  # fmt: skip
    perplexities = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return [
        shared | {
            "task": "choice", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        shared | {
            "task": "perplexity", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "story",
            "metric_list": [{"metric": name} for name in perplexities],
        },
        generated | {"task": "completion"},
        generated | {"task": "chat"},
    ]  # fmt: skip


def evaluate(kind: str, arguments: dict[str, Any], tasks: list[dict[str, Any]], chat: bool = False) -> dict[str, Any]:
    import lm_eval

    copied = json.loads(json.dumps(tasks))  # lm-eval changes them
    device = {"device": "cpu", "batch_size": 1} if kind == "hf" else {}
    options = {"apply_chat_template": chat, "log_samples": True, "bootstrap_iters": 0, "verbosity": "ERROR"}
    return lm_eval.simple_evaluate(kind, arguments, copied, **options, **device)


def compare(reference: dict[str, Any], served: dict[str, Any]) -> Iterator[Row]:
    for task, metrics in reference["results"].items():
        for name, value in metrics.items():
            if name.endswith(",none") and isinstance(value, float) and "stderr" not in name:
                yield row(task, name.removesuffix(",none"), value, served["results"][task][name])
        pairs = list(zip(responses(reference, task), responses(served, task), strict=True))
        if isinstance(pairs[0][0], str):
            yield count_row(task, "texts", pairs)
            continue
        worst = max(pairs, key=lambda pair: relative(pair[0][0], pair[1][0]))
        yield row(task, f"worst of {len(pairs)} log-likelihoods", worst[0][0], worst[1][0])
        if pairs[0][0][1] is not None:
            yield count_row(task, "greedy or not", [(theirs[1], ours[1]) for theirs, ours in pairs])


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """In the order of the documents: texts, or log-likelihoods and whether the continuation is greedy, if known."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    found = [response for sample in samples for response in sample["filtered_resps"]]
    return [(response, None) if isinstance(response, float) else response for response in found]


def row(task: str, quantity: str, reference: float, served: float) -> Row:
    return Row(task, quantity, reference, served, relative(reference, served))


def count_row(task: str, quantity: str, pairs: list[tuple[Any, Any]]) -> Row:
    equal = sum(theirs == ours for theirs, ours in pairs)
    return Row(task, f"equal {quantity}", len(pairs), equal, len(pairs) - equal)


def relative(reference: float, found: float) -> float:
    return abs(reference - found) / max(1.0, abs(reference))


def measure(model: Path, documents: int) -> list[Row]:
    import httpx

    with TemporaryDirectory() as folder, open_server(str(model), EngineOptions()) as url:
        write_documents(path := Path(folder) / "stories.jsonl", documents)
        *tasks, chat = configurations(path)
        bos = bool(Tokenizer.load(model).prefix_ids)
        served = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "timeout": 3600}
        hf = {"pretrained": str(model), "dtype": "float32", "add_bos_token": bos}
        completions = served | {
            "base_url": f"{url}/v1/completions", "tokenizer": str(model), "add_bos_token": bos, "batch_size": BATCH,
        }  # fmt: skip
        chats = served | {"base_url": f"{url}/v1/chat/completions", "num_concurrent": 4}
        rows = compare(evaluate("hf", hf, tasks), evaluate("local-completions", completions, tasks))
        chat_rows = compare(
            evaluate("hf", hf, [chat], chat=True), evaluate("local-chat-completions", chats, [chat], chat=True)
        )
        return [*rows, *chat_rows]


def print_rows(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "quantity", "transformers", "regard serve", "difference")
    for row in rows:
        table.add_row(row.task, row.quantity, f"{row.reference:.6g}", f"{row.served:.6g}", f"{row.difference:.1e}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="the folder into which lm-eval is installed")
    parser.add_argument("--model", help="a folder for transformers, or another model, which is exported first")
    parser.add_argument("--documents", type=int, default=20)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.packages is not None:
        sys.path.append(str(options.packages))  # last: torch and transformers are those of the environment
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if options.model is None:
            save_random_model(model)
        elif (Path(options.model) / "config.json").is_file():
            model = Path(options.model)
        else:
            export_command(Path(options.model), model)
        rows = measure(model, options.documents)
    print_rows(rows)
    versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")}
    print(json.dumps(versions))
    if any(row.difference > TOLERANCE for row in rows):
        sys.exit(f"a difference is larger than {TOLERANCE}")


if __name__ == "__main__":
    main()
