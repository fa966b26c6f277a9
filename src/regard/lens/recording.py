"""Keep what modules give while a block runs:

    with record(model, "stack.blocks.*") as seen:
        model(ids)
    seen["stack.blocks.0"]                             # (B, L, D)

The forward runs eagerly, also of a model that was compiled.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from regard.lens.hooks import hooked, match


class Recorded(dict[str, Tensor]):
    """Outputs by module name, in the order of their latest call."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name} was not recorded; what ran under a recorded name: {', '.join(self) or 'nothing'}")


@contextmanager
def record(model: nn.Module, patterns: str | Sequence[str], grad: bool = False) -> Generator[Recorded]:
    """Keep the latest output of every module whose name matches (`*` patterns as in lens/hooks.py).

    Kept are copies outside the graph, safe from writes in place (a store's keys change with the next token); with
    `grad` the very tensors, so that gradients can be taken with respect to them.
    """
    seen = Recorded()

    def keep(name: str, output: Tensor) -> None:
        seen.pop(name, None)
        seen[name] = output if grad else output.detach().clone()

    patterns = [patterns] if isinstance(patterns, str) else patterns
    names = dict.fromkeys(name for pattern in patterns for name in match(model, pattern))
    with hooked(model, [(name, keep) for name in names]):
        yield seen
