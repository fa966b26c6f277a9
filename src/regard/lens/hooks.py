"""Record the outputs of modules, or replace them, while a `with` block runs.

    with record(model, "stack.blocks.*") as recorded:
        model(ids)
    recorded["stack.blocks.0"]                         # (B, L, D)

    with patch(model, {"stack.blocks.3.sublayers.0.body.z": lambda z: z.index_fill(1, head, 0)}):
        model(ids)                                     # one head of layer 3 contributes nothing

Names are those of `model.named_modules()`; `*` matches any characters, dots too. Between blocks the residual stream is
`stack.input`, `stack.blocks.0`, `stack.blocks.1` …; inside attention `…body.q` and `…body.k` are the queries and keys
of the scores (rotated), `…body.v` the values, `…body.z` the output of each head. Activation patching (Vig et al. 2020;
Meng et al. 2022) patches a tensor recorded in one run into another. Hooks run eagerly, also in a compiled model.
"""

import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.attention.arguments import gather_pages
from regard.spec import suggest_name

Hook = Callable[[str, Tensor], Tensor | None]  # (name, output) -> its replacement, or None to keep it
Edit = Tensor | Callable[[Tensor], Tensor]


class Recorded(dict[str, Tensor]):
    """Outputs by module name, in the order of their latest call."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name} was not recorded; recorded: {', '.join(self) or 'nothing'}")


@contextmanager
def record(model: nn.Module, patterns: str | Sequence[str], grad: bool = False) -> Generator[Recorded]:
    """Keep the latest output of every module whose name matches one of the patterns.

    Outputs are detached copies, which in-place writes (a store's keys change with the next token) do not affect; with
    `grad` they are the tensors of the graph, so that gradients can be computed with respect to them.
    """
    recorded = Recorded()

    def keep(name: str, output: Tensor) -> None:
        recorded.pop(name, None)
        recorded[name] = output if grad else output.detach().clone()

    patterns = [patterns] if isinstance(patterns, str) else patterns
    names = dict.fromkeys(name for pattern in patterns for name in match(model, pattern))
    with hooked(model, [(name, keep) for name in names]):
        yield recorded


def patch(model: nn.Module, edits: Mapping[str, Edit]) -> AbstractContextManager[None]:
    """Replace outputs: by name or pattern, a tensor, or a function from the output to its replacement."""
    return hooked(model, [(name, edit_hook(edit)) for pattern, edit in edits.items() for name in match(model, pattern)])


def edit_hook(edit: Edit) -> Hook:
    def hook(name: str, output: Tensor) -> Tensor:
        new = edit if isinstance(edit, Tensor) else edit(output)
        if not isinstance(new, Tensor):
            raise ValueError(f"patch of {name}: the function returned {type(new).__name__}; it must return a tensor")
        if (new.shape, new.dtype, new.device) != (output.shape, output.dtype, output.device):
            raise ValueError(
                f"patch of {name}: the replacement is {describe(new)}; it must be {describe(output)}, like the output"
            )
        return new

    return hook


def describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def match(model: nn.Module, pattern: str) -> list[str]:
    """The module names that match; ValueError if there is none."""
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        without_numbers = {re.sub(r"\d+", "*", name) for name in names}
        raise ValueError(f"no module is named {pattern!r}; {suggest_name(pattern, without_numbers)}")
    return found


@contextmanager
def hooked(model: nn.Module, hooks: list[tuple[str, Hook]]) -> Generator[None]:
    """Attach hooks by module name, and remove them when the block ends, also by an exception."""
    with eager_hooks() as stack:
        for name, hook in hooks:
            handle = model.get_submodule(name).register_forward_hook(with_tensor(name, hook))
            stack.callback(handle.remove)
        yield


@contextmanager
def eager_hooks() -> Generator[ExitStack]:
    """A stack for the removal of hooks. Compiled models run eagerly meanwhile, since their graphs have no hooks."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack


def with_tensor(name: str, hook: Hook) -> Callable[..., Any]:
    """A forward hook that calls `hook` with the tensor of the output."""

    def call(module: nn.Module, inputs: tuple, output: Any) -> Any:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):  # a block: (x, losses)
            new = hook(name, output[0])
            return None if new is None else (new, *output[1:])
        output = gather_pages(output)
        if not isinstance(output, Tensor):
            raise ValueError(f"{name} returns a {type(output).__name__}, not a tensor; name a module inside it")
        return hook(name, output)

    return call
