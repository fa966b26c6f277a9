"""Choose a kernel backend from a table: the first one that supports the arguments, or one by name.

A backend is a module with a function `unsupported_reason(*arguments)`, which returns the reason why it does not support
the arguments, or None.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from regard.spec import suggest_name

ReturnType = TypeVar("ReturnType")
Backends = Mapping[str, ModuleType]


def unsupported_reason(module: ModuleType, *arguments: Any) -> str | None:
    return module.unsupported_reason(*arguments)


def first_suitable(
    backends: Backends, *arguments: Any, rejection: Callable[..., str | None] = unsupported_reason
) -> tuple[str, str]:
    """The first backend for which `rejection` returns None, and the reasons against those before it.

    The last backend of a table must support all arguments.
    """
    reasons = []
    for name, module in backends.items():
        reason = rejection(module, *arguments)
        if reason is None:
            return name, "; ".join(reasons) if reasons else f"{name} is the fastest and supports these arguments"
        reasons.append(reason)
    raise AssertionError("the last backend of a table supports all arguments")


def checked_backend(
    operation: str, name: str, backends: Backends, run: Callable[..., ReturnType],
    rejection: Callable[..., str | None] = unsupported_reason,
) -> Callable[..., ReturnType]:  # fmt: skip
    """`run(name, *arguments)` as a function that raises ValueError for arguments that the backend does not support."""
    if name not in backends:
        raise ValueError(f"there is no {operation} backend {name!r}; {suggest_name(name, ['auto', *backends])}")
    module = backends[name]

    def run_checked(*arguments: Any) -> ReturnType:
        reason = rejection(module, *arguments)
        if reason is not None:
            raise ValueError(f"{operation} backend {name!r}: {reason}; choose another backend, or auto")
        return run(name, *arguments)

    run_checked.__name__ = name
    return run_checked
