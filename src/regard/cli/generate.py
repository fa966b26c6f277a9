"""`regard generate`: continue a text."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument
from regard.find_model import find_model


def generate(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to continue, or to translate …; - reads standard input.")
    ],
    image: Annotated[
        list[Path] | None, typer.Option(help="An image for the prompt; repeat the option for more than one.")
    ] = None,
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this fraction of the highest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of the prompt and the answer become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="With the same seed the text is the same.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this string; repeat the option for more than one.")
    ] = None,
    special: Annotated[bool, typer.Option(help="Read markers such as <|user|> in the prompt as tokens.")] = True,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with ids, text and logprobs.")] = False,
) -> None:
    """Continue a text.

    An encoder-decoder encodes the prompt and prints its output only. Images replace the image tokens, such as <image>,
    in the prompt; if it has none, they precede the prompt.

    \b
    Examples:
      regard generate runs/demo --prompt "Anna went to the" --max-new 40
      regard generate runs/demo --prompt "Anna went to the" --temperature 0 --json
      regard generate models/t5 --prompt "translate English to German: a cat" --temperature 0
      regard generate models/llava --image cat.png --prompt "USER: <image> What is it? ASSISTANT:"
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from regard.language_model import load

    text = sys.stdin.read() if prompt == "-" else prompt
    llm = load(model, device, context=context, adapter=adapter)
    deltas = llm.submit(
        llm.encode(text, special), stop or (), True,
        {"max_new": max_new, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
         "repetition_penalty": repetition_penalty, "seed": seed},
        image or (),
    )  # fmt: skip
    if as_json:
        tokens, texts = zip(*deltas, strict=True)
        result = {"ids": [token.id for token in tokens], "text": "".join(texts)}
        print(json.dumps(result | {"logprobs": [token.logprob for token in tokens]}))
        return
    if llm.continues_prompt:
        print(text, end="", flush=True)
    for _, delta in deltas:
        print(delta, end="", flush=True)
    print()
