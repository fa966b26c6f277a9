"""`regard chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from regard.cli.open_model import Context, DeviceOption, ModelFolder


def chat(
    model: ModelFolder,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new: Annotated[int, typer.Option(min=1, help="At most this many new tokens an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Only among the likeliest that make up this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same answers.")] = None,
    context: Context = None,
    device: DeviceOption = "auto",
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends the conversation; /new begins another.

    \b
    Examples:
      regard chat runs/demo --temperature 0
    """
    from rich.console import Console

    from regard.cli.open_model import open_model, speak
    from regard.engine.engine import Engine
    from regard.engine.request import Sampling
    from regard.text.chat import encode_chat

    network, tokenizer = open_model(model, device)
    if tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template, so it was not made for conversation; use `regard generate`")
    engine = Engine(network, rows=1, capacity=context)
    sampling = Sampling(max_new=max_new, temperature=temperature, top_p=top_p, seed=seed, stop_ids=tokenizer.stops)
    console = Console()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            said = console.input("[bold cyan]you[/]  ")
        except EOFError:
            return
        if not said.strip():
            return
        if said.strip() == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": said})
        console.print("[bold green]it[/]   ", end="")
        answer = ""
        for _, piece in speak(engine, tokenizer, encode_chat(tokenizer, messages), sampling):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
