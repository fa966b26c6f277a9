"""`regard quantize`: write a model with fewer bits per weight, chosen with a sample of text."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard.cli.judging import progress_bar
from regard.cli.open_model import DeviceOption, ModelArgument
from regard.find_model import find_model

if TYPE_CHECKING:
    from torch import nn

    from regard.adapt.fake_quantized import FakeQuantization
    from regard.data.batch import Batch
    from regard.data.sources.base import Example, Splits
    from regard.language_model import LanguageModel
    from regard.quantization.quantize_model import LayerResult, Sample
    from regard.quantization.select_layers import LayerSelection
    from regard.text.tokenizer import Tokenizer

ROWS = 8  # of a batch
MOST_SHOWN = 40  # layers in the printed table


def quantize(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="int8, int6, int5, int4, int3, int2, nf4, fp8 (e4m3), fp8_e5m2, bf16 or fp16. By default that of the "
            "run's [quantize], else int4."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Inputs that share a scale: a number, channel (all of an output) or tensor. By default 64, for int8 "
            "channel."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Integers without zero points; by default only int8."),
    ] = None,
    method: Annotated[
        Literal["nearest", "clip", "gptq", "awq", "awq-gptq", "smoothquant"] | None,
        typer.Option(help="How codes are chosen; by default gptq, and nearest for a run with [quantize]."),
    ] = None,
    activations: Annotated[
        Literal["int8"] | None,
        typer.Option(help="int8: round the inputs of layers in int8 too, and multiply integers (W8A8)."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text for the sample: a file or folder, or prepared data; by default generated stories."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of the sample.")] = 16384,
    test_tokens: Annotated[
        int, typer.Option(min=0, help="Held-out tokens for the perplexity before and after; 0: do not measure it.")
    ] = 8192,
    length: Annotated[int, typer.Option(min=2, help="Tokens per row of both.")] = 512,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave out the layers that this pattern matches, such as '*.down_proj'.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Quantize the output layer too.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Quantize the linear layers of a model, and write a folder that every command reads.

    The sample of text shows which inputs of a layer are large, and which go together. The table has the relative error
    of the output of each layer over this sample, √(Σ‖(W - W')x‖² / Σ‖Wx‖²), and that of rounding to nearest. The
    perplexity is that of other text: the tenth of the file that is held out. --method nearest with --test-tokens 0
    reads no text, and has the errors of the weights, √(Σ(W - W')² / ΣW²).

    Embeddings and norms keep their dtype, and the output layer does without --head. The matrix of each expert is
    rounded by the tokens that are routed to it.

    \b
    Examples:
      regard quantize smollm2 models/smollm2-int4 --calibrate corpus.txt
      regard quantize smollm2 models/smollm2-int8 --format int8 --method nearest
      regard quantize runs/demo models/demo-int3 --format int3 --group 32 --method awq
      regard quantize smollm2 models/w8a8 --format int8 --activations int8 --method smoothquant
      regard quantize runs/aware models/aware
      regard quantize smollm2 models/small --format nf4 --head --skip "stack.blocks.0.*"
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from rich.console import Console

    from regard.checkpoint.atomic_folder import check_new
    from regard.checkpoint.model_folder import save
    from regard.cli.open_model import open_model, require_decoder
    from regard.formats.names import format_named
    from regard.quantization.select_layers import select_layers

    check_new(out)
    trained = trained_settings(model) if (format, group, symmetric) == (None, None, None) else None
    chosen = trained.format if trained else format_named("int4" if format is None else format, group, symmetric)
    method = method or ("nearest" if trained else "gptq")
    if trained:
        skip, head = [*(skip or ()), *trained.skip], head or trained.head
    splits = open_text(calibrate, seed)
    llm, console = open_model(model, device), Console(stderr=True)
    require_decoder(model, llm)
    if calibrate is None:
        splits = stories_for(llm.tokenizer, splits)
    selection = select_layers(llm.model, chosen, skip or (), head, activations == "int8")
    texts = TextRows(llm, splits, min(length, llm.model.spec.context or length), seed)
    summary, results = quantize_and_measure(texts, selection, method, tokens, test_tokens)
    with console.status(f"writing {out}"):
        save(llm, out)
    summary = {"format": chosen.to_dict(), "method": method, **summary}
    if as_json:
        layers = [{**vars(result), "format": result.format.to_dict()} for result in results]
        print(json.dumps({**summary, "layers": layers, "left": selection.left}))
    else:
        print_results(results, selection.left, summary)
        console.print(f"written: {out}; try: regard generate {out} --prompt …", soft_wrap=True)


@dataclass
class TextRows:
    """The text of a sample and of the test, as rows of tokens."""

    llm: "LanguageModel"
    splits: "Splits"
    length: int  # tokens per row
    seed: int


def quantize_and_measure(
    texts: TextRows, selection: "LayerSelection", method: str, tokens: int, test_tokens: int
) -> "tuple[dict[str, Any], list[LayerResult]]":
    """Quantize the model in place; returns its sizes and perplexities before and after, and the layers."""
    from regard.quantization.quantize_model import quantize_model, round_model

    model, results = texts.llm.model, []
    without_text = method == "nearest" and not test_tokens
    sample, size_before = [] if without_text else read_sample(texts, tokens), size_of(model)
    before = perplexity(texts, test_tokens, "perplexity before")
    with progress_bar(f"quantizing by {method}", len(selection.formats)) as on_progress:

        def count(result: "LayerResult") -> None:
            results.append(result)
            on_progress(len(results))

        if without_text:
            round_model(model, selection, count)
        else:
            quantize_model(model, selection, method, sample, count)
    after = perplexity(texts, test_tokens, "perplexity after")
    summary = {
        "sample": sum(ids.numel() for ids, _ in sample), "bytes": size_of(model), "bytes_before": size_before,
        "test": before and before[1], "perplexity_before": before and before[0], "perplexity": after and after[0],
    }  # fmt: skip
    return summary, results


def trained_settings(model: Path) -> "FakeQuantization | None":
    """The table [quantize] of a run."""
    from regard.adapt.fake_quantized import FakeQuantization
    from regard.training.run import Run

    table = Run.open(model).config.get("quantize") if (model / "checkpoints").is_dir() else None
    return None if table is None else FakeQuantization.from_dict(table)


def open_text(path: Path | None, seed: int) -> "Splits":
    """The examples of a file, of prepared data, or of the generated stories, with a tenth held out."""
    from regard.data.sources.prepared import TRAIN
    from regard.spec import parse_spec
    from regard.training.data_settings import Data, read_data_table

    table: dict[str, Any] = {"seed": seed}
    if path is not None:
        if not path.exists() and not any(mark in str(path) for mark in "*?["):
            raise ValueError(f"--calibrate {path}: there is no such file or folder")
        prepared = path if (path / TRAIN).is_dir() else path / "source-0"  # regard data prepare writes source-0
        is_prepared = (prepared / TRAIN).is_dir()
        table |= {"source": "prepared", "path": str(prepared)} if is_prepared else {"path": str(path)}
    settings = parse_spec(read_data_table(table), "data", Data)
    assert isinstance(settings, Data)
    return settings.open()


def stories_for(tokenizer: "Tokenizer", splits: "Splits") -> "Splits":
    """The generated stories: conversations if the tokenizer has their special tokens, else plain text."""
    from regard.data.sources.base import Splits
    from regard.data.spans import unmarked_text
    from regard.text.chat import ASSISTANT, USER

    if all(tokenizer.core.token_to_id(token) is not None for token in (USER, ASSISTANT)):
        return splits

    def plain(example: "Example") -> "Example":
        return {"text": unmarked_text(example["spans"]), "end": tokenizer.eos is not None}

    assert splits.held_out is not None
    return Splits(splits.train.map(plain), splits.held_out.map(plain))


def batches(texts: TextRows, held_out: bool, tokens: int) -> "Iterator[Batch]":
    """Rows of text with about this many tokens, in which no example occurs twice."""
    from regard.data.loader import Loader
    from regard.objectives.next_token import NextToken

    examples, length = texts.splits.held_out if held_out else texts.splits.train, texts.length
    assert examples is not None
    loader, read = Loader(examples, NextToken(), texts.llm.tokenizer, ROWS, length, texts.seed), 0
    for batch in loader.without_repetition(-(-tokens // length)):
        excess = (read + batch.token_count - tokens) // length
        batch = batch.rows(slice(max(1, batch.size - max(0, excess))))
        yield batch
        read += batch.token_count
        if read >= tokens:
            return


def read_sample(texts: TextRows, tokens: int) -> "Sample":
    from regard.objectives.base import layout_of

    device = next(texts.llm.model.parameters()).device
    found = [batch.to(device) for batch in batches(texts, False, tokens)]
    if not found:
        raise ValueError("the text for the sample has no tokens; give another with --calibrate")
    return [(batch.tokens, layout_of(batch)) for batch in found]


def perplexity(texts: TextRows, tokens: int, description: str) -> tuple[float, int] | None:
    """The perplexity of held-out text, and the number of its tokens; None if there is none."""
    import torch

    from regard.objectives.next_token import NextToken
    from regard.training.step import evaluate

    if not tokens or texts.splits.held_out is None:
        return None
    counted = 0

    def shown() -> "Iterator[Batch]":
        nonlocal counted
        for batch in batches(texts, True, tokens):
            yield batch
            counted += batch.token_count
            on_progress(min(counted, tokens))

    with torch.no_grad(), progress_bar(description, tokens) as on_progress:
        values = evaluate(texts.llm.model, NextToken(), shown())
    return (math.exp(min(values["loss"], 700)), counted) if values else None


def size_of(model: "nn.Module") -> int:
    """Bytes of all tensors in the files."""
    from regard.checkpoint.model_folder import unique_parameters
    from regard.checkpoint.quantized_layers import stored_tensors

    return sum(tensor.nbytes for tensor in (unique_parameters(model) | stored_tensors(model)).values())


def print_results(results: "Sequence[LayerResult]", left: dict[str, str], summary: dict[str, Any]) -> None:
    from collections import Counter

    from rich.console import Console
    from rich.table import Column, Table

    numbers = [Column(name, justify="right") for name in ("bytes", "error", "nearest", "ratio")]
    table = Table(Column("layer", overflow="fold"), *numbers)
    largest = sorted(results, key=lambda result: result.error, reverse=True)[:MOST_SHOWN]
    for result in results if len(results) <= MOST_SHOWN else largest:
        ratio = result.error / result.nearest_error if result.nearest_error else 1.0
        figures = (f"{result.error:.4f}", f"{result.nearest_error:.4f}", f"{ratio:.2f}")
        table.add_row(result.name.removeprefix("stack.blocks."), f"{result.bytes:,}", *figures)
    console = Console(highlight=False)
    console.print(table)
    if len(results) > MOST_SHOWN:
        middle = median(result.error for result in results)
        print(f"{MOST_SHOWN} of {len(results)} layers, by error; the median error is {middle:.4f}; --json lists all")
    below = sum(result.error < result.nearest_error for result in results)
    if summary["sample"]:
        print(f"{below} of {len(results)} layers have a smaller error than rounding to nearest")
    else:
        print("the errors are those of the weights, not of outputs: there was no sample")
    for reason, count in Counter(left.values()).items():
        names = [name for name, found in left.items() if found == reason]
        others = f" and {count - 1} more" if count > 1 else ""
        print(f"in full precision: {names[0]}{others} ({reason})")
    print(f"size {summary['bytes_before'] / 1e6:,.1f} MB -> {summary['bytes'] / 1e6:,.1f} MB")
    if summary["perplexity"] is not None:
        before, after = summary["perplexity_before"], summary["perplexity"]
        held_out = f"{summary['test']:,} held-out tokens"
        print(f"perplexity {before:.4f} -> {after:.4f}, ratio {after / before:.4f}, of {held_out}")
