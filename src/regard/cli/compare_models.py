"""`regard compare` without prompts: two models side by side, by size, perplexity, agreement and speed.

size           bytes of the weight files, and of the weights in memory, in bits per parameter
perplexity     of the same text, per token and per byte; agreement of the next-token distributions
tokens/s       greedy decoding of one request, both models in turn; the median of the runs
"""

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.cli.judging import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from regard.engine.engine import Engine
    from regard.evals.side_by_side import TextLoss, TokenAgreement
    from regard.language_model import LanguageModel

PROMPT, NEW, RUNS = 32, 64, 3  # tokens of the prompt and of each run, and runs per model, of the speed
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


class ComparisonOptions(NamedTuple):
    text: Path | None
    tokens: int
    length: int
    quantize: str | None  # of the second model
    cache: str | None  # of the second model
    speed: bool
    seed: int
    device: str


def compare_models(names: "tuple[str, str]", options: ComparisonOptions, as_json: bool) -> None:
    """Print the table, or one JSON object."""
    from regard.cli.open_engine import quantize_weights
    from regard.cli.open_model import open_model, require_decoder
    from regard.evals.side_by_side import ComparedModel, fixed_rows, read_both

    opened = []
    for name, quantize in zip(names, (None, options.quantize), strict=True):
        stored = quantize == "stored"
        llm = open_model(Path(name), options.device, packed=stored)
        require_decoder(Path(name), llm)
        if quantize is not None and not stored:
            quantize_weights(llm.model, quantize)
        opened.append(llm)
    caches = (None, options.cache)
    length = min(options.length, *(llm.model.spec.context or options.length for llm in opened))
    text = read_text(options, opened[0])
    compared = [ComparedModel(llm.model, llm.tokenizer, cache) for llm, cache in zip(opened, caches, strict=True)]
    rows = fixed_rows(opened[0].tokenizer, text, length), fixed_rows(opened[1].tokenizer, text, length)
    with progress_bar("reading the text", sum(map(len, rows))) as on_progress:
        *losses, agreement = read_both(compared[0], compared[1], rows, on_progress)
    rates = decode_rates(opened, caches, text) if options.speed else (None, None)
    found = [
        describe(name, llm, loss, rate) for name, llm, loss, rate in zip(names, opened, losses, rates, strict=True)
    ]
    result = {"a": found[0], "b": found[1] | {"quantize": options.quantize, "cache": options.cache}}
    refused = None if agreement is not None else refuse_agreement(opened, names, losses)
    result["agreement"] = agreement and {"equal_tokens": agreement.share, "kl": agreement.divergence}
    if refused is not None:
        result["agreement_refused"] = refused
    print(json.dumps(result)) if as_json else print_table(result, agreement, refused)


def read_text(options: ComparisonOptions, llm: "LanguageModel") -> str:
    """The first tokens of the file, or of generated stories that no model was trained on."""
    from regard.cli.quantize import open_text
    from regard.data.spans import unmarked_text

    if options.text is not None:
        text = options.text.read_text(encoding="utf-8")
    else:
        examples = open_text(None, options.seed).held_out
        assert examples is not None
        stories, size, index = [], 0, 0
        while size < options.tokens:
            stories.append(unmarked_text(examples.example(index)["spans"]))
            size, index = size + len(llm.tokenizer.encode(stories[-1])), index + 1
        text = "\n\n".join(stories)
    starts = llm.tokenizer.encode_with_starts(text)[1]
    return text if len(starts) <= options.tokens else text[: starts[options.tokens]]


def describe(name: str, llm: "LanguageModel", loss: "TextLoss", rate: float | None) -> dict[str, Any]:
    """The numbers of one model."""
    from regard.planning.parameters import count_parameters

    memory, parameters = bytes_in_memory(llm.model), count_parameters(llm.model.spec).total
    return {
        "model": name, "parameters": parameters, "bytes_on_disk": bytes_on_disk(llm), "bytes_in_memory": memory,
        "bits_per_weight": 8 * memory / parameters, "tokens": loss.tokens, "perplexity": loss.perplexity,
        "perplexity_per_byte": loss.perplexity_per_byte, "tokens_per_second": rate,
    }  # fmt: skip


def bytes_in_memory(model: "nn.Module") -> int:
    """Of all weights, each counted once: parameters, and the stored numbers of quantized layers."""
    from regard.adapt.stored_weight import StoredWeight

    stored = [buffer for module in model.modules() if isinstance(module, StoredWeight) for buffer in module.buffers()]
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *stored)}
    return sum(tensors.values())


