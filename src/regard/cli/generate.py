"""`regard generate`: continue a text."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from regard.cli.open_engine import (
    INVARIANT_OR_QUANTIZED,
    BatchInvariantOption,
    CacheOption,
    EngineOptions,
    QuantizeOption,
    check_cache,
    excludes_drafts,
)
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument
from regard.cli.speculation_options import (
    DraftChainsOption,
    DraftTokensOption,
    SpeculateOption,
    StatsOption,
    check_speculation,
    open_drafter,
    print_statistics,
)
from regard.cli.tensor_parallel import TensorParallelOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regard.engine.grammar import Grammar
    from regard.engine.request import Token
    from regard.language_model import LanguageModel


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
    seed: Annotated[int | None, typer.Option(help="With the same seed the text is the same; -1: a random one.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this string; repeat the option for more than one.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=256, help="Generate this many texts.")] = 1,
    schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema; the text is JSON that is valid for it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression as a whole.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The text is this string; repeat the option for more than one.")
    ] = None,
    special: Annotated[bool, typer.Option(help="Read markers such as <|user|> in the prompt as tokens.")] = True,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    tensor_parallel: TensorParallelOption = 1,
    batch_invariant: BatchInvariantOption = False,
    quantize: QuantizeOption = None,
    cache: CacheOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 5,
    draft_chains: DraftChainsOption = 1,
    stats: StatsOption = False,
    logprobs: Annotated[
        int, typer.Option(min=0, help="With --json: also the most likely tokens at each place, this many.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with ids, text, logprobs and finish, one line per text.")
    ] = False,
) -> None:
    """Continue a text.

    An encoder-decoder encodes the prompt and prints its output only. Images replace the image tokens, such as <image>,
    in the prompt; if it has none, they precede the prompt.

    \b
    Examples:
      regard generate runs/demo --prompt "Anna went to the" --max-new 40
      regard generate runs/demo --prompt "Anna went to the" --temperature 0 --json
      regard generate smollm2 --prompt "Two and two is " --regex "[0-9]+" --n 3
      regard generate smollm2 --prompt "Once upon a time" --max-new 20000 --cache sinks:4+1020
      regard generate smollm2 --prompt "Copy: 1 one, 2 two, 3 three. 1 one," --speculate ngram --stats
      regard generate models/llama-8b --prompt "Once upon a time" --speculate draft:models/llama-1b
      regard generate models/llama-8b --prompt "Once upon a time" --tensor-parallel 2
      regard generate models/llama-8b --prompt "Once upon a time" --temperature 0 --batch-invariant
      regard generate models/t5 --prompt "translate English to German: a cat" --temperature 0
      regard generate models/llava --image cat.png --prompt "USER: <image> What is it? ASSISTANT:"
    """
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    engine = EngineOptions(
        device, context, adapter, rows=n * draft_chains, tensor_parallel=tensor_parallel,
        batch_invariant=batch_invariant, quantize=quantize, cache=cache, speculate=speculate,
        draft_tokens=draft_tokens, draft_chains=draft_chains,
    )  # fmt: skip
    check_combination(engine)
    check_output_options(logprobs, as_json, schema, regex, choice)
    from regard.engine.request import derived_seed

    text = sys.stdin.read() if prompt == "-" else prompt
    llm = open_model_with_engine(model, engine)
    options: dict[str, Any] = {
        "max_new": max_new, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "top_logprobs": logprobs,
        "grammar": grammar(llm, schema, regex, choice),
    }  # fmt: skip
    ids, start = llm.encode(text, special), perf_counter()
    outputs = [  # all are submitted before the first is printed, so that they are decoded in one batch
        llm.submit(ids, stop or (), True, cast("Any", options | {"seed": derived_seed(seed, i)}), image or ())
        for i in range(n)
    ]
    for index, output in enumerate(outputs):
        if as_json:
            print(json.dumps(as_object(llm, list(output), logprobs)), flush=True)
        else:
            print("\n" if index else "", end="")
            print_text(text if llm.continues_prompt else "", output)
    if stats:
        from rich.console import Console

        tokens, seconds = int(llm.engine.metrics()["new_tokens"]), perf_counter() - start
        print_statistics(llm.engine, tokens, seconds, Console(stderr=True))


def check_output_options(
    logprobs: int, as_json: bool, schema: Path | None, regex: str | None, choice: list[str] | None
) -> None:
    if logprobs and not as_json:
        raise ValueError("--logprobs are printed with --json only; add it, or leave them out")
    if sum(given is not None for given in (schema, regex, choice)) > 1:
        raise ValueError("--schema, --regex and --choice exclude each other; give one of them")


def check_combination(options: EngineOptions) -> None:
    """Raise ValueError for options that exclude each other."""
    if options.batch_invariant and options.quantize:
        raise ValueError(INVARIANT_OR_QUANTIZED)
    if (options.batch_invariant or options.quantize) and options.tensor_parallel > 1:
        raise ValueError("--batch-invariant and --quantize do not support --tensor-parallel; leave it out")
    check_cache(options)
    check_speculation(options.speculate, excludes_drafts(options), options.draft_chains)


def open_model_with_engine(model: Path, options: EngineOptions) -> "LanguageModel":
    from regard.cli.open_engine import quantize_weights
    from regard.engine.engine import Engine
    from regard.load_model import load

    rows, context, ranks = options.rows, options.context, options.tensor_parallel
    packed = options.quantize == "stored"
    llm = load(model, options.device, context=context, adapter=options.adapter, packed=packed)
    llm.rows = rows  # the engine reserves memory for these
    if options.quantize is not None and not packed:
        quantize_weights(llm.model, options.quantize)
    if ranks > 1:
        from regard.cli.tensor_parallel import end_later, open_parallel_engine

        open_parallel_engine(model, llm, ranks, options.adapter, "auto", end_later, rows=rows, capacity=context)
    elif options.batch_invariant or options.cache or options.speculate:
        llm.engine = Engine(
            llm.model, rows=rows, capacity=context, source_capacity=context, batch_invariant=options.batch_invariant,
            cache=options.cache, draft_tokens=options.draft_tokens,
            speculation=open_drafter(options.speculate, model, options.device, chains=options.draft_chains),
        )  # fmt: skip
    return llm


def print_text(prompt: str, output: "Iterator[tuple[Token, str]]") -> None:
    """Print the prompt, then each piece of text as soon as it is generated."""
    print(prompt, end="", flush=True)
    for _, delta in output:
        print(delta, end="", flush=True)
    print()


def grammar(llm: "LanguageModel", schema: Path | None, regex: str | None, choice: list[str] | None) -> "Grammar | None":
    """The grammar that the options ask for."""
    if schema is None and regex is None and choice is None:
        return None
    if schema is not None:
        return llm.grammars.json_schema(schema.read_text(encoding="utf-8"))
    return llm.grammars.regex(regex) if regex is not None else llm.grammars.choice(choice or [])


def as_object(llm: "LanguageModel", output: "list[tuple[Token, str]]", logprobs: int) -> dict[str, Any]:
    tokens = [token for token, _ in output]
    result = {
        "ids": [token.id for token in tokens],
        "text": "".join(text for _, text in output),
        "logprobs": [token.logprob for token in tokens],
        "finish": tokens[-1].finish or "stop",  # a stop string ends the text before the tokens end
    }
    if logprobs:
        result["top_logprobs"] = [
            [{"id": id, "token": llm.tokenizer.decode_token(id), "logprob": value} for id, value in token.top_logprobs]
            for token in tokens
        ]
    return result
