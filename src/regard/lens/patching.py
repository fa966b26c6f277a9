"""Patch: put something else in the place of what modules give, while a block runs.

    with patch(model, {"stack.blocks.3.sublayers.0.body.z": lambda z: z.index_fill(1, head, 0)}):
        model(ids)                                     # as if this head of layer 3 were not there

Activation patching (Vig et al. 2020; Meng et al. 2022) is a recorded tensor of one run given to another.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn

from regard.lens.hooks import Hook, hooked, match

Edit = Tensor | Callable[[Tensor], Tensor]


def patch(model: nn.Module, edits: Mapping[str, Edit]) -> AbstractContextManager[None]:
    """Each name (or `*` pattern) with a tensor to put there, or a function from the output to its replacement."""
    return hooked(model, [(name, replace(edit)) for pattern, edit in edits.items() for name in match(model, pattern)])


def replace(edit: Edit) -> Hook:
    def hook(name: str, output: Tensor) -> Tensor:
        new = edit if isinstance(edit, Tensor) else edit(output)
        if not isinstance(new, Tensor):
            raise ValueError(f"patch of {name}: the function gave {type(new).__name__}; it must return the new tensor")
        if (new.shape, new.dtype, new.device) != (output.shape, output.dtype, output.device):
            raise ValueError(f"patch of {name}: {about(new)} cannot stand for {about(output)}")
        return new

    return hook


def about(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
