"""Which backend computes a case: the first of a table that has nothing against it, or the one that was named."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from regard.spec import nearest

ReturnType = TypeVar("ReturnType")
Backends = Mapping[str, ModuleType]


def refuses(module: ModuleType, *case: Any) -> str | None:
    return module.refuses(*case)


def first(backends: Backends, *case: Any, against: Callable[..., str | None] = refuses) -> tuple[str, str]:
    """The first backend that has nothing against this case, and what those before it had; the last takes every case."""
    passed = []
    for name, module in backends.items():
        reason = against(module, *case)
        if reason is None:
            return name, "; ".join(passed) or f"{name} is the fastest and takes this case"
        passed.append(reason)
    raise AssertionError(f"{name} takes every case")


def named(what: str, name: str, backends: Backends, run: Callable[..., ReturnType]) -> Callable[..., ReturnType]:
    """`run(name, *case)` as a function of the case, which raises ValueError for one that the backend does not take."""
    if name not in backends:
        raise ValueError(f"there is no {what} backend {name!r}; {nearest(name, ['auto', *backends])}")
    module = backends[name]

    def chosen(*case: Any) -> ReturnType:
        reason = module.refuses(*case)
        if reason is not None:
            raise ValueError(f"{what} backend {name!r}: {reason}; choose another, or auto")
        return run(name, *case)

    chosen.__name__ = name
    return chosen
