"""Hooks by name: which modules a pattern means, and hooks that are gone when their block ends, however it ends.

Names are those of `model.named_modules()`; a `*` stands for any run of characters, dots too. Between blocks the
residual stream is `stack.input`, `stack.blocks.0`, `stack.blocks.1` …; inside attention `…body.q` and `…body.k` are
queries and keys as they are compared (rotated), `…body.v` the values, `…body.z` what each head read.
"""

import re
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.attention.pages import gathered
from regard.spec import nearest

Hook = Callable[[str, Tensor], Tensor | None]  # (name, output) -> what takes its place, or None to leave it


def match(model: nn.Module, pattern: str) -> list[str]:
    """The names that the pattern means, at least one."""
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        kinds = {re.sub(r"\d+", "*", name) for name in names}
        raise ValueError(f"no module is named {pattern!r}; {nearest(pattern, kinds)}")
    return found


@contextmanager
def hooked(model: nn.Module, hooks: list[tuple[str, Hook]]) -> Generator[None]:
    """While the block runs, each hook sees the output of the module of its name."""
    with ExitStack() as ending:
        if "torch._dynamo" in sys.modules:  # a compiled forward would run on without ever calling the hooks
            ending.enter_context(torch.compiler.set_stance("force_eager"))
        for name, hook in hooks:
            handle = model.get_submodule(name).register_forward_hook(checked(name, hook))
            ending.callback(handle.remove)
        yield


def checked(name: str, hook: Hook) -> Callable[..., Any]:
    def call(module: nn.Module, inputs: tuple, output: Any) -> Any:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):  # a block: (x, losses)
            new = hook(name, output[0])
            return None if new is None else (new, *output[1:])
        output = gathered(output)
        if not isinstance(output, Tensor):
            raise ValueError(f"{name} gives a {type(output).__name__}, not a tensor; name a module inside it")
        return hook(name, output)

    return call
