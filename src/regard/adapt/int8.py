"""Linear layers with weights in eight bits: a quarter of the bytes of float32, and decoding mostly reads weights.

    W ≈ s ⊙ Q        Q: integers from -127 to 127, s = max |W| / 127: one number per output

The activations are not quantized. On a CPU they are rounded to bfloat16, as are the products, and sums are in float32:
few rows by torch's kernel, which reads Q, many by a product with Q in float32. On a GPU, W is computed from Q.
Dettmers et al. 2022 (LLM.int8); one scale per output: Jacob et al. 2018. For inference: there are no gradients of W.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.lora import LoRALayer
from regard.adapt.replace_modules import replace_modules
from regard.adapt.targets import AdapterError

MAX_ROWS = 32  # with more rows, a product in float32 is faster than the kernel


class Int8Linear(nn.Module):
    weight: Tensor
    scale: Tensor
    one: Tensor

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
        self.register_buffer("weight", (weight / scale.unsqueeze(1)).round().to(torch.int8))  # (outputs, inputs)
        self.register_buffer("scale", scale)  # (outputs,)
        self.register_buffer("one", torch.ones_like(scale, dtype=torch.bfloat16), persistent=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if x.device.type != "cpu":
            return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype).unsqueeze(1), self.bias)
        rounded = x.reshape(rows, x.shape[-1]).to(torch.bfloat16)
        if 1 <= rows <= MAX_ROWS:
            y = torch._weight_int8pack_mm(rounded, self.weight, self.one)
        else:
            y = F.linear(rounded.to(x.dtype), self.weight.to(x.dtype)).to(torch.bfloat16)
        y = (y.to(x.dtype) * self.scale).view(*x.shape[:-1], self.out_features)  # the scale is not rounded to bfloat16
        return y if self.bias is None else y + self.bias


def quantize_int8(model: nn.Module) -> list[str]:
    """Replace all linear layers of a model by layers with weights in eight bits, in place; returns their names.

    Embeddings, norms, experts and other parameters keep their dtype. An output layer that shares its
    matrix with the embedding gets a matrix of its own.
    """

    for name, module in model.named_modules():
        if isinstance(module, LoRALayer) and any(lora.dora for lora in module.loras.values()):
            raise AdapterError(f"{name} has a DoRA adapter, which needs the norms of the weights; merge it first")

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Int8Linear(module)

    return replace_modules(model, lambda _, module: type(module) is nn.Linear, make)
