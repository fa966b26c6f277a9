"""Direct logit attribution: how much each part of the model adds to a logit through the residual stream.

    x = input + Σ_i y_i            logit = w · norm(x) = Σ_i w · norm_x(y_i) + constant

The residual stream is a sum of the outputs of sublayers, and a norm whose scale is fixed to that of x, norm_x, is
linear. So the logit is a sum of one term per sublayer, per head (W_o is linear) or per neuron (W_down is). The terms
leave out all effects through later layers. Elhage et al. 2021.

    found = logit_attribution(model, ids, answer, minus=wrong, by="head")
    found.names[i], found.values[i]                                       # (B,) each; the sum is the logit difference
    logit_attribution(t5, (source, ids), answer)                          # of the decoder of an encoder-decoder
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard.lens.hooks import eager_hooks, record
from regard.lens.inputs import ModelInputs, check_index, is_encoder_decoder, rows_of
from regard.models.decoder import DecoderModule
from regard.parts.norm import RMSNormModule

TermKind = Literal["sublayer", "head", "neuron"]


@dataclass(frozen=True)
class Attribution:
    names: list[str]
    values: Tensor  # (terms, B)

    @property
    def total(self) -> Tensor:
        """(B,): the logit, or the difference of logits, before a softcap"""
        return self.values.sum(0)


@torch.no_grad()
def logit_attribution(
    model: nn.Module,
    ids: ModelInputs,
    token: int,
    minus: int | None = None,
    position: int = -1,
    by: TermKind = "sublayer",
) -> Attribution:
    """The terms of the logit of `token`, or of its difference to that of the token `minus`, at a position.

    The names are those of the input of the stack and of each sublayer's body; with by="head" those of attention end in
    `.head 3` and with by="neuron" those of feed-forward layers in `.neuron 3`. `bias` are the terms that do not depend
    on the input: biases of the final norm and of the head. Of an encoder-decoder, for a pair of source ids and ids, the
    terms are those of its decoder; attention to the source is one of its sublayers.
    """
    decoder = model.get_submodule("target") if is_encoder_decoder(model) else model
    if not isinstance(decoder, DecoderModule):
        raise ValueError(
            f"logit attribution needs a decoder or an encoder-decoder, not {type(model).__name__}, which predicts no "
            "next token"
        )
    rows = rows_of(model, ids)
    length, vocab = rows[-1].shape[1], decoder.spec.vocab
    check_index("position", position + length if position < 0 else position, length)
    for id in (token,) if minus is None else (token, minus):
        check_index("token", id, vocab)
    if by not in get_args(TermKind):
        raise ValueError(f"by={by!r} is unknown; choose one of {', '.join(map(repr, get_args(TermKind)))}")
    sublayers, last = sublayers_of(decoder), f"stack.blocks.{len(decoder.stack.blocks) - 1}"
    outputs = ["stack.input", last, *(f"{name}.{part}" for name in sublayers for part in ("body", "after"))]
    matrices = {name: matrix for name, sublayer in sublayers.items() if (matrix := split_matrix(sublayer.body, by))}
    inputs: dict[str, Tensor] = {}
    with record(decoder, outputs) as recorded, eager_hooks(decoder) as stack:
        for name, (matrix, _) in matrices.items():
            hook = matrix.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
            stack.callback(hook.remove)
        model(*rows)
    at = {name: x[:, position] for name, x in (recorded | inputs).items()}  # (B, …)
    read, constant = head_direction(decoder, at[last], token, minus)
    terms = {"stack.input": (at["stack.input"] * read).sum(-1)}
    for name, sublayer in sublayers.items():
        of_after = read * (sublayer.share if sublayer.scale is None else sublayer.share * sublayer.scale)
        whole = (at[f"{name}.after"] * of_after).sum(-1)  # (B,)
        if name not in inputs:
            terms[f"{name}.body"] = whole
            continue
        matrix, count = matrices[name]
        of_body, bias = through_norm(sublayer.after, at[f"{name}.body"], of_after)
        parts = (at[name] * (of_body @ matrix.weight)).unflatten(-1, (count, -1)).sum(-1)  # (B, heads or neurons)
        terms |= {f"{name}.body.{by} {i}": part for i, part in enumerate(parts.unbind(-1))}
        if matrix.bias is not None or bias is not None:
            terms[f"{name}.body.bias"] = whole - parts.sum(-1)
    terms["bias"] = constant.expand(len(rows[-1]))
    return Attribution(list(terms), torch.stack(list(terms.values())))


def sublayers_of(model: DecoderModule) -> dict[str, Any]:
    """The sublayers by name; ValueError if the residual stream is not the sum of their outputs."""
    found: dict[str, Any] = {}
    for i, (block, spec) in enumerate(zip(model.stack.blocks, model.spec.blocks, strict=True)):
        if spec.style == "post" or spec.keep != 1.0:
            raise ValueError(
                f"the residual stream of layer {i} is no sum of outputs (style={spec.style!r}, keep={spec.keep}); use "
                "activation_patching or ablate"
            )
        sublayers: Any = block.get_submodule("sublayers")
        found |= {f"stack.blocks.{i}.sublayers.{j}": sublayer for j, sublayer in enumerate(sublayers)}
    return found


def split_matrix(body: Any, by: str) -> tuple[nn.Linear, int] | None:
    """The matrix whose inputs are heads or neurons, and their number; None if the body has none, or two of them."""
    name, count = {"head": ("o_proj", "heads"), "neuron": ("down_proj", "neurons")}.get(by, ("", ""))
    matrix = getattr(body, name, None)
    if not isinstance(matrix, nn.Linear) or not hasattr(body, count) or hasattr(body, "of_globals"):
        return None
    return matrix, body.heads if by == "head" else matrix.in_features


def head_direction(model: DecoderModule, x: Tensor, token: int, minus: int | None) -> tuple[Tensor, Tensor]:
    """The direction (B, D) of the residual stream x (B, D) that the logit reads, and the constant of the logit."""

    def difference(rows: Tensor) -> Tensor:
        return (rows[token] if minus is None else rows[token] - rows[minus]) * model.spec.logit_scale

    if not isinstance(model.head, nn.Linear):
        raise ValueError(f"the head is a {type(model.head).__name__}, whose weights are no rows; merge adapters first")
    read = difference(model.head.weight)
    if isinstance(model.narrow, nn.Linear):
        read = read @ model.narrow.weight
    read, constant = through_norm(model.norm, x, read.expand_as(x))
    constant = torch.zeros_like(x[:, 0]) if constant is None else constant
    return read, constant if model.head.bias is None else constant + difference(model.head.bias)


def through_norm(norm: nn.Module, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor | None]:
    """The direction (B, D) before a norm that a direction after it reads, and the term (B,) of the norm's bias.

    The scale of the norm is fixed to that of x (B, D).
    """
    if isinstance(norm, nn.Identity):
        return read, None
    if isinstance(norm, nn.LayerNorm):
        bias = None if norm.bias is None else (read * norm.bias).sum(-1)
        scaled = read * (1.0 if norm.weight is None else norm.weight)
        scaled = scaled * (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        return scaled - scaled.mean(-1, keepdim=True), bias  # the norm subtracts the mean
    if isinstance(norm, RMSNormModule):
        weight = 1.0 if norm.weight is None else norm.weight + norm.around_one
        return read * weight * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt(), None
    raise ValueError(
        f"{type(norm).__name__} is not linear at a fixed scale; logit attribution needs LayerNorm or RMSNorm"
    )