def bytes_on_disk(llm: "LanguageModel") -> int:
    """Of the files with weights."""
    assert llm.folder is not None
    if llm.folder.is_file():
        return llm.folder.stat().st_size
    return sum(path.stat().st_size for pattern in WEIGHT_FILES for path in llm.folder.glob(pattern))


def decode_rates(
    opened: "Sequence[LanguageModel]", caches: "tuple[str | None, str | None]", text: str
) -> "tuple[float | None, float | None]":
    """Tokens per second of greedy decoding, both models in turn; None of a model that generates no tokens."""
    from regard.cli.open_engine import choose_compile
    from regard.engine.engine import Engine

    engines = []
    for llm, cache in zip(opened, caches, strict=True):
        compiles = choose_compile(None, next(llm.model.parameters()).device, cache).value == "on"
        capacity = min(PROMPT + NEW + 1, llm.model.spec.context or PROMPT + NEW + 1)
        engines.append(Engine(llm.model, rows=1, capacity=capacity, cache=cache, compile=compiles))
    prompts = [llm.tokenizer.encode(text)[: min(PROMPT, engine.capacity // 2)] for llm, engine in both(opened, engines)]
    if not all(prompts):
        return None, None
    rates: tuple[list[float], list[float]] = ([], [])
    with progress_bar("decoding", 2 * (RUNS + 1)) as on_progress:
        for run in range(RUNS + 1):
            for index, (engine, prompt) in enumerate(both(engines, prompts)):
                rate = decode_rate(engine, prompt)
                if run > 0:  # the first compiles kernels
                    rates[index].append(rate)
                on_progress(2 * run + index + 1)
    return median(rates[0]) or None, median(rates[1]) or None


def both(first: "Sequence[Any]", second: "Sequence[Any]") -> Any:
    return zip(first, second, strict=True)


def decode_rate(engine: "Engine", prompt: list[int]) -> float:
    """Tokens per second after the first token."""
    from regard.engine.request import Sampling

    new = min(NEW, engine.capacity - len(prompt))
    request = engine.submit(prompt, Sampling(max_new=new, temperature=0))
    while not request.new and request.finish is None:
        engine.step()
    start, before = perf_counter(), len(request.new)
    while request.finish is None:
        engine.step()
    return (len(request.new) - before) / max(perf_counter() - start, 1e-9)


def refuse_agreement(opened: "Sequence[LanguageModel]", names: "tuple[str, str]", losses: "Sequence[TextLoss]") -> str:
    if damaged := [name for name, loss in zip(names, losses, strict=True) if not loss.finite]:
        return f"the logits of {' and '.join(damaged)} are not finite, so they have no perplexity; check the weights"
    if not all(loss.tokens for loss in losses):
        return "the text has too few tokens to predict one; give a longer one with --text"
    sizes = " and ".join(f"{llm.tokenizer.vocab_size:,}" for llm in opened)
    return f"the tokenizers differ ({sizes} ids), so next tokens cannot be compared; compare the perplexity per byte"


def print_table(result: dict[str, Any], agreement: "TokenAgreement | None", refused: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    first, second = result["a"], result["b"]
    options = [f"--{name} {second[name]}" for name in ("quantize", "cache") if second[name] is not None]
    titles = (first["model"], " ".join([second["model"], *options]))
    table = Table("", *(Column(escape(title), justify="right", overflow="fold") for title in titles), "B / A")
    rows = (
        ("parameters", "parameters", "{:,}"), ("bytes on disk", "bytes_on_disk", "{:,}"),
        ("bytes in memory", "bytes_in_memory", "{:,}"), ("bits per weight", "bits_per_weight", "{:.2f}"),
        ("perplexity", "perplexity", "{:.4f}"), ("perplexity per byte", "perplexity_per_byte", "{:.4f}"),
        ("tokens/s, decoding", "tokens_per_second", "{:.1f}"),
    )  # fmt: skip
    for title, key, form in rows:
        values = (first[key], second[key])
        if values == (None, None) or title == "perplexity" and agreement is None:
            continue  # perplexities of different tokens cannot be compared
        ratio = "–" if None in values else f"{second[key] / first[key]:.4f}"
        table.add_row(title, *("–" if value is None else form.format(value) for value in values), ratio)
    console = Console(highlight=False)
    console.print(table)
    tokens = f"{first['tokens']:,}" if agreement is not None else f"{first['tokens']:,} and {second['tokens']:,}"
    print(f"text: {tokens} tokens")
    if agreement is None:
        print(f"agreement: {refused}")
    else:
        share, kl = agreement.share, agreement.divergence
        print(f"agreement: {share:.2%} of the most likely tokens are equal; KL(A, B) {kl:.3g} nats per token")
