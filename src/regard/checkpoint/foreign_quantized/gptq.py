"""GPTQ's files (AutoGPTQ, GPTQModel; Frantar et al. 2022, arXiv:2210.17323): integers of 2, 3, 4 or 8 bits.

    qweight (inputs · b / 32, outputs)     codes in words of 32 bits, along the inputs
    qzeros  (groups, outputs · b / 32)     zero points in words along the outputs; "gptq" stores z - 1, "gptq_v2" z
    scales  (groups, outputs)
    g_idx   (inputs)                       the group of every input

    W[o, i] = scales[g_i, o] (q[i, o] - z[g_i, o])

The bits of a column of words follow each other without gaps, so a transposed `qweight` is our packed codes. Files that
were quantized with act-order have groups of scattered inputs, which our integers do not have.
"""

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import (
    INTEGERS,
    ForeignWeight,
    LayerFiles,
    as_bytes,
    exact_weight,
    other_weight,
)
from regard.checkpoint.foreign_quantized.scales import SCALES, scale_dtype_name
from regard.families.common.config_reader import Config
from regard.formats.base import unpack_bits
from regard.formats.integers import Group, Integer

LEAVES = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)


def check(config: Config) -> None:
    """Raise an error for settings that are not read."""
    bits, layout = config.integer("bits"), config.values.get("checkpoint_format") or "gptq"
    if bits not in BITS:
        raise config.error("bits", bits, f"must be one of {', '.join(map(str, BITS))}")
    if layout not in ("gptq", "gptq_v2") or config.flag("is_marlin_format", False):
        raise config.error(
            "checkpoint_format", layout, "is not read, only 'gptq' and 'gptq_v2' are; use the files before repacking"
        )
    rules = config.values.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(isinstance(rule, str) and rule.startswith("-:") for rule in rules):
        raise config.error("dynamic", rules, "changes settings of single layers, which is not read")


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    bits, v2 = config.integer("bits"), config.values.get("checkpoint_format") == "gptq_v2"
    words, outputs = layer.matrix("qweight", INTEGERS)
    inputs, size = words * 32 // bits, config.integer("group_size", -1)
    if words * 32 % bits or outputs * bits % 32:
        layer.refuse("qweight", f"does not hold whole words of {bits} bits")
    if size == 0 or size < -1:
        raise config.error("group_size", size, "must be positive, or -1 for one group")
    size = inputs if size == -1 else min(size, inputs)
    groups = -(-inputs // size)
    scales = layer.expect("scales", SCALES, (groups, outputs))
    layer.expect("qzeros", INTEGERS, (groups, outputs * bits // 32))
    natural, middle = torch.arange(inputs, dtype=torch.int32) // size, 1 << bits - 1
    group_of = layer.small("g_idx", INTEGERS, (inputs,)) if "g_idx" in layer else natural
    if group_of.min() < 0 or group_of.max() >= groups:
        layer.refuse("g_idx", f"should have groups from 0 to {groups - 1}", found="")
    symmetric = config.flag("sym", False)

    def zeros() -> Tensor:
        """(outputs, groups)"""
        stored = unpack_bits(as_bytes(layer.find("qzeros").read()), bits).to(torch.int32).t()
        values = stored if v2 else stored + 1
        if symmetric and (values != middle).any():
            layer.refuse("qzeros", f"should be {middle} everywhere, because the config says sym", found="")
        return values

    def codes() -> Tensor:
        return as_bytes(layer.find("qweight").read().t())

    def stored() -> dict[str, Tensor]:
        zero = zeros()
        result = {"codes": codes(), "scale": layer.scales("scales").t().contiguous()}
        return result if symmetric else result | {"zero": zero.to(torch.uint8).contiguous()}

    def dequantize(dtype: torch.dtype) -> Tensor:
        index = group_of.long()
        steps = unpack_bits(codes(), bits).to(dtype) - zeros().to(dtype)[:, index]
        return steps * layer.scales("scales").t().to(dtype)[:, index]

    shape = (outputs, inputs)
    if not torch.equal(group_of, natural):
        return other_weight(shape, dequantize, "it was quantized with act-order (desc_act)")
    if bits == 8 and not symmetric and not v2:
        return other_weight(shape, dequantize, "its zero points can be 256")
    group: Group = "channel" if size == inputs else size
    return exact_weight(Integer(bits, symmetric, group, scale_dtype_name(scales)), shape, stored)  # ty: ignore[invalid-argument-type]
