"""`--speculate`: the drafter of commands that generate, and what it has gained.

ngram            repeat what followed the same tokens earlier (prompt lookup)
lookahead        the model's own guesses at later tokens
draft:MODEL      a smaller model with the same tokenizer
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.find_model import find_model
from regard.spec import suggest_name

if TYPE_CHECKING:
    from rich.console import Console

    from regard.engine.engine import Engine
    from regard.engine.speculation.speculation import Drafter

METHODS = ("ngram", "lookahead", "draft")
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Verify several proposed tokens per step, with the same output: ngram (repeats the prompt), lookahead, "
        "draft:MODEL (a smaller model with the same tokenizer).",
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option(min=1, max=15, help="With --speculate: propose at most this many tokens at a time.")
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speed, and with --speculate the acceptance of its tokens, at the end.")
]


def check_speculation(speculate: str | None, excluded: bool) -> None:
    """Raise ValueError for a method that does not exist. excluded: an option is given that does not support drafts."""
    if speculate is None:
        return
    method, _, model = speculate.partition(":")
    if method not in METHODS:
        raise ValueError(f"--speculate {speculate}: there is no method {method!r}; {suggest_name(method, METHODS)}")
    if (method == "draft") != bool(model):
        remedy = "name the smaller model: --speculate draft:MODEL" if method == "draft" else f"use --speculate {method}"
        raise ValueError(f"--speculate {speculate}: {remedy}")
    if method == "draft":
        find_model(Path(model))
    if excluded:
        raise ValueError("--speculate does not support --batch-invariant, --cache and --tensor-parallel; leave it out")


def open_drafter(
    speculate: str | None, device: str, dtype: str = "auto", compile: bool | None = None
) -> "Drafter | None":
    """The drafter of a new engine. device, dtype, compile: of a draft model."""
    if speculate is None:
        return None
    method, _, model = speculate.partition(":")
    if method == "ngram":
        from regard.engine.speculation.prompt_lookup import PromptLookup

        return PromptLookup()
    if method == "lookahead":
        from regard.engine.speculation.lookahead import Lookahead

        return Lookahead()
    from regard.engine.speculation.draft_model import DraftModel
    from regard.load_model import load

    llm = load(Path(model), device, None if dtype == "auto" else dtype)
    return DraftModel(llm.model, compile=compile is True)


def print_statistics(engine: "Engine", tokens: int, seconds: float, console: "Console") -> None:
    """Speed, and what speculation has gained."""
    console.print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", highlight=False)
    if engine.speculation is None:
        return
    statistics = engine.speculation.statistics
    by_position = ", ".join(f"{share:.0%}" for share in statistics.acceptance) or "no drafts"
    rows = {
        "drafts": f"{statistics.drafts}, of {sum(statistics.proposed)} tokens; {sum(statistics.accepted)} accepted",
        "accepted": f"{by_position}, by position in the draft",
        "tokens": f"{statistics.tokens_per_draft:.2f} per forward with a draft",
        "seconds": f"{statistics.draft_seconds:.2f} for drafts, {statistics.verify_seconds:.2f} to verify them",
    }
    if statistics.speedup is not None:
        rows["speed"] = f"{statistics.speedup:.2f} times that of the steps without a draft (estimate)"
    for name, value in rows.items():
        console.print(f"  {name:<8} {value}", highlight=False)
