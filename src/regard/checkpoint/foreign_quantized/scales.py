"""Scales of quantized layers in the files of other libraries: dtypes, shapes, and the blocks of weights that share one.

FP8 checkpoints and compressed-tensors can have a scale per block of outputs and inputs. Our formats have one per output
and group of inputs, so that of a block is repeated for each of its outputs.
"""

from dataclasses import dataclass

from torch import Tensor

from regard.families.common.config_reader import Config
from regard.weights.table import StoredTensor

SCALES = ("F16", "BF16", "F32")
BlockSize = tuple[int, int]  # (rows, columns)
WHOLE_WEIGHT = ((), (1,), (1, 1))  # the shapes in which files have one scale for the whole weight


def scale_dtype_name(tensor: StoredTensor) -> str:
    return {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[tensor.dtype]


def read_block_size(config: Config, key: str) -> BlockSize:
    block = config.values.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise config.error(key, block, "must be two positive integers")
    return block[0], block[1]


@dataclass(frozen=True)
class ScaleBlocks:
    """The last blocks are cut at the edges of the weight."""

    shape: tuple[int, int]  # (outputs, inputs)
    size: BlockSize

    @classmethod
    def of(cls, shape: tuple[int, int], size: BlockSize | None) -> "ScaleBlocks":
        """size: None for one scale per output."""
        rows, columns = (1, shape[1]) if size is None else size
        return cls(shape, (min(rows, shape[0]), min(columns, shape[1])))

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of blocks along the outputs and along the inputs."""
        (outputs, inputs), (rows, columns) = self.shape, self.size
        return -(-outputs // rows), -(-inputs // columns)

    def per_output(self, values: Tensor) -> Tensor:
        """One number per block -> (outputs, groups of inputs); one for the whole weight -> (outputs, 1)."""
        outputs, rows = self.shape[0], self.size[0]
        if values.numel() == 1:
            return values.reshape(1, 1).repeat(outputs, 1)
        return values.view(self.counts).repeat_interleave(rows, 0)[:outputs]
