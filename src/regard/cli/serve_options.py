"""Options of `regard serve` for the network and for adapters; for those of the engine see open_engine.py."""

import os
from pathlib import Path
from typing import Annotated

import typer

ServedModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Runs, model folders, GGUF files, names that `regard models` lists; NAME=MODEL names one in the API.",
    ),
]
HostOption = Annotated[str, typer.Option(help="Address to listen on; any other than 127.0.0.1 requires a key.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port.")]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="API key that clients must send; safer in the environment variable REGARD_KEY than here. Several, "
        "repeated or separated by commas: requests of different keys are served equally, and share no cached "
        "prefixes.",
    ),
]
NameOption = Annotated[str | None, typer.Option(help="The name of a single model in the API; by default the folder's.")]
MaxBodyOption = Annotated[
    int | None,
    typer.Option(min=1024, help="Largest body of a request in bytes; by default 1 MiB, with images or audio 26 MiB."),
]
AllowHostOption = Annotated[
    list[str] | None, typer.Option(help="A host name by which clients may call the server; can be repeated.")
]
AllowOriginOption = Annotated[
    list[str] | None,
    typer.Option(help="An origin (https://app.example) whose pages may call the server; can be repeated."),
]
ReplicasOption = Annotated[
    int | None, typer.Option(min=1, help="Serve by this many processes on Ray, each with all models.")
]
AccessLogOption = Annotated[bool, typer.Option("--access-log", help="Write a line per request to stderr.")]
LoraModulesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=PATH", help="An adapter that requests name as their model; can be repeated, and mixed."),
]
LoraFolderOption = Annotated[
    Path | None, typer.Option(help="A folder of adapters that clients may load and unload at run time.")
]
IndexOption = Annotated[
    Path | None,
    typer.Option(help="An index of documents, by `regard index`: chats are answered from what a search in it finds."),
]
RunsOption = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The training runs that the page shows; the demo is trained there.")
]
MaxCpuLorasOption = Annotated[int, typer.Option(min=1, help="Adapters that may be loaded per model.")]
MaxLorasOption = Annotated[
    int, typer.Option(min=1, help="Adapters that run at the same time; requests with others wait.")
]


def split_keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys that were given, or else those in REGARD_KEY, which are separated by commas.

    Not by typer, which splits a variable of several values at spaces, so that each word of a key would be one.
    """
    values = given or [os.environ.get("REGARD_KEY", "")]
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())
