"""Modules whose weight stays in a number format: the stored tensors are their buffers.

    W' = format.dequantize(stored)

`StoredWeight` is the base of all of them: of linear layers (quantized.py) and of the embedding here, which reads the
rows of its tokens only: E[tokens] = format.dequantize(stored[tokens]).
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.formats.base import NumberFormat


class StoredWeight(nn.Module):
    """The buffers have the names that the format gives its tensors."""

    def __init__(self, format: NumberFormat, stored: Mapping[str, Tensor], dtype: torch.dtype):
        """dtype: of the weight that is read from the format."""
        super().__init__()
        self.format, self.dtype, self.stored_names = format, dtype, tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    @property
    def stored(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self.stored_names}

    @property
    def weight(self) -> Tensor:
        """W' in the dtype of the module."""
        return self.format.dequantize(self.stored, self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`to(dtype)` changes the dtype of W', not that of what is stored."""
        stored = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in stored.items():
            setattr(self, name, tensor.to(self.get_buffer(name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class QuantizedEmbedding(StoredWeight):
    """A frozen embedding table, in a format that stores every row by itself, such as GGUF's blocks."""

    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ):
        """stored: tensors with one row per token. shape: (tokens, width) of the table."""
        super().__init__(format, stored, dtype)
        self.num_embeddings, self.embedding_dim = shape

    def forward(self, tokens: Tensor) -> Tensor:
        rows = {name: F.embedding(tokens, tensor) for name, tensor in self.stored.items()}
        return self.format.dequantize(rows, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.kind}"
