"""Weights of `torch.nn` and `transformers` modules under our names, to compare two models with equal weights."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

PROJECTIONS = {
    r"(?:attention\.self\.)query\.": "sublayers.0.body.q_proj.",
    r"(?:attention\.self\.)key\.": "sublayers.0.body.k_proj.",
    r"(?:attention\.self\.)value\.": "sublayers.0.body.v_proj.",
    r"(?:self_attn|attention)\.([qkv])_proj\.": r"sublayers.0.body.\1_proj.",
    r"(?:self_attn\.out_proj|attention\.o_proj|attention\.output\.dense)\.": "sublayers.0.body.o_proj.",
    r"attention\.output\.LayerNorm\.|layer_?norm_?(?:1|before)\.": "sublayers.0.norm.",
    r"(?:mlp\.fc1|intermediate\.dense)\.": "sublayers.1.body.up_proj.",
    r"(?:mlp\.fc2|(?<!attention\.)output\.dense)\.": "sublayers.1.body.down_proj.",
    r"(?<!attention\.)output\.LayerNorm\.|layer_?norm_?(?:2|after)\.": "sublayers.1.norm.",
}


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under our names: every pattern of the table is replaced, in order."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in table.items():
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model with exactly these weights, in eval mode and float64."""
    names = {name for name, _ in model.named_parameters()}
    assert names == tensors.keys(), sorted(names ^ tensors.keys())
    model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name].reshape(parameter.shape))
    return model


def randomized(module: nn.Module, seed: int = 1) -> nn.Module:
    """The module with weights so large that attention is far from uniform; in eval mode and float64."""
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            mean = 0.0 if parameter.dim() > 1 else 0.5
            parameter.normal_(mean, 0.3, generator=generator)
    return module
