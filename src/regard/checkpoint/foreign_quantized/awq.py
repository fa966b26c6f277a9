"""AWQ's files (AutoAWQ; Lin et al. 2023, arXiv:2306.00978): integers of 4 bits with zero points.

    version gemm    qweight (inputs, outputs / 8)   qzeros (groups, outputs / 8)   scales (groups, outputs)
    version gemv    qweight (outputs, inputs / 8)   qzeros (outputs, n)            scales (outputs, 8 n), n ≥ groups / 8

    W[o, i] = scales[g, o] (q[i, o] - z[g, o])          z = 8 if the config says zero_point: false

Eight codes are in a word of 32 bits. In gemm's words the codes of eight outputs are in the order of ORDER.
"""

from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import (
    INTEGERS,
    ForeignWeight,
    LayerFiles,
    as_bytes,
    exact_weight,
)
from regard.checkpoint.foreign_quantized.scales import SCALES, scale_dtype_name
from regard.families.common.config_reader import Config
from regard.formats.base import pack_bits, unpack_bits
from regard.formats.integers import Group, Integer

LEAVES = ("qweight", "qzeros", "scales")
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of the codes of outputs 0, 1, 2 …
BITS = 4
MIDDLE = 8  # the zero point of symmetric codes


def version(config: Config) -> str:
    found = config.values.get("version") or config.values.get("format") or "gemm"
    return found.lower() if isinstance(found, str) else repr(found)


def check(config: Config) -> None:
    bits = config.integer("bits", config.values.get("w_bit", BITS))
    if bits != BITS:
        raise config.error("bits", bits, "must be 4")
    if version(config) not in ("gemm", "gemv"):
        raise config.error("version", version(config), "is not read, only 'gemm' and 'gemv' are; use the files of one")


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    by_inputs = version(config) == "gemm"
    rows, words = layer.matrix("qweight", INTEGERS)
    outputs, inputs = (8 * words, rows) if by_inputs else (rows, 8 * words)
    size = config.integer("group_size", config.values.get("q_group_size", 128))
    size = inputs if size == -1 else size
    if size < 1 or inputs % size:
        raise config.error("group_size", size, f"must divide the {inputs} inputs of {layer.name}")
    groups, group = inputs // size, size
    if by_inputs:
        zero_shape, scale_shape = (groups, words), (groups, outputs)
    else:  # padded
        width = layer.matrix("scales", SCALES)[1] // 8
        if 8 * width < groups:
            layer.refuse("scales", f"should have {groups} groups")
        zero_shape, scale_shape = (outputs, width), (outputs, 8 * width)
    scales = layer.expect("scales", SCALES, scale_shape)
    symmetric = not config.flag("zero_point", True)
    if not symmetric or "qzeros" in layer:
        layer.expect("qzeros", INTEGERS, zero_shape)

    def unpack(leaf: str, columns: int) -> Tensor:
        """(outputs, columns)"""
        codes = unpack_bits(as_bytes(layer.find(leaf).read()), BITS)
        if not by_inputs:
            return codes[:, :columns].contiguous()
        return codes.unflatten(-1, (-1, 8))[..., ORDER].flatten(-2).t().contiguous()

    def stored() -> dict[str, Tensor]:
        scale = layer.scales("scales").t() if by_inputs else layer.scales("scales")[:, :groups]
        result = {"codes": pack_bits(unpack("qweight", inputs), BITS), "scale": scale.contiguous()}
        if not symmetric:
            return result | {"zero": unpack("qzeros", groups)}
        if "qzeros" in layer and (unpack("qzeros", groups) != MIDDLE).any():
            fault = f"should be {MIDDLE} everywhere, because the config says zero_point: false"
            layer.refuse("qzeros", fault, found="")
        return result

    name: Group = "channel" if groups == 1 else group
    format = Integer(BITS, symmetric, name, scale_dtype_name(scales))  # ty: ignore[invalid-argument-type]
    return exact_weight(format, (outputs, inputs), stored)
