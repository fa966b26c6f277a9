"""An embedding table that stays in a number format; the rows of the tokens are read from it.

    E[tokens] = format.dequantize(stored[tokens])

For formats that store every row of a table by itself, such as GGUF's blocks. The table is frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.formats.base import NumberFormat


class QuantizedEmbedding(nn.Module):
    def __init__(
        self,
        format: NumberFormat,
        stored: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ):
        """stored: tensors with one row per token. shape: (tokens, width) of the table."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = shape
        self.format, self.dtype, self.stored_names = format, dtype, tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    @property
    def stored(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self.stored_names}

    @property
    def weight(self) -> Tensor:
        """The whole table."""
        return self.format.dequantize(self.stored, self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = {name: F.embedding(tokens, tensor) for name, tensor in self.stored.items()}
        return self.format.dequantize(rows, self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedEmbedding":
        """`to(dtype)` changes the dtype of the embeddings, not that of what is stored."""
        stored = self.stored
        super()._apply(fn, recurse)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.to(self.get_buffer(name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.kind}"
