"""Inputs and metrics of functions that run a model several times.

Inputs are ids, or for an encoder-decoder a pair of source ids and ids. A metric is the number that patching, circuit
tests and attributions explain, a function of logits (B, L, V) to (B,).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.decoder import DecoderModule
from regard.models.encoder import Encoder, EncoderModule
from regard.models.interleaved import InterleavedModule
from regard.parts.input import Tokens

IdSequence = Sequence[int] | Tensor
ModelInputs = IdSequence | tuple[IdSequence, IdSequence]  # a pair: source and ids of an encoder-decoder
Rows = tuple[Tensor, ...]  # what the model is called with: each (B, L)
Metric = Callable[[Tensor], Tensor]


def logit_difference(answer: int, wrong: int, position: int = -1) -> Metric:
    """The metric logit(answer) - logit(wrong) at a position, by default the last."""

    def metric(logits: Tensor) -> Tensor:
        _, length, vocab = logits.shape
        at = check_index("position", position + length if position < 0 else position, length)
        check_index("token", answer, vocab)
        return logits[:, at, answer] - logits[:, at, check_index("token", wrong, vocab)]

    return metric


def rows_of(model: nn.Module, inputs: ModelInputs) -> Rows:
    """One row (L,) becomes a batch of one; ValueError for ids where a pair is needed, and the reverse."""
    pair = isinstance(inputs, tuple) and not all(isinstance(item, int) for item in inputs)
    if pair != is_encoder_decoder(model):
        needed = "a pair (source ids, ids)" if not pair else "ids, not a pair"
        raise ValueError(f"{type(model).__name__} needs {needed}")
    device = next(model.parameters()).device
    tensors = [torch.as_tensor(ids, device=device) for ids in (inputs if pair else (inputs,))]
    for ids in tensors:
        if ids.dim() not in (1, 2):
            raise ValueError(f"ids of shape {tuple(ids.shape)} are neither a sequence (L,) nor a batch (B, L)")
        if ids.numel() == 0:
            raise ValueError("there are no ids; give at least one")
    return tuple(ids if ids.dim() == 2 else ids.unsqueeze(0) for ids in tensors)


def is_encoder_decoder(model: nn.Module) -> bool:
    return len(stack_names(model)) == 2


def stack_names(model: nn.Module) -> list[str]:
    """The modules with a stack of layers: "" if the model has one itself, else "source" and "target"."""
    if hasattr(model, "stack"):
        return [""]
    return [name for name, child in model.named_children() if hasattr(child, "stack")]


def residual_names(model: nn.Module) -> list[str]:
    """The names of the residual streams: the input of each stack, and the output of each block."""
    found = []
    for name in stack_names(model):
        part: Any = model.get_submodule(name)
        prefix = f"{name}.stack" if name else "stack"
        found += [f"{prefix}.input", *(f"{prefix}.blocks.{i}" for i in range(len(part.stack.blocks)))]
    if not found:
        raise ValueError(f"{type(model).__name__} has no stack of layers; give a decoder, encoder or encoder-decoder")
    return found


def single_stream(model: nn.Module) -> list[str]:
    """`residual_names` of a decoder or encoder; ValueError for a model with several stacks."""
    if not hasattr(model, "stack"):
        raise ValueError(f"{type(model).__name__} has no single stack of layers; give a decoder or an encoder")
    return residual_names(model)


def measure(model: nn.Module, rows: Rows, metric: Metric) -> Tensor:
    """(B,): the metric of the model's logits."""
    logits: Any = model(*rows)
    values, count = metric(logits), len(rows[-1])
    if values.shape != (count,):
        raise ValueError(f"the metric returned {tuple(values.shape)}; it must return one number per row, ({count},)")
    return values


def check_index(what: str, index: int, count: int) -> int:
    if not 0 <= index < count:
        rule = f"choose 0 to {count - 1}" if count else "there are none"
        raise ValueError(f"there is no {what} {index}; {rule}")
    return index


def part_for_text(model: nn.Module) -> nn.Module:
    """The model, or its decoder if it also reads images; ValueError for a model that reads no ids."""
    if isinstance(model, InterleavedModule):
        return model.decoder
    first = model.get_submodule(stack_names(model)[0]) if stack_names(model) else model
    if isinstance(first, EncoderModule) and not isinstance(first.spec.input, Tokens):
        raise ValueError(f"this model reads {first.spec.input.kind}, not text; choose a model of text")
    return model


def check_predicts_next(model: nn.Module) -> None:
    """ValueError for a model without a decoder."""
    if not any(isinstance(model.get_submodule(name), DecoderModule) for name in stack_names(model)):
        raise ValueError(f"{type(model).__name__} predicts no next token; choose a decoder or an encoder-decoder")


def vocab_of(spec: Any) -> int:
    """The number of ids that a decoder, or an encoder of text, reads."""
    return spec.input.vocab if isinstance(spec, Encoder) else spec.vocab


def length_limit(spec: Any) -> int | None:
    """Tokens of a sequence that a decoder or encoder reads; None: any number."""
    return spec.context or spec.position.max_positions
