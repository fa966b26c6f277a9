"""`regard generate`: continue a text."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import ContextOption, DeviceOption, ModelArgument

if TYPE_CHECKING:
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling, Token
    from regard.text.tokenizer import Tokenizer


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; - reads standard input.")],
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this share of the highest probability.")
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
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with ids, text and logprobs.")] = False,
) -> None:
    """Continue a text.

    \b
    Examples:
      regard generate runs/demo --prompt "Anna went to the" --max-new 40
      regard generate runs/demo --prompt "Anna went to the" --temperature 0 --json
    """
    from regard.cli.open_model import open_model
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling

    text = sys.stdin.read() if prompt == "-" else prompt
    network, tokenizer = open_model(model, device)
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text, special=special)]
    sampling = Sampling(
        max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop_ids=tokenizer.stop_ids,
    )  # fmt: skip
    engine = Engine(network, rows=1, capacity=context)
    deltas = stream_text(engine, tokenizer, ids, sampling, tuple(stop or ()), continues_prompt=True)
    if as_json:
        tokens, texts = zip(*deltas, strict=True)
        result = {"ids": [token.id for token in tokens], "text": "".join(texts)}
        print(json.dumps(result | {"logprobs": [token.logprob for token in tokens]}))
        return
    print(text, end="", flush=True)
    for _, delta in deltas:
        print(delta, end="", flush=True)
    print()


def stream_text(
    engine: "Engine",
    tokenizer: "Tokenizer",
    ids: list[int],
    sampling: "Sampling",
    stops: tuple[str, ...] = (),
    continues_prompt: bool = False,
) -> "Iterator[tuple[Token, str]]":
    """Every new token with the text that it releases; ends before a stop string.

    `continues_prompt`: the text continues the text of the prompt, in contrast to an answer in a chat.
    """
    from regard.text.detokenizer import TextStream

    stream = TextStream(tokenizer, stops, prompt_ids=ids if continues_prompt else ())
    request = engine.submit(ids, sampling)
    try:
        while request.finish is None and stream.finish is None:
            for owner, token in engine.step():
                if owner is request:
                    yield token, stream.push(token)
    finally:
        engine.cancel(request)
    if request.error:
        raise ValueError(request.error)
