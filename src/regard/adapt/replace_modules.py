"""Replace modules of a built model, for example linear layers by adapted or quantized ones."""

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_modules(model: AnyModule) -> AnyModule:
    """A copy of the modules of a model that shares all its tensors."""
    return deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def replace_modules(
    model: nn.Module, match: Callable[[str, nn.Module], bool], make: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Replace every module for which `match(name, module)` is true by `make(name, module)`; returns their names.

    Modules inside a replaced module are not matched. A module with several names is replaced by one new module under
    all of them. The new module is in training mode if the old one was.
    """
    matched: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in matched)
        if name and not inside and match(name, module):
            matched[name] = module
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in matched.items():
        if module not in replacements:
            replacements[module] = make(name, module).train(module.training)
        model.set_submodule(name, replacements[module])
    return list(matched)
