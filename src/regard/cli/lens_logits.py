"""`regard lens logits` and `regard lens attribute`: where in the model a prediction arises."""

from typing import Annotated, Literal

import typer

from regard.cli.open_inspected import TargetOption, encode_inputs, open_inspected, print_json
from regard.cli.open_model import DeviceOption, ModelArgument

TextOption = Annotated[str, typer.Option("--text", "-t", help="The text that the model reads.")]


def logits(
    model: ModelArgument,
    text: TextOption,
    target: TargetOption = None,
    top: Annotated[int, typer.Option(min=1, help="Tokens per layer.")] = 4,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: layer to tokens.")] = False,
) -> None:
    """Show which next token the model would predict after every layer: the logit lens.

    The head of the model is applied to the residual stream after each layer, at the last token. Of an encoder-decoder
    these are the layers of its decoder.

    \b
    Examples:
      regard lens logits runs/demo --text "Ben is in the cellar. Where is Ben? Ben is in the"
      regard lens logits models/t5 --text "translate English to German: a cat" --target "eine"
    """
    llm = open_inspected(model, device)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from regard.lens.inputs import is_encoder_decoder
    from regard.lens.recorded_residual import RecordedResidual

    side = "target" if is_encoder_decoder(llm.model) else ""
    recorded, layers = RecordedResidual(llm.model, encode_inputs(model, llm, text, target), side), {}
    for depth, name in enumerate(recorded.names):
        found = recorded.predictions(depth, slice(-1, None), top)
        tokens = (llm.tokenizer.decode_token(id) for id in found.top[0].tolist())
        pairs = zip(tokens, found.probabilities[0].tolist(), strict=True)
        layers[name] = [{"token": token, "probability": p} for token, p in pairs]
    if as_json:
        print_json(layers)
        return
    table = Table("after", "next token, by the head of the model")
    for name, tokens in layers.items():
        row = ", ".join(f"{entry['token']!r} {entry['probability']:.2f}" for entry in tokens)
        table.add_row(name, Text(row))  # Text: a token with brackets is not markup
    Console().print(table)


def attribute(
    model: ModelArgument,
    text: TextOption,
    token: Annotated[str, typer.Option(help="The next token whose logit is split into terms.")],
    minus: Annotated[str | None, typer.Option(help="Split the difference to the logit of this token.")] = None,
    target: TargetOption = None,
    by: Annotated[
        Literal["sublayer", "head", "neuron"], typer.Option(help="One term per sublayer, head or neuron.")
    ] = "head",
    top: Annotated[int, typer.Option(min=1, help="Show so many of the largest terms.")] = 20,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: name to value, all terms.")] = False,
) -> None:
    """Split the logit of the next token into the terms that each part of a decoder adds directly.

    The terms sum to the logit. Effects through later layers are not part of them. Of an encoder-decoder the text is the
    source, and the terms are those of its decoder.

    \b
    Examples:
      regard lens attribute runs/demo --text "Anna is in the" --token " barn" --minus " garden"
      regard lens attribute runs/demo --text "Anna is in the" --token " barn" --by neuron --top 10
      regard lens attribute models/t5 --text "translate English to German: a cat" --target "eine" --token " Katze"
    """
    llm = open_inspected(model, device)
    from rich.console import Console
    from rich.table import Table

    from regard.lens import logit_attribution

    answer, other = llm.tokenizer.single_id(token), None if minus is None else llm.tokenizer.single_id(minus)
    found = logit_attribution(llm.model, encode_inputs(model, llm, text, target), answer, other, by=by)
    terms = dict(zip(found.names, found.values[:, 0].tolist(), strict=True))
    if as_json:
        print_json(terms)
        return
    table = Table("term", "value", caption=f"sum of all {len(terms)} terms: {found.total.item():.3f}")
    for name in sorted(terms, key=lambda name: -abs(terms[name]))[:top]:
        table.add_row(name, f"{terms[name]:.3f}")
    Console().print(table)
