"""Activations of training by block: the bytes that backward needs, with and without activation checkpointing.

    all kept         Σ over blocks of their saved tensors + input and output of the stack
    checkpointing    one input per block, and the saved tensors of the one block that is recomputed (Chen et al. 2016)
    tensor split     the inputs of sublayers are on every device, the rest is divided

A block is run on the meta device and its saved tensors are counted, as in training.py. With bfloat16 autocast a block
is counted in bfloat16, and the residual stream, which stays float32, is added; this is an estimate.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from regard.layout import Source, TokenLayout
from regard.models.base import Model, build_on_meta, meta_device
from regard.models.stack import unroll, without_repeats
from regard.parts.block import Block
from regard.parts.experts import ExpertsModule
from regard.planning.parameters import stacks
from regard.planning.training import tiled_attention

MAX_BUILT_DEPTH = 1000  # blocks


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block for a micro-batch."""

    saved: int  # all tensors that backward needs
    inputs: int  # those of them that are inputs of sublayers

    def on_one_of(self, devices: int) -> int:
        """Bytes on one device of a tensor split."""
        return self.inputs + max(0, self.saved - self.inputs) // devices


@lru_cache(maxsize=256)
def block_activations(block: Block, width: int, rows: int, length: int, mixed: bool) -> BlockActivations:
    """Count what one block saves for backward. mixed: bfloat16 autocast, with the residual stream in float32."""
    dtype = torch.bfloat16 if mixed else torch.float32
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with meta_device():
        module = block.build(width).to(dtype)
        replace_attention(module)
        x = torch.empty(rows, length, width, dtype=dtype, requires_grad=True)
        layout = TokenLayout.whole(rows, length, "meta")
        source = Source(torch.empty(rows, length, source_width(block, width), dtype=dtype), layout)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            module(x, layout.with_embeddings(x).with_source(source))
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved = sum(storage.nbytes() for key, storage in storages.items() if key not in weights)
    stream = rows * length * width * 4
    inputs = len(block.sublayers) * stream
    return BlockActivations(saved + (inputs // 2 if mixed else 0), inputs)


def replace_attention(module: nn.Module) -> None:
    """Use a kernel that saves what a tiled one does."""
    for child in module.modules():
        if "attend" in vars(child):
            vars(child)["attend"] = tiled_attention


def source_width(block: Block, width: int) -> int:
    """The width of the sequence that a cross-attention of the block attends to."""
    widths = [getattr(sublayer.body, "source_width", None) for sublayer in block.sublayers]
    return next((found for found in widths if found), width)


def activation_memory(
    spec: Model, rows: int, length: int, mixed: bool = False, checkpointing: bool = False, tensor: int = 1
) -> int:
    """Bytes of the activations of one micro-batch on one of `tensor` devices; every stack reads `length` tokens."""
    total = 0
    for stack in stacks(spec).values():
        blocks = unroll(stack.layers)
        counts = {block: block_activations(block, stack.width, rows, length, mixed) for block in dict.fromkeys(blocks)}
        sizes = [counts[block].on_one_of(tensor) for block in blocks]
        stream = rows * length * stack.width * 4
        total += stream * len(blocks) + max(sizes) if checkpointing else sum(sizes)
        total += 3 * stream  # input of the last norm, its output, and the gradient that the loss keeps
    return total


def rough_activation_bytes(spec: Model, rows: int, length: int) -> int:
    """A quick estimate without a forward: inputs and outputs of all linear layers, in float32.

    The forward on the meta device imports torch's compiler, which takes seconds.
    """
    numbers = 0
    for stack, short in zip(stacks(spec).values(), stacks(without_repeats(spec)).values(), strict=True):
        for run, once in zip(stack.layers, short.layers, strict=True):
            with meta_device():
                modules = [block.build(stack.width) for block in once.blocks]
            sizes = [
                layer.in_features + layer.out_features
                for module in modules
                for layer in module.modules()
                if isinstance(layer, nn.Linear)
            ]
            numbers += run.times * sum(sizes)
    return 4 * rows * length * numbers


def block_parameters(spec: Model) -> list[tuple[int, int, int]]:
    """(parameters of one repetition, those of experts among them, repetitions) of every run of layers."""
    counts = []
    for stack in stacks(spec).values():
        for run in stack.layers:
            with meta_device():
                blocks = [block.build(stack.width) for block in run.blocks]
            mixtures = [m for block in blocks for m in block.modules() if isinstance(m, ExpertsModule)]
            size, experts = (
                sum(parameter.numel() for module in modules for parameter in module.parameters())
                for modules in (blocks, [mixture.experts for mixture in mixtures])
            )
            counts.append((size, experts, 1 if run.tied else run.times))
    return counts


def parameter_count(spec: Model) -> int:
    """Parameters of a model of any depth. In a very deep one, a run is counted once, times its repetitions."""
    depth = sum(len(run.blocks) * run.times for stack in stacks(spec).values() for run in stack.layers)
    if depth <= MAX_BUILT_DEPTH:
        return sum(parameter.numel() for parameter in build_on_meta(spec).parameters())
    shallow = sum(parameter.numel() for parameter in build_on_meta(without_repeats(spec)).parameters())
    return shallow + sum(size * (times - 1) for size, _, times in block_parameters(spec))
