"""The processes (ranks) of a tensor parallel engine on one machine.

    rank 0      scheduler, sampling and API; its RecordedStore and model send what they do ──pipe──▶ ranks 1 … N-1
    all ranks   the same forward, each with its shards; sums over ranks by gloo (CPUs) or NCCL (GPUs)

    with Ranks(build, 2, "cpu") as ranks:
        engine = ranks.open_engine(model, rows=8)

Calls go through pipes, and the tensors of a step follow by broadcast. If a rank ends or fails, all end: `on_failure` is
called once, in the thread that finds the failure, and every later step raises RankError.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.engine.engine import Engine
from regard.engine.inputs import decoder_of
from regard.engine.memory import SHARES, open_store
from regard.engine.recorded_store import RecordedStore, StoreReplay
from regard.engine.stores.base import SLACK
from regard.engine.stores.paged import Paged
from regard.engine.tensor_parallel import local_states, plans_of, shard_model
from regard.layout import TokenLayout
from regard.models.decoder import DecoderModule
from regard.parts.attention import AttentionModule

TIMEOUT = timedelta(minutes=5)  # of one sum over ranks
STOP_SECONDS = 10.0
Build = Callable[[torch.device], nn.Module]  # the model, on a device


class RankError(Exception):
    """A rank ended or failed, so no rank can continue."""


class Ranks:
    def __init__(self, build: Build, size: int, device: str, on_failure: Callable[[str], None] = lambda reason: None):
        """Ranks 1 … size-1 start with the engine; each calls `build`, which must be picklable, with its own device."""
        if size < 2:
            raise ValueError(f"tensor parallel: size={size}; use at least 2 processes, or an engine without ranks")
        if device not in ("cpu", "cuda"):
            raise ValueError(
                f"tensor parallel: device={device!r} must be cpu or cuda; CUDA_VISIBLE_DEVICES selects GPUs"
            )
        if device == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(f"tensor parallel: size={size}, but there are {torch.cuda.device_count()} GPUs")
        self.build, self.size, self.device, self.on_failure = build, size, rank_device(device, 0), on_failure
        self.failure: str | None = None
        self.failing = threading.Lock()  # the monitor and a step may find the same failure
        self.closing = False
        self.recorded: list[tuple] = []
        self.pipes: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        self.folder: tempfile.TemporaryDirectory | None = None  # with the file by which the ranks connect
        self.store: RecordedStore | None = None
        self.monitor = threading.Thread(target=self.watch, name="regard-ranks", daemon=True)

    def open_engine(
        self, model: nn.Module, *, rows: int | None = None, capacity: int | None = None, memory: float | None = None,
        blocks: int | None = None, chunk: int | None = None, queue: int = 256, prefix_cache: bool = True,
    ) -> Engine:  # fmt: skip
        """Start the ranks, and open an engine for this model, whose matrices are replaced by the shards of rank 0.

        Arguments as for Engine. blocks: of the paged store; None: what fits into the memory. Steps run eagerly.
        ValueError, before any process starts, if the model cannot be divided.
        """
        decoder = decoder_of(model)
        if decoder is not model:
            raise ValueError("tensor parallel: only decoders can be divided over ranks; use replicas for this model")
        plans_of(decoder, self.size)
        decoder.eval()
        folder = self.start()
        split = shard_model(decoder, 0, self.size)
        self.wait_until_ready()
        join_group(0, self.size, self.device, folder)
        self.monitor.start()
        store = partial(self.open_store, decoder, split, memory, blocks)
        return Engine(
            ParallelDecoder(decoder, self), rows=rows, capacity=capacity, store=store, chunk=chunk, queue=queue,
            prefix_cache=prefix_cache, max_cpu_loras=0,
        )  # fmt: skip

    def start(self) -> str:
        """Start the other ranks; returns the folder with the file by which they connect."""
        self.folder = tempfile.TemporaryDirectory(prefix="regard-ranks-")
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // self.size)
        for rank in range(1, self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self.device.type, self.build, theirs, self.folder.name, threads)
            process = context.Process(target=run_rank, args=arguments, name=f"regard-rank-{rank}", daemon=True)
            process.start()
            theirs.close()  # so that we see the end of the process
            self.pipes.append(ours)
            self.processes.append(process)
        if self.device.type == "cpu":
            torch.set_num_threads(threads)
        return self.folder.name

    def wait_until_ready(self) -> None:
        """Until all ranks have loaded their shards."""
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True), 1):
            wait([pipe, process.sentinel])
            try:
                error = pipe.recv()
            except EOFError:
                error = "it ended while it loaded the model"
            if error is not None:
                raise RankError(f"rank {rank} did not start: {error}")

    def open_store(
        self, decoder: DecoderModule, split: set[AttentionModule], share: float | None, blocks: int | None, memory: Any,
        rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu", source: int = 0,
        slack: int = SLACK,
    ) -> Any:  # fmt: skip
        local = local_states(decoder, split, memory, self.size)
        device = torch.device(device)
        if device.type == "cpu":  # the ranks share the memory of the machine
            share = (share or SHARES["cpu"]) / self.size
        if blocks is None:
            store = open_store(Paged, local, rows, capacity, dtype, device, source, share)
        else:
            store = Paged(local, rows, capacity, dtype, device, source, blocks=blocks)
        assert isinstance(store, Paged), "by its constructor"
        self.record("open_store", rows, capacity, dtype, store.blocks, store.pool.max_states)
        self.store = RecordedStore(store, self.record)
        return self.store

    def together(self, forward: Callable, *args: Any) -> Any:
        """A forward that the other ranks compute too: if it fails here, they block in a collective."""
        try:
            return forward(*args)
        except Exception as error:
            self.fail(f"a forward failed on rank 0: {str(error).splitlines()[0] if str(error) else repr(error)}")
            raise RankError(self.failure) from error

    def record(self, name: str, *args: Any, **tensors: Tensor | None) -> None:
        """A call that the others make before the next forward."""
        self.recorded.append((name, args, tensors))

    def send(self, name: str, *args: Any, **tensors: Tensor | None) -> None:
        """A call that the others make now, after the recorded ones."""
        if self.failure is not None:
            raise RankError(self.failure)
        self.record(name, *args, **tensors)
        calls, self.recorded = self.recorded, []
        shapes = [
            (name, args, {key: None if t is None else (tuple(t.shape), t.dtype) for key, t in tensors.items()})
            for name, args, tensors in calls
        ]
        try:
            for pipe in self.pipes:
                pipe.send(shapes)
            for tensor in (t for _, _, tensors in calls for t in tensors.values() if t is not None):
                dist.broadcast(as_bytes(tensor.contiguous()), 0)
        except (OSError, RuntimeError) as error:
            self.fail(f"a rank cannot be reached: {error}")
            raise RankError(self.failure) from error

    def watch(self) -> None:
        """Wait for the first process that ends, in a thread of its own."""
        ended = wait([process.sentinel for process in self.processes])
        if not self.closing:
            rank, process = next((r, p) for r, p in enumerate(self.processes, 1) if p.sentinel in ended)
            process.join(1)
            self.fail(f"rank {rank} of the tensor parallel engine ended (exit code {process.exitcode})")

    def fail(self, reason: str) -> None:
        with self.failing:
            if self.failure is not None or self.closing:
                return
            self.failure = reason
        self.on_failure(reason)

    def close(self) -> None:
        """End all ranks."""
        self.closing = True
        for pipe in self.pipes:
            pipe.close()  # a rank ends when its pipe does
        for process in self.processes:
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.folder is not None:
            self.folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ParallelDecoder(DecoderModule):
    """The decoder of rank 0, whose forwards the other ranks compute too. It has the modules of the given decoder."""

    own: DecoderModule  # computes the forwards of this rank

    def __init__(self, decoder: DecoderModule, ranks: Ranks):
        nn.Module.__init__(self)
        self.__dict__.update(decoder.__dict__)
        self.__dict__["own"] = decoder  # not a submodule
        self.ranks = ranks

    def residual_stream(self, tokens: Tensor, layout: TokenLayout, states: Any = None, embeddings: Any = None) -> Any:
        if self.ranks.store is None or layout is not self.ranks.store.layout:
            raise RankError("a forward without the engine's store; tensor parallel models serve the engine only")
        self.ranks.send("residual_stream", tokens=tokens, embeddings=embeddings)
        return self.ranks.together(self.own.residual_stream, tokens, layout, states, embeddings)

    def embed(self, tokens: Tensor) -> Tensor:
        self.ranks.send("embed", tokens=tokens)
        return self.ranks.together(self.own.embed, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        self.ranks.send("logits", hidden=hidden)
        return self.ranks.together(self.own.logits, hidden)


def rank_device(device: str, rank: int) -> torch.device:
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def join_group(rank: int, size: int, device: torch.device, folder: str) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def as_bytes(tensor: Tensor) -> Tensor:
    """Booleans as bytes, which every backend can send."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def run_rank(rank: int, size: int, device: str, build: Build, pipe: Connection, folder: str, threads: int) -> None:
    """The main function of ranks 1 … size-1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; rank 0 ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    own = rank_device(device, rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        decoder = decoder_of(build(own).eval())
        split = shard_model(decoder, rank, size)
        pipe.send(None)
    except (Exception, SystemExit) as error:
        return pipe.send(str(error) or repr(error))
    join_group(rank, size, own, folder)
    try:
        repeat_calls(decoder, split, size, own, pipe)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # not through exit handlers, which would wait for the other ranks


@torch.inference_mode()
def repeat_calls(
    decoder: DecoderModule, split: set[AttentionModule], size: int, device: torch.device, pipe: Connection
) -> None:
    """Make the calls of rank 0 until it closes the pipe."""
    replay: StoreReplay | None = None
    while True:
        try:
            calls = pipe.recv()
        except (EOFError, OSError):
            return
        # All tensors arrive before the first call, in which ranks may wait for one another.
        received = [(name, args, {key: receive(shape, device) for key, shape in t.items()}) for name, args, t in calls]
        for name, args, tensors in received:
            if name == "open_store":
                rows, capacity, dtype, blocks, states = args
                local = local_states(decoder, split, decoder.spec.memory(), size)
                replay = StoreReplay(Paged(local, rows, capacity, dtype, device, blocks=blocks, states=states))
            elif name == "residual_stream":
                assert replay is not None and replay.layout is not None, "a forward follows begin_forward"
                tokens, embeddings = tensors["tokens"], tensors["embeddings"]
                assert tokens is not None, "rank 0 sends them"
                decoder.residual_stream(tokens, replay.layout, replay.states, embeddings)
            elif name in ("embed", "logits"):
                getattr(decoder, name)(*tensors.values())
            else:
                getattr(replay, name)(*args, **tensors)


def receive(shape: tuple[tuple[int, ...], torch.dtype] | None, device: torch.device) -> Tensor | None:
    if shape is None:
        return None
    tensor = torch.empty(shape[0], dtype=shape[1], device=device)
    dist.broadcast(as_bytes(tensor), 0)
    return tensor


def end_with_parent() -> None:
    """A rank that waits for another one in a sum does not see that rank 0 has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by rank 0"
    wait([parent.sentinel])
    os._exit(1)
