"""A batch: a frozen set of named tensors that share their first dimension.

Language modelling uses `tokens`, `targets`, `weights`, `positions` and `segments`, all (B, L): predict `targets` from
`tokens`, count each loss by its weight, let a token see only its own segment. An objective names the fields it needs.
"""

from collections.abc import Iterator, Mapping

import torch


class Batch(Mapping[str, torch.Tensor]):
    """`batch.tokens` and `batch["tokens"]` are the same tensor; nothing can be added or replaced."""

    _tensors: dict[str, torch.Tensor]

    def __init__(self, **tensors: torch.Tensor):
        rows = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(rows.values())) != 1:
            raise ValueError(f"the tensors of a batch need the same number of rows, got {rows}")
        object.__setattr__(self, "_tensors", tensors)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def size(self) -> int:
        """How many rows it has."""
        return next(iter(self._tensors.values())).shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})

    def rows(self, chosen: slice) -> "Batch":
        """Some of the rows, as for one step of gradient accumulation."""
        return Batch(**{name: tensor[chosen] for name, tensor in self.items()})

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["_tensors"][name]
        except KeyError:
            raise AttributeError(f"the batch has no {name!r}; it has {', '.join(self.fields)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is frozen; make a new one to change {name!r}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={tuple(tensor.shape)}' for name, tensor in self.items())})"
