"""A batch: an immutable set of named tensors with the same first dimension.

Language modelling uses `tokens`, `targets`, `weights`, `positions` and `segments`, all (B, L): `targets` are predicted
from `tokens`, each loss is multiplied by its weight, and tokens attend only within their own segment. An objective
declares the fields that it needs.
"""

from collections.abc import Iterator, Mapping

import torch


class Batch(Mapping[str, torch.Tensor]):
    """`batch.tokens` and `batch["tokens"]` are the same tensor; fields cannot be added or replaced."""

    _tensors: dict[str, torch.Tensor]

    def __init__(self, **tensors: torch.Tensor):
        sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"all tensors of a batch need the same number of rows, found {sizes}")
        object.__setattr__(self, "_tensors", tensors)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def size(self) -> int:
        """The number of rows."""
        return next(iter(self._tensors.values())).shape[0]

    @property
    def token_count(self) -> int:
        """The number of tokens without padding; of rows if there are no tokens."""
        if "segments" in self:
            return int((self.segments >= 0).sum())
        if "valid" in self:
            return int(self.valid.sum())
        return self.tokens.numel() if "tokens" in self else self.size

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})

    def rows(self, selected: slice | list[int]) -> "Batch":
        """The selected rows, for example of one micro-batch."""
        return Batch(**{name: tensor[selected] for name, tensor in self.items()})

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["_tensors"][name]
        except KeyError:
            raise AttributeError(f"the batch has no field {name!r}; it has {', '.join(self.fields)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is immutable; create a new one to change {name!r}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={tuple(tensor.shape)}' for name, tensor in self.items())})"
