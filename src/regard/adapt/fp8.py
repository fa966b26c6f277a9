"""Linear layers whose matrix products run in FP8 during training, in place of those of a built model.

Parameters, their names and checkpoints stay as they are, and so does evaluation. Small layers (a router)
are left alone, because quantizing their inputs takes longer than the product saves, and so are heads, whose logits need
more digits.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.replace_modules import replace_modules
from regard.kernels.fp8_linear import MULTIPLE, fp8_linear


class Float8Linear(nn.Linear):
    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return (fp8_linear if self.training else F.linear)(input, self.weight, self.bias)


def use_fp8(model: nn.Module, smallest: int = 256) -> list[str]:
    """Replace the linear layers with both dims at least `smallest`, except heads; returns their names."""

    def match(name: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear or "head" in name.split("."):
            return False
        dims = (module.in_features, module.out_features)
        return min(dims) >= smallest and not any(dim % MULTIPLE for dim in dims)

    def make(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Float8Linear(module)

    return replace_modules(model, match, make)
