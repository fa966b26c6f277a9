"""`regard data`: train a tokenizer on files, show batches (data_show.py), and prepare examples for training."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard.cli.open_model import split_recipe

if TYPE_CHECKING:
    from regard.data.readers import FileExamples
    from regard.text.tokenizer import Tokenizer

DEFAULT_SIZE = 4096
SAMPLED_EXAMPLES = 200  # for the compression that is printed
SHOWN_CHARACTERS, SHOWN_TOKENS = 160, 12

FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES", help='Text, JSON, JSONL, CSV, Parquet; folders; or patterns in quotes: "corpus/**/*.md".'
    ),
]


def data(context: typer.Context) -> None:
    """Train a tokenizer on files, show batches, prepare examples for training, and write documents with questions.

    \b
    Examples:
      regard data tokenizer corpus.txt --size 4096 --out tokenizer
      regard data show llama --data corpus.txt --rows 1
      regard data prepare llama --data corpus.txt --processes 8 --out prepared
      regard data register --out register

    `regard data tokenizer --help`, `regard data show --help`, `regard data prepare --help` and
    `regard data register --help` list their options.
    """
    print(context.get_help())


def tokenizer(
    files: FilesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; must not exist.")],
    kind: Annotated[
        Literal["bpe", "byte", "character"],
        typer.Option(help="Byte-pair encoding, one token per byte, or one token per character of the files."),
    ] = "bpe",
    size: Annotated[
        int | None,
        typer.Option(help=f"The vocabulary of bpe, with bytes and special tokens; {DEFAULT_SIZE} by default."),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the files, if not that of their suffix: text, lines, jsonl …")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--field", help="Read this field only; can be repeated. All strings by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a tokenizer on files, and print how well it compresses them.

    \b
    Examples:
      regard data tokenizer corpus.txt --size 4096 --out tokenizer
      regard data tokenizer "chats/*.jsonl" wiki.parquet --size 8192 --out tokenizer
      regard data tokenizer reviews.csv --field text --kind character --out tokenizer
    """
    from regard.checkpoint.atomic_folder import write_folder
    from regard.data.readers import read_examples

    if size is not None and kind != "bpe":
        raise typer.BadParameter(f"the size of kind {kind} follows from the data; omit --size")
    if out.exists():
        raise ValueError(f"{out} exists; choose another folder")
    sources = [read_examples(path, format) for path in files]
    trained = train_tokenizer(kind, size or DEFAULT_SIZE, sources, fields)
    with write_folder(out) as folder:
        trained.save(folder)
    result = describe_tokenizer(trained, kind, sources, fields)
    print(json.dumps(result, indent=2, ensure_ascii=False) if as_json else format_tokenizer(out, result))


def train_tokenizer(kind: str, size: int, sources: "Sequence[FileExamples]", fields: list[str] | None) -> "Tokenizer":
    from regard.text.train import bpe, byte, character

    texts = (text for source in sources for example in source for text in field_strings(example, fields))
    if kind == "byte":
        return byte()
    return character(texts) if kind == "character" else bpe(texts, size)


def field_strings(example: dict[str, Any], fields: list[str] | None) -> Iterator[str]:
    """The strings of an example in the given fields."""
    from regard.data.spans import strings_of
    from regard.spec import suggest_name

    for name in fields or ():
        if name not in example:
            raise ValueError(f"--field {name}: an example has no such field; {suggest_name(name, example)}")
    return strings_of({name: example[name] for name in fields} if fields else example)


def describe_tokenizer(
    tokenizer: "Tokenizer", kind: str, sources: "Sequence[FileExamples]", fields: list[str] | None
) -> dict[str, Any]:
    """The vocabulary, the compression on examples of all sources, the longest tokens, and a tokenized text."""
    size = tokens = 0
    shown = ""
    for source in sources:
        for index in range(0, len(source), -(-len(source) // SAMPLED_EXAMPLES)):
            for text in field_strings(source[index], fields):
                size, tokens = size + len(text.encode()), tokens + len(tokenizer.encode(text))
                shown = shown or text[:SHOWN_CHARACTERS]
    special = set(tokenizer.all_special_tokens)
    vocabulary = {tokenizer.decode_token(id) for id in range(tokenizer.vocab_size)} - special
    return {
        "kind": kind,
        "vocabulary": tokenizer.vocab_size,
        "examples": sum(map(len, sources)),
        "bytes_per_token": size / max(1, tokens),
        "longest_tokens": sorted(vocabulary, key=lambda token: (-len(token), token))[:SHOWN_TOKENS],
        "example": [tokenizer.decode_token(id) for id in tokenizer.encode(shown)],
    }


def format_tokenizer(out: Path, result: dict[str, Any]) -> str:
    longest = ", ".join(repr(token) for token in result["longest_tokens"])
    return "\n".join(
        [
            f"{out}: {result['vocabulary']:,} tokens ({result['kind']}) from {result['examples']:,} examples",
            f"compression     {result['bytes_per_token']:.2f} bytes per token",
            f"longest tokens  {longest}",
            f"example         {'|'.join(result['example'])!r}",
        ]
    )


def prepare(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write, or to continue.")],
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="The name of a recipe, or a TOML file.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="By default one per CPU core.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="The number of examples, for sources that generate them endlessly.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="Prepare for fine-tuning this model.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The file or folder, instead of the data of the recipe.")] = None,
) -> None:
    """Tokenize the data of a recipe once, into memory-mapped files, and write a recipe that trains on them.

    The files do not depend on the number of processes. After an interruption, the same command continues. Values of the
    recipe can be overridden by their dotted names.

    \b
    Examples:
      regard data prepare llama --data corpus.txt --processes 8 --out prepared
      regard train prepared/recipe.toml --out runs/mine
      regard data prepare --from smollm2 --data chats.jsonl --out prepared
      regard data prepare demo --examples 100000 --tokenizer.size=1024 --out prepared
    """
    import os

    from rich.console import Console

    from regard.data.prepare_progress import PreparationProgress
    from regard.training.overrides import parse_overrides
    from regard.training.prepare_data import RECIPE, prepare_recipe
    from regard.training.recipe import resolve
    from regard.training_run import read_tables

    recipe, overrides = split_recipe(recipe, context.args)
    _, tables = read_tables(recipe, parse_overrides(overrides), start, data)
    progress = PreparationProgress(Console(stderr=True))
    processes = processes or os.cpu_count() or 1
    written = prepare_recipe(resolve(tables), out, processes, examples, progress, tables.get("head"))
    for prepared in written:
        size = f"{len(prepared):,} examples, {prepared.tokens:,} tokens, {prepared.bytes / 1e6:,.1f} MB"
        print(f"{prepared.folder}: {size}")
    print(f"{progress.summary()}\nto train on them: regard train {out / RECIPE}")
