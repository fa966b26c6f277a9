"""Record the outputs of modules, or replace them, while a `with` block runs; list their names and shapes.

    with record(model, "stack.blocks.*") as recorded:
        model(ids)
    recorded["stack.blocks.0"]                         # (B, L, D)

    with patch(model, {"stack.blocks.3.sublayers.0.body.z": lambda z: z.index_fill(1, head, 0)}):
        model(ids)                                     # one head of layer 3 contributes nothing

Names are those of `model.named_modules()`; `*` matches any characters, dots too. Between blocks the residual stream is
`stack.input`, `stack.blocks.0`, `stack.blocks.1` …; inside attention `…body.q` and `…body.k` are the queries and keys
of the scores (rotated), `…body.v` the values, `…body.scores` and `…body.pattern` the scores and weights (B, H, L, S),
`…body.z` the output of each head; in a feed-forward layer `…body.neurons` are the hidden channels after the activation.
Activation patching (Vig et al. 2020; Meng et al. 2022) patches a tensor recorded in one run into another. Hooks run
eagerly, also in a compiled model. Where a hook reads scores or a pattern, attention is computed without a fast kernel.
"""

import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.attention.arguments import gather_pages
from regard.lens.recorded import Recorded, StoredActivations
from regard.spec import suggest_name

Hook = Callable[[str, Tensor], Tensor | None]  # (name, output) -> its replacement, or None to keep it
Edit = Tensor | Callable[[Tensor], Tensor]
CONTAINERS = nn.ModuleList | nn.ModuleDict  # they have no forward


@contextmanager
def record(
    model: nn.Module,
    patterns: str | Sequence[str] = "*",
    grad: bool = False,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
) -> Generator[Recorded]:
    """Keep the latest output of every module whose name matches one of the patterns.

    Outputs are detached copies, which in-place writes (a store's keys change with the next token) do not affect, on
    this `device` (None: that of the model). With `grad` they are the tensors of the graph, so that gradients can be
    computed with respect to them. With a `folder` they are written to one file per name, and read when they are used
    (recorded.py). A pattern with `*` skips outputs that are not tensors.
    """
    if grad and device is not None:
        raise ValueError(
            f"grad=True keeps the tensors of the graph, so device={device} cannot move them; leave one out"
        )
    if folder is not None and (grad or device is not None):
        raise ValueError("files keep neither a graph nor a device; leave folder out, or grad and device")
    recorded = Recorded() if folder is None else StoredActivations(folder)

    def keep(name: str, output: Tensor) -> None:
        copies = not grad and folder is None
        recorded.keep(name, output.detach().to(device or output.device, copy=True) if copies else output)

    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = dict.fromkeys(name for pattern in patterns for name in names(model, pattern))
    with hooked(model, [(name, keep) for name in found], patterns):
        yield recorded


def names(model: nn.Module, pattern: str = "*") -> list[str]:
    """The names that `record` and `patch` take: all modules inside the model that can be called; ValueError if none.

    Which of them a forward calls, and the shapes of their outputs, depends on the input: see `shapes`.
    """
    modules = [name for name, module in model.named_modules() if name and not isinstance(module, CONTAINERS)]
    found = [name for name in modules if fnmatchcase(name, pattern)]
    if not found:
        without_numbers = {re.sub(r"\d+", "*", name) for name in modules}
        raise ValueError(f"no module is named {pattern!r}; {suggest_name(pattern, without_numbers)}")
    return found


def shapes(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, tuple[int, ...]]:
    """Run `model(*inputs, **options)` and return the shapes of all activations by name, in the order of computation."""
    found: dict[str, tuple[int, ...]] = {}

    def keep(name: str, output: Tensor) -> None:
        found.pop(name, None)
        found[name] = tuple(output.shape)

    with torch.no_grad(), hooked(model, [(name, keep) for name in names(model)], ["*"]):
        model(*inputs, **options)
    return found


def patch(model: nn.Module, edits: Mapping[str, Edit]) -> AbstractContextManager[None]:
    """Replace outputs: by name or pattern, a tensor, or a function from the output to its replacement."""
    hooks = [(name, edit_hook(edit)) for pattern, edit in edits.items() for name in names(model, pattern)]
    return hooked(model, hooks, list(edits))


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


@contextmanager
def hooked(model: nn.Module, hooks: list[tuple[str, Hook]], patterns: Sequence[str]) -> Generator[None]:
    """Attach hooks by module name, and remove them when the block ends, also by an exception.

    A name that is itself one of the `patterns` must have a tensor as output; for others the hook is skipped.
    """
    with eager_hooks(model) as stack:
        for name, hook in hooks:
            call = with_tensor(name, hook, required=name in patterns)
            handle = model.get_submodule(name).register_forward_hook(call)
            stack.callback(handle.remove)
        yield


@contextmanager
def eager_hooks(*modules: nn.Module) -> Generator[ExitStack]:
    """A stack for the removal of hooks on these modules. Compiled models run eagerly meanwhile, in all threads, since
    their graphs have no hooks. No compiled code calls the modules of a copy (recorded_attention.py), so hooks on them
    change nothing for other threads."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules and not all(getattr(module, "uncompiled", False) for module in modules):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack


def with_tensor(name: str, hook: Hook, required: bool) -> Callable[..., Any]:
    """A forward hook that calls `hook` with the tensor of the output; a `required` tensor must exist."""

    def call(module: nn.Module, inputs: tuple, output: Any) -> Any:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):  # a block: (x, losses)
            new = hook(name, output[0])
            return None if new is None else (new, *output[1:])
        output = gather_pages(output)
        if not isinstance(output, Tensor):
            if not required:
                return None
            raise ValueError(f"{name} returns a {type(output).__name__}, not a tensor; name a module inside it")
        return hook(name, output)

    return call
