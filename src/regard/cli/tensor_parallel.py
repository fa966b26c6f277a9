"""`--tensor-parallel N`: a model divided over N processes of this machine, which the command starts itself."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regard.language_model import LanguageModel

TensorParallelOption = Annotated[
    int,
    typer.Option(
        "--tensor-parallel", min=1, help="Divide the matrices over this many processes, one per GPU or on the CPUs."
    ),
]
GRACE = 15.0  # seconds in which the server sends the last events, if a process has ended


def open_parallel_engine(
    path: Path,
    llm: "LanguageModel",
    size: int,
    adapter: Path | None,
    dtype: str,
    on_failure: Callable[[str], None],
    **options: Any,
) -> None:
    """Give the model an engine of `size` processes. For the options see `Ranks.open_engine`."""
    from regard.engine.inputs import decoder_of
    from regard.engine.ranks import Ranks

    device = decoder_of(llm.model).embedding.weight.device
    if device.index:
        raise ValueError(f"--tensor-parallel starts at the first GPU, not {device}; choose by CUDA_VISIBLE_DEVICES")
    build = partial(load_model, path=path, context=options.get("capacity"), adapter=adapter, dtype=dtype)
    ranks = Ranks(build, size, device.type, on_failure)
    atexit.register(ranks.close)
    llm.engine = ranks.open_engine(llm.model, **options)
    llm.rows = llm.engine.store.rows


def load_model(
    device: "torch.device", path: Path, context: int | None, adapter: Path | None, dtype: str
) -> "nn.Module":
    """The model of another rank, in its process."""
    from regard.cli.open_model import open_model

    return open_model(path, str(device), context, adapter, dtype).model


def report(reason: str) -> None:
    print(f"regard: {reason}", file=sys.stderr, flush=True)


def stop_server(reason: str) -> None:
    """End the server: its open streams get an error event."""
    report(f"{reason}; the server ends, start it again")
    timer = threading.Timer(GRACE, os._exit, (1,))  # a sum that waits for the rank that has ended cannot be cancelled
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)
