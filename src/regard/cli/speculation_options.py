"""`--speculate`: the drafter of commands that generate, and what it has gained.

ngram            repeat what followed the same tokens earlier (prompt lookup)
lookahead        the model's own guesses at later tokens
draft:MODEL      a smaller model with the same tokenizer
medusa:FOLDER    heads that `regard speculate train` has written; eagle:FOLDER: a draft layer
self             the model's own blocks `ahead`; self:N: its first N layers
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

METHODS = {  # what follows the colon; "": nothing does
    "ngram": "",
    "lookahead": "",
    "draft": "MODEL, the smaller model",
    "medusa": "FOLDER, written by regard speculate train",
    "eagle": "FOLDER, written by regard speculate train",
    "self": "",
}
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Verify several proposed tokens per step, with the same output: ngram (repeats the prompt), lookahead, "
        "draft:MODEL (a smaller model with the same tokenizer), medusa:FOLDER and eagle:FOLDER (from regard speculate "
        "train), self (the model's own blocks `ahead`), self:N (its first N layers).",
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option(min=1, max=15, help="With --speculate: propose at most this many tokens at a time.")
]
DraftChainsOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="With --speculate medusa, eagle or self: verify this many candidate drafts of a greedy request at a time, "
        "in rows that are free.",
    ),
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speed, and with --speculate the acceptance of its tokens, at the end.")
]


def reads_hidden_states(speculate: str) -> bool:
    """Whether the drafter reads the hidden states of every forward, which no compiled step returns."""
    return speculate == "self" or speculate.partition(":")[0] in ("medusa", "eagle")


def check_speculation(speculate: str | None, excluded: bool, draft_chains: int = 1) -> None:
    """Raise ValueError for a method that does not exist. excluded: an option is given that does not support drafts."""
    if draft_chains > 1 and not (speculate and reads_hidden_states(speculate)):
        raise ValueError(
            f"--draft-chains {draft_chains} needs --speculate medusa:FOLDER, eagle:FOLDER or self; the other methods "
            "have one draft"
        )
    if speculate is None:
        return
    method, _, name = speculate.partition(":")
    if method not in METHODS:
        raise ValueError(f"--speculate {speculate}: there is no method {method!r}; {suggest_name(method, METHODS)}")
    needed = METHODS[method]
    if method == "self":
        if name and not (name.isascii() and name.isdecimal() and int(name) > 0):
            raise ValueError(
                f"--speculate {speculate}: {name!r} is not a number of layers; use self, or such as self:4"
            )
    elif bool(name) != bool(needed):
        remedy = f"use --speculate {method}:{needed}" if needed else f"use --speculate {method}"
        raise ValueError(f"--speculate {speculate}: {remedy}")
    if method == "draft":
        find_model(Path(name))
    if method in ("medusa", "eagle") and not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"--speculate {speculate}: {name} has no drafter; train one: regard speculate train MODEL {name}"
        )
    if excluded:
        raise ValueError("--speculate does not support --batch-invariant and --tensor-parallel; leave it out")


def open_drafter(
    speculate: str | None, target: Path | None, device: str, dtype: str = "auto", compile: bool | None = None,
    chains: int = 1,
) -> "Drafter | None":  # fmt: skip
    """The drafter of a new engine for the model `target`. device, dtype, compile: of a draft model.

    chains: candidates per greedy request.
    """
    if speculate is None:
        return None
    method, _, name = speculate.partition(":")
    match method:
        case "ngram":
            from regard.engine.speculation.prompt_lookup import PromptLookup

            return PromptLookup()
        case "lookahead":
            from regard.engine.speculation.lookahead import Lookahead

            return Lookahead()
        case "self":
            from regard.engine.speculation.ahead_blocks import AheadBlocks
            from regard.engine.speculation.first_layers import FirstLayers

            return FirstLayers(int(name)) if name else AheadBlocks(chains)
        case "draft":
            from regard.engine.speculation.draft_model import DraftModel
            from regard.load_model import load

            llm = load(Path(name), device, None if dtype == "auto" else dtype)
            return DraftModel(llm.model, compile=compile is True)
    from regard.drafter_folder import as_drafter, load_drafter
    from regard.training.base_model import fingerprint_model
    from regard.training.run import newest_checkpoint

    assert target is not None, "a trained drafter is compared with the files of its model"
    return as_drafter(load_drafter(name, method, fingerprint_model(newest_checkpoint(target))), chains)


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
