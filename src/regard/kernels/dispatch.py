"""Choose a kernel backend from a table: the first one that supports the arguments, or one by name.

A backend is a module with a function `refuses(*arguments)`, which returns the reason why it does not support them.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from regard.spec import nearest

ReturnType = TypeVar("ReturnType")
Backends = Mapping[str, ModuleType]


def refuses(module: ModuleType, *arguments: Any) -> str | None:
    return module.refuses(*arguments)


def first_suitable(
    backends: Backends, *arguments: Any, objection: Callable[..., str | None] = refuses
) -> tuple[str, str]:
    """The first backend without an objection, and the reasons against those before it; the last one has none."""
    reasons = []
    for name, module in backends.items():
        reason = objection(module, *arguments)
        if reason is None:
            return name, "; ".join(reasons) or f"{name} is the fastest and supports these arguments"
        reasons.append(reason)
    raise AssertionError("the last backend of a table supports all arguments")


def checked_backend(
    operation: str, name: str, backends: Backends, run: Callable[..., ReturnType],
    refusal: Callable[..., str | None] = refuses,
) -> Callable[..., ReturnType]:  # fmt: skip
    """`run(name, *arguments)` as a function that raises ValueError for arguments that the backend refuses."""
    if name not in backends:
        raise ValueError(f"there is no {operation} backend {name!r}; {nearest(name, ['auto', *backends])}")
    module = backends[name]

    def run_checked(*arguments: Any) -> ReturnType:
        reason = refusal(module, *arguments)
        if reason is not None:
            raise ValueError(f"{operation} backend {name!r}: {reason}; choose another backend, or auto")
        return run(name, *arguments)

    run_checked.__name__ = name
    return run_checked
