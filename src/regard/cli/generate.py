"""`regard generate`: continue a text."""

import json
import sys
from typing import Annotated

import typer

from regard.cli.open_model import Context, DeviceOption, ModelFolder


def generate(
    model: ModelFolder,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; - reads standard input.")],
    max_new: Annotated[int, typer.Option(min=1, help="At most this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only among the likeliest that make up this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens at least this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what was said.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    special: Annotated[bool, typer.Option(help="Read markers such as <|user|> in the prompt as tokens.")] = True,
    context: Context = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with ids, text and logprobs.")] = False,
) -> None:
    """Continue a text.

    \b
    Examples:
      regard generate runs/demo --prompt "Anna went to the" --max-new 40
      regard generate runs/demo --prompt "Anna went to the" --temperature 0 --json
    """
    from regard.cli.open_model import open_model, speak
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling

    text = sys.stdin.read() if prompt == "-" else prompt
    network, tokenizer = open_model(model, device)
    ids = [*tokenizer.opening, *tokenizer.encode(text, special=special)]
    sampling = Sampling(
        max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop_ids=tokenizer.stops,
    )  # fmt: skip
    pieces = speak(
        Engine(network, rows=1, capacity=context), tokenizer, ids, sampling, tuple(stop or ()), continues=True
    )
    if as_json:
        said = list(pieces)
        answer = {"ids": [token.id for token, _ in said], "text": "".join(piece for _, piece in said)}
        print(json.dumps(answer | {"logprobs": [token.logprob for token, _ in said]}))
        return
    print(text, end="", flush=True)
    for _, piece in pieces:
        print(piece, end="", flush=True)
    print()
