"""Differences between versions of torch and safetensors, and between machines."""

import ctypes
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors.torch import save_file

P = ParamSpec("P")
R = TypeVar("R")

EXIT_SECONDS = 5.0  # that Ctrl-C waits for the thread of run_in_thread
HAS_TRITON = importlib.util.find_spec("triton") is not None  # published for Linux only
DTYPES = {
    "auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip
# torch.compile supports grouped_mm in bfloat16 in all versions, in float32 only from 2.15.
COMPILES_GROUPED_MM = torch.__version__ >= "2.15"
# One function compiled for many models would reach the recompilation limit, which is per code object.
COMPILE_OPTIONS: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
)


def allow_recompiles() -> AbstractContextManager:
    """For calls of a function that is compiled for many sizes and sublayers, also of many models without isolation.

    Beyond torch's limit of 8, the sublayers of a model with two kinds of attention would run eagerly.
    """
    import torch._dynamo  # seconds to import

    return torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1 << 14)


def cannot_compile(device: torch.device) -> str | None:
    """The reason why torch.compile would fail on this device; None if it works."""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    if device.type == "cpu" and not any(map(shutil.which, filter(None, compilers))):
        return "torch.compile needs a C++ compiler on a CPU (Debian: apt-get install g++); running eagerly"
    return None


def share_derived_tensors() -> None:
    """Let blocks with activation checkpointing share the tensors of a layout in a compiled model.

    The first block stores them, a side effect at which torch.compile would interrupt the graph. The backward need not
    repeat it. Versions of torch without this setting interrupt the graph, with the same results.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    if hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator like torch.compiler.disable: compiled models interrupt their graph here and run the function eagerly.

    For shapes that depend on the data, and for operations that torch.compile would unroll token by token.
    torch.compiler.disable is called in the first trace because it imports the compiler, which takes seconds.
    """
    disabled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call


def cannot_run_triton(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on this device; None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA GPU, not {device.type}"
    return None if HAS_TRITON else "needs triton, which is not installed"


def supports_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's grouped_mm supports rows x (T, I) and matrices weight (X, O, I).

    It does not support float64, and needs rows that are multiples of 16 bytes, in its backward too.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    traced = torch.compiler.is_compiling() or x.is_meta
    return x.dtype != torch.float64 and aligned and (x.dtype == torch.bfloat16 or not traced or COMPILES_GROUPED_MM)


def resolve_device(name: str) -> str:
    """The device's name; `auto` is the GPU if there is one. Raises ValueError if this machine lacks the device.

    Turns TF32 off in cuDNN, where it is on by default, so that float32 convolutions are computed in float32.
    """
    torch.backends.cudnn.allow_tf32 = False
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):  # AssertionError: a torch that was built without CUDA
        available = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"there is no device {name!r} here; choose one of {', '.join(available)}") from None
    return name


def run_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function(*args, **kwargs)`, called in a thread that ends, and with it its OpenMP threads.

    Each thread that calls torch on a CPU has OpenMP threads of its own, one per core, as long as it lives. If those of
    all threads are more than the cores, GNU's OpenMP lets them sleep where they would spin otherwise, and the many
    short parallel regions of a decode step take up to a third longer.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # raised again in the calling thread
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)  # a daemon: a second Ctrl-C need not wait for it
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:  # while the interpreter exits, a thread inside torch would abort the process
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        thread.join(EXIT_SECONDS)
        raise


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of this name; `auto` is None, the stored one. Raises ValueError for another name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}, or a torch.dtype")
    return DTYPES[dtype]


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that the umask gives: some versions of safetensors write it with 0600.

    It replaces an older file when it is complete.
    """
    partial = path.with_name(f".{path.name}.part")
    partial.unlink(missing_ok=True)
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(dict(tensors), partial, metadata)
        partial.chmod(mode)
        partial.replace(path)
    except BaseException:  # a full disk: nothing of the new file stays
        partial.unlink(missing_ok=True)
        raise
