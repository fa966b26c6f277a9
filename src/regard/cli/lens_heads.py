"""`regard lens heads`: what the heads of a model attend to."""

from typing import Annotated

import typer

from regard.cli.open_inspected import open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

INSTEAD = (
    "`regard lens MODEL --text TEXT` shows its three attentions; score_heads(model.source, vocab) in Python scores the "
    "heads of its encoder"
)


def heads(
    model: ModelArgument,
    length: Annotated[int, typer.Option(min=2, help="Random tokens, which are repeated once.")] = 32,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences, whose scores are averaged.")] = 4,
    top: Annotated[int, typer.Option(min=1, help="Show so many heads of each kind.")] = 5,
    threshold: Annotated[float, typer.Option(help="A head with a larger score is marked.")] = 0.4,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: kind to scores by layer.")] = False,
) -> None:
    """Find heads that attend to the previous token, the first one, the same token, or the one after it (induction).

    The model reads random tokens twice, t1 … tn t1 … tn. The score of a head is its mean weight on the tokens of a
    kind; beside it stands that of uniform attention.

    \b
    Examples:
      regard lens heads runs/demo
      regard lens heads smollm2 --length 50 --top 10
    """
    llm = open_inspected(model, device, instead=INSTEAD)
    from rich.console import Console
    from rich.table import Table

    from regard.lens import score_heads
    from regard.lens.inputs import vocab_of

    vocab = min(llm.tokenizer.vocab_size, vocab_of(llm.model.spec))
    found = score_heads(llm.model, vocab, length, sequences, start=llm.tokenizer.prefix_ids)
    if as_json:
        scores = {
            kind: [None if layer is None else layer.tolist() for layer in layers]
            for kind, layers in found.scores.items()
        }
        print_json({"scores": scores, "uniform": found.uniform})
        return
    marks = any(found.find(kind, threshold) for kind in found.uniform)
    caption = "bold:" if marks else "no head is of one of these kinds: none has"
    table = Table("kind", "uniform", "layer.head score", caption=f"{caption} more than {threshold}")
    for kind, uniform in found.uniform.items():
        best = found.find(kind, threshold=0.0)[:top]
        marked = (f"{layer}.{head} {score:.2f}" for layer, head, score in best)
        bold = (f"[bold]{text}[/]" if row[2] > threshold else text for text, row in zip(marked, best, strict=True))
        table.add_row(kind, f"{uniform:.2f}", ", ".join(bold))
    Console().print(table)
