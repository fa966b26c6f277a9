"""`regard chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="The system message of the conversation.")] = None,
    max_new: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="With the same seed the answers are the same.")] = None,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Chat with a model in the terminal.

    /new starts a new conversation; an empty line or Ctrl-D ends the program.

    \b
    Examples:
      regard chat runs/demo --temperature 0
      regard chat smollm2 --system "Answer in one sentence."
    """
    from rich.console import Console

    from regard.cli.open_model import open_model

    llm = open_model(model, device, context, adapter)
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template, so it cannot chat; use `regard generate`")
    console = Console()
    first_messages = [{"role": "system", "content": system}] if system else []
    messages = list(first_messages)
    while True:
        try:
            line = console.input("[bold cyan]you[/]    ")
        except EOFError:
            return
        if not line.strip():
            return
        if line.strip() == "/new":
            messages = list(first_messages)
            continue
        messages.append({"role": "user", "content": line})
        console.print("[bold green]model[/]  ", end="")
        answer = ""
        for delta in llm.stream(messages, max_new=max_new, temperature=temperature, top_p=top_p, seed=seed):
            answer += delta
            print(delta, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
