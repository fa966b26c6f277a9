"""`regard serve --replicas`: the application of a replica, opened in its process, and the server in front of them."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.open_engine import EngineOptions
from regard.cli.open_served import NamedModel, load_adapters, open_served

if TYPE_CHECKING:
    from fastapi import FastAPI
    from rich.console import Console

    from regard.server.network_options import NetworkOptions


def run_replicas(
    models: list[NamedModel], loras: dict[str, Path], options: EngineOptions, network: "NetworkOptions", replicas: int,
    console: "Console", on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until a signal arrives."""
    import torch

    from regard.engine.memory import ROWS, SHARES
    from regard.server.replicas import serve_replicas

    uses_gpu = options.device.startswith("cuda") or options.device == "auto" and torch.cuda.is_available()
    if not uses_gpu and not os.environ.get("RAY_ADDRESS"):  # the replicas share the memory of this machine
        options = options._replace(memory=(options.memory or SHARES["cpu"]) / replicas)
    models = [NamedModel(name, absolute(path)) for name, path in models]
    loras = {name: absolute(path) for name, path in loras.items()}
    open_app = partial(open_replica, models, loras, options, network)
    console.print(f"starting {replicas} replicas on Ray …", highlight=False)
    rows = options.rows or ROWS["cuda" if uses_gpu else "cpu"]
    requests = rows + max(2, rows // 4)  # some wait in the replica, so that a row that ends is filled at once
    serve_replicas(
        open_app, network, replicas, requests=requests, queue=options.queue, gpus=int(uses_gpu), on_ready=on_ready
    )


def absolute(path: Path) -> Path:
    """A replica may run in another folder; a name that is no path stays as it is."""
    return path.resolve() if path.exists() else path


def open_replica(
    models: list[NamedModel], loras: dict[str, Path], options: EngineOptions, network: "NetworkOptions"
) -> "FastAPI":
    """The application of one replica. The server in front of it writes the access log."""
    from rich.console import Console

    from regard.server.app import create_app

    console = Console(file=sys.stderr)
    served = open_served(models, console, options)
    load_adapters(served[0], loras, console)
    return create_app(served, replace(network, access_log=False))
