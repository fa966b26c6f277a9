"""`regard lens report`: what a model does with a text, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_inspected import encode, open_inspected
from regard.cli.open_model import DeviceOption, ModelArgument

INSTEAD = "use `regard lens`, `regard lens logits`, `regard lens ablate` and `regard lens patch`"


def report(
    model: ModelArgument,
    text: Annotated[str, typer.Option("--text", "-t", help="The text that the model reads.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("lens.html"),
    device: DeviceOption = "auto",
) -> None:
    """Write a report with all figures into one HTML file, which can be sent to a colleague.

    It has the predictions, the attention of every head, what the heads do, the logit lens, direct logit attribution,
    the importance of tokens, and massive activations. It needs no server and makes no requests.

    \b
    Examples:
      regard lens report runs/demo --text "Ben is in the cellar. Where is Ben? Ben is in the" -o report.html
      regard lens report smollm2 --text "The capital of France is"
    """
    llm = open_inspected(model, device, instead=INSTEAD)
    from rich.console import Console

    from regard.report.lens_page import lens_report

    lens_report(llm.model, llm.tokenizer, encode(model, llm, text), Path(model).name, out)
    Console(stderr=True).print(f"written: {out}")
