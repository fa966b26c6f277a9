"""`regard predict`: the labels that a classifier gives to texts, pairs of texts or images."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import AdapterOption, DeviceOption, ModelArgument
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.predictions import Prediction

SHOWN_CHARACTERS = 60


def predict(
    model: ModelArgument,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; for a model of images, image files.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A file with `text`, or `first` and `second`, in each row; or a folder of images."),
    ] = None,
    pair: Annotated[
        bool, typer.Option("--pair", help="Each two of the texts are a pair: FIRST SECOND FIRST SECOND …")
    ] = False,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per input, with the probabilities of all labels.")
    ] = False,
) -> None:
    """Print the label of each text, pair of texts or image, and its probability; of a regression the number.

    A model whose head labels words prints the label of each word.

    \b
    Examples:
      regard predict runs/reviews "A good film" "A bad one"
      regard predict runs/reviews --data new.csv --json
      regard predict runs/entailment --pair "It rains." "The street is wet."
      regard predict runs/vit digit.png
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    if (data is None) == (not inputs):
        raise typer.BadParameter("give texts or image files, or a file with --data, but not both")
    if pair and (data is not None or len(inputs or []) % 2):
        raise typer.BadParameter("--pair needs an even number of texts, and no --data")
    from regard.load_model import load

    llm = load(model, device, adapter=adapter)
    examples: list[Any] = list(inputs or []) if data is None else read_inputs(data)
    if pair:
        examples = list(zip(examples[::2], examples[1::2], strict=True))
    for example, prediction in zip(examples, llm.classify(examples), strict=True):
        print_json(example, prediction) if as_json else print_lines(example, prediction)


def read_inputs(path: Path) -> list[Any]:
    """The examples of a file in its order; of a folder of images, their paths."""
    from regard.data.readers import read_examples
    from regard.data.sources.images import image_files

    if files := image_files(path):
        return files
    rows = read_examples(path)
    return [rows[index] for index in range(len(rows))]


def shown(example: Any) -> str:
    """The input of an example in one line."""
    if isinstance(example, dict):
        names = [name for name in ("text", "first", "second", "tokens") if name in example]
        example = tuple(example[name] for name in names)
    parts = example if isinstance(example, tuple) else (example,)
    parts = [" ".join(part) if isinstance(part, list) else str(part) for part in parts]
    line = " | ".join(" ".join(part.split()) for part in parts)
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


def words_of(example: Any) -> list[str]:
    text = example if isinstance(example, str) else example.get("tokens", example.get("text"))
    return text.split() if isinstance(text, str) else list(text)


def print_lines(example: Any, prediction: "Prediction | list[Prediction]") -> None:
    if not isinstance(prediction, list):
        print(f"{described(prediction)}  {shown(example)}")
        return
    for word, label in zip(words_of(example), prediction, strict=False):  # without the words beyond the context
        print(f"{described(label)}  {word}")
    print()


def described(prediction: "Prediction") -> str:
    if prediction.value is not None:
        return f"{prediction.value:.4f}"
    return f"{prediction.label:<12} {prediction.probability:6.1%}"


def print_json(example: Any, prediction: "Prediction | list[Prediction]") -> None:
    given = example if isinstance(example, dict | tuple) else str(example)
    if isinstance(prediction, list):
        pairs = zip(words_of(example), prediction, strict=False)
        found: dict[str, Any] = {"words": [{"word": word, **values_of(label)} for word, label in pairs]}
    else:
        found = values_of(prediction)
    print(json.dumps({"input": given, **found}, default=str))


def values_of(prediction: "Prediction") -> dict[str, Any]:
    return {name: value for name, value in vars(prediction).items() if value not in (None, {})}
