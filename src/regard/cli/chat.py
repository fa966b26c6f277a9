"""`regard chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from regard.cli.open_engine import (
    CacheOption,
    EngineOptions,
    QuantizeOption,
    check_cache,
    excludes_drafts,
    quantize_weights,
)
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument
from regard.cli.speculation_options import (
    DraftChainsOption,
    DraftTokensOption,
    SpeculateOption,
    check_speculation,
    open_drafter,
)


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="The system message of the conversation.")] = None,
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="With the same seed the answers are the same; -1: random.")] = None,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    cache: CacheOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 5,
    draft_chains: DraftChainsOption = 1,
) -> None:
    """Chat with a model in the terminal.

    /help lists the commands: /new, /system, /retry, /undo, /set, /save, /load, /quit. Ctrl-C stops an answer; Ctrl-D,
    or Ctrl-C twice, leaves. A pasted text is one message; Alt-Enter, or a backslash at the end of a line, continues a
    message on the next line. Without a terminal every line of standard input is a message.

    \b
    Examples:
      regard chat runs/demo --temperature 0
      regard chat smollm2 --system "Answer in one sentence."
      regard chat smollm2 --quantize int8 --cache int8
      regard chat smollm2 --speculate ngram
      echo "Where is Anna?" | regard chat runs/demo
    """
    from regard.cli.chat_terminal import open_terminal
    from regard.cli.conversation import Conversation
    from regard.cli.open_model import open_model

    options = EngineOptions(device, quantize=quantize, cache=cache, speculate=speculate, draft_chains=draft_chains)
    check_cache(options)
    check_speculation(options.speculate, excludes_drafts(options), draft_chains)
    llm = open_model(model, device, context, adapter, packed=quantize == "stored")
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template, so it cannot chat; use `regard generate`")
    if quantize is not None and quantize != "stored":
        quantize_weights(llm.model, quantize)
    llm.rows = 1  # the engine reserves memory for one request
    if cache is not None or speculate is not None:
        from regard.engine.engine import Engine

        llm.engine = Engine(
            llm.model, rows=draft_chains, capacity=context, cache=cache, draft_tokens=draft_tokens,
            speculation=open_drafter(options.speculate, model, options.device, chains=draft_chains),
        )  # fmt: skip
    terminal = open_terminal()
    conversation = Conversation(
        llm, terminal, system, max_new=max_new, temperature=temperature, top_p=top_p, seed=seed
    )  # fmt: skip
    terminal.notice(f"{model}, a context of {llm.engine.capacity} tokens. /help lists the commands, Ctrl-D leaves.")
    conversation.run()
