"""What activations are called here and in `transformers`."""

from regard.parts.feedforward import Activation

THEIRS: dict[Activation, str] = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "identity": "linear",
}
OLDER: dict[Activation, str] = THEIRS | {"gelu_tanh": "gelu_new"}  # as OpenAI's first models and others name it
OURS: dict[str, Activation] = {theirs: ours for ours, theirs in THEIRS.items()} | {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}
