"""The device that a command computes on."""


def chosen(name: str) -> str:
    """`auto` is a GPU when there is one. Float32 means float32 there: cuDNN by default rounds its factors (TF32)."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
