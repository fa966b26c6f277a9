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
    models: list[NamedModel], loras: dict[str, Path], engine: EngineOptions, network: "NetworkOptions", replicas: int,
    console: "Console", on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until a signal arrives."""
    from regard.engine.memory import ROWS, SHARES
    from regard.server.replicas import ReplicaOptions, serve_replicas, started_ray

    models = [NamedModel(name, absolute(path)) for name, path in models]
    loras = {name: absolute(path) for name, path in loras.items()}
    console.print(f"starting {replicas} replicas on Ray …", highlight=False)
    with started_ray(cpus=replicas) as has_gpus:
        device = "cuda" if engine.device.startswith("cuda") or engine.device == "auto" and has_gpus else "cpu"
        if device == "cpu" and not os.environ.get("RAY_ADDRESS"):  # the replicas share the memory of this machine
            engine = engine._replace(memory=(engine.memory or SHARES["cpu"]) / replicas)
        rows = engine.rows or ROWS[device]
        requests = rows + max(2, rows // 4)  # some wait in the replica, so that a row that ends is filled at once
        options = ReplicaOptions(replicas, requests, engine.queue, gpus=int(device == "cuda"))
        serve_replicas(partial(open_replica, models, loras, engine, network), network, options, on_ready)


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
