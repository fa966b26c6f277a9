"""How fresh weights are drawn. Each scheme says a deviation, and what is added to the residual stream gets less of it,
by the depth of the stack, so that the stream does not grow with depth.

    fan_in     normal, 1/√columns; into the stream divided by √(2·depth)
    gpt2       normal, 0.02; into the stream divided by √(2·depth)                    Radford et al. 2019
    xavier     uniform within ±√(6/(rows + columns)); embeddings normal, 1/√columns   Glorot & Bengio 2010, Vaswani 2017
    deepnorm   xavier times (8·depth)^-¼ for values, outputs and feed-forward; with   Wang et al. 2022
               `keep` = (2·depth)^¼ in post-norm blocks it trains a thousand layers

GPT-2's 0.02 is 1/√2500: a model 128 wide then starts with flat attention, and learned less in the same time
(docs/log.md). With fan_in a fresh model's logits deviate by about 1, so its loss is about ln V + 1/2. Norms start at
one, biases at zero; the taps of a short convolution keep a deviation of 1.
"""

from typing import Literal

from torch import Tensor, nn

from regard.parts.experts import GroupedLinear

Scheme = Literal["fan_in", "gpt2", "xavier", "deepnorm"]
INTO_STREAM = ("o_proj", "down_proj")
SHRUNK = ("v_proj", "up_proj", "gate_proj", *INTO_STREAM)  # by DeepNorm


def initialize(model: nn.Module, depth: int, scheme: Scheme = "fan_in") -> None:
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear):
            draw(module.weight, name, depth, scheme, isinstance(module, nn.Embedding))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def draw(weight: Tensor, name: str, depth: int, scheme: Scheme, embedding: bool = False) -> None:
    rows, columns = weight.shape[-2:]
    if scheme in ("xavier", "deepnorm") and not embedding:
        gain = (8 * depth) ** -0.25 if scheme == "deepnorm" and name in SHRUNK else 1.0
        bound = gain * (6 / (rows + columns)) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
    else:
        std = 0.02 if scheme == "gpt2" else columns**-0.5
        nn.init.normal_(weight, std=std / (2 * depth) ** 0.5 if name in INTO_STREAM else std)
