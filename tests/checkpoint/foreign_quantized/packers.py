"""Quantized checkpoints written by plain loops over single integers, from the published layouts of the libraries.

A packer draws the integers and scales of a weight, returns the tensors that a file has for them, and the weight in
float64. Nothing of the code that reads them is used.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import export
from regard.families import family

Packed = tuple[dict[str, Tensor], Tensor]  # by the last part of the name, and the weight (outputs, inputs) in float64
Packer = Callable[[tuple[int, int], torch.Generator], Packed]


def words(rows: list[list[int]], bits: int) -> Tensor:
    """Rows of integers, each a row of words of 32 bits: one integer after the other, the lowest bits first."""
    result = []
    for row in rows:
        stream = sum(value << bits * n for n, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        result.append([stream >> 32 * n & 0xFFFFFFFF for n in range(count)])
    return torch.from_numpy(numpy.array(result, dtype=numpy.uint32).view(numpy.int32))


@dataclass
class Drawn:
    codes: Tensor  # (outputs, inputs)
    zeros: Tensor  # (outputs, groups)
    scales: Tensor  # (outputs, groups) in float16
    group_of: Tensor  # (inputs)

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.group_of]).double() * self.scales.double()[:, self.group_of]


def draw(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool, rng: torch.Generator, shuffled: bool = False
) -> Drawn:
    (outputs, inputs), levels = shape, 1 << bits
    group_of = torch.arange(inputs) // group
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=rng)]
    groups = inputs // group
    codes = torch.randint(levels, shape, generator=rng)
    zeros = torch.randint(1, levels, (outputs, groups), generator=rng)
    if symmetric:
        zeros = torch.full((outputs, groups), levels // 2)
    scales = (torch.rand(outputs, groups, generator=rng) + 0.5) / levels / inputs**0.5
    return Drawn(codes, zeros, scales.half(), group_of)


def gptq(bits: int, group: int, symmetric: bool, v2: bool = False, shuffled: bool = False) -> Packer:
    def pack(shape: tuple[int, int], rng: torch.Generator) -> Packed:
        drawn = draw(shape, bits, group, symmetric, rng, shuffled)
        stored_zeros = drawn.zeros if v2 else drawn.zeros - 1
        tensors = {
            "qweight": words(drawn.codes.tolist(), bits).t(),
            "qzeros": words(stored_zeros.t().tolist(), bits),
            "scales": drawn.scales.t(),
            "g_idx": drawn.group_of.int(),
        }
        return tensors, drawn.weight

    return pack


def awq(version: str, group: int) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7] if version == "gemm" else list(range(8))

    def in_order(rows: list[list[int]]) -> list[list[int]]:
        return [[row[8 * n + i] for n in range(len(row) // 8) for i in order] for row in rows]

    def pack(shape: tuple[int, int], rng: torch.Generator) -> Packed:
        drawn = draw(shape, 4, group, False, rng)
        codes, zeros, scales = drawn.codes, drawn.zeros, drawn.scales
        if version == "gemm":
            codes, zeros, scales = codes.t(), zeros.t(), scales.t()
        else:
            padding = (0, -zeros.shape[1] % 8)
            zeros, scales = torch.nn.functional.pad(zeros, padding), torch.nn.functional.pad(scales, padding)
        tensors = {"qweight": words(in_order(codes.tolist()), 4), "qzeros": words(in_order(zeros.tolist()), 4)}
        return tensors | {"scales": scales}, drawn.weight

    return pack


def fp8(block: tuple[int, int] | None, per_output: bool = False, name: str = "weight_scale_inv") -> Packer:
    """block: (rows, columns) that share a scale; else one scale, or one per output."""

    def pack(shape: tuple[int, int], rng: torch.Generator) -> Packed:
        codes = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
        rows, columns = block or ((1, shape[1]) if per_output else shape)
        scale = torch.rand(-(-shape[0] // rows), -(-shape[1] // columns), generator=rng) / 8
        numbers, factors = codes.double().tolist(), scale.double().tolist()
        weight = [
            [number * factors[i // rows][j // columns] for j, number in enumerate(row)] for i, row in enumerate(numbers)
        ]
        stored_scale = scale if block or per_output else scale.view(())
        return {"weight": codes, name: stored_scale}, torch.tensor(weight, dtype=torch.float64)

    return pack


def compressed(bits: int, group: int | None, symmetric: bool, packed: bool = True, dtype: str = "bfloat16") -> Packer:
    """compressed-tensors; group None: one scale per output."""

    def pack(shape: tuple[int, int], rng: torch.Generator) -> Packed:
        drawn, middle = draw(shape, bits, group or shape[1], symmetric, rng), 1 << bits - 1
        drawn.scales = drawn.scales.to(getattr(torch, dtype))
        if packed:
            tensors = {"weight_packed": words(drawn.codes.tolist(), bits), "weight_shape": torch.tensor(shape)}
            zeros = words(drawn.zeros.t().tolist(), bits).t()
        else:
            tensors, zeros = {"weight": (drawn.codes - middle).to(torch.int8)}, (drawn.zeros - middle).to(torch.int8)
        tensors["weight_scale"] = drawn.scales
        return tensors if symmetric else tensors | {"weight_zero_point": zeros}, drawn.weight

    return pack


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether it is a weight of a linear layer in a block, which is no router of experts."""
    return tensor.dim() == 2 and ("layers." in name or ".h." in name) and not name.endswith("moe.gate.weight")


def write_pair(
    folder: Path, config: dict[str, Any], pack: Packer, settings: dict[str, Any], skip: str = "nothing"
) -> tuple[Path, Path]:
    """A folder with quantized weights in the layers of a random model, and one with the same weights in float64."""
    source = folder / "source"
    export(family(config["model_type"]).spec(config).build(0), source, config["model_type"])
    tensors, rng = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor) or skip in name:
            stored[name] = plain[name] = tensor.double()
            continue
        leaves, weight = pack((tensor.shape[0], tensor.shape[1]), rng)
        path = name.removesuffix(".weight")
        stored |= {f"{path}.{leaf}": value.contiguous() for leaf, value in leaves.items()}
        plain[name] = weight
    theirs = json.loads((source / "config.json").read_text())
    for target, content, extra in (
        (folder / "quantized", stored, {"quantization_config": settings}), (folder / "plain", plain, {}),
    ):  # fmt: skip
        target.mkdir()
        (target / "config.json").write_text(json.dumps(theirs | extra))
        save_file(content, target / "model.safetensors")
    return folder / "quantized", folder / "plain"


def in_float32(model: Any) -> Any:
    """A model whose layers of bitsandbytes compute in float32: with AVX-512 BF16 they round to bfloat16 on a CPU."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model
