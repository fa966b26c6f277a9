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
GRACE = 15.0  # seconds in which a server sends the last events, if one of the processes has ended


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

    device = next(decoder_of(llm.model).parameters()).device
    if device.index:
        raise ValueError(f"--tensor-parallel starts at the first GPU, not {device}; choose by CUDA_VISIBLE_DEVICES")
    build = partial(load_model, path=path, context=options.get("capacity"), adapter=adapter, dtype=dtype)
    ranks = Ranks(build, size, device.type, on_failure)
    atexit.register(ranks.close)
    # By default SIGTERM ends a process without its exit handlers. A server has its own handler while it runs.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number if ranks.failure is None else 1))
    llm.engine = ranks.open_engine(llm.model, **options)
    llm.rows = llm.engine.store.rows


def load_model(
    device: "torch.device", path: Path, context: int | None, adapter: Path | None, dtype: str
) -> "nn.Module":
    """The model of another rank, in its process."""
    from regard.cli.open_model import open_model

    return open_model(path, str(device), context, adapter, dtype).model


def end_later(reason: str) -> None:
    """End the process, with status 1, if it has not ended by itself: a sum that waits for a rank which has ended cannot
    be cancelled."""

    def end() -> None:
        print(f"regard: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(GRACE, end)
    timer.daemon = True
    timer.start()


def stop_server(reason: str) -> None:
    """End the server: its open streams get an error event."""
    print(f"regard: {reason}; the server ends, start it again", file=sys.stderr, flush=True)
    end_later(reason)
    os.kill(os.getpid(), signal.SIGTERM)
