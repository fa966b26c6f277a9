"""Surgery: put other modules in the place of some. Adapters and quantized linears go in this way, and stack."""

from collections.abc import Callable

from torch import nn


def swap(
    model: nn.Module, match: Callable[[str, nn.Module], bool], make: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Replace every module that `match(name, module)` chooses by `make(name, module)`; -> their names.

    What is inside a replaced module is not looked at. A module with two names is made anew once and keeps both;
    training or evaluation mode is kept.
    """
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and match(name, module):
            chosen[name] = module
    made: dict[nn.Module, nn.Module] = {}
    for name, module in chosen.items():
        if module not in made:
            made[module] = make(name, module).train(module.training)
        model.set_submodule(name, made[module])
    return list(chosen)
