"""Memory of training, in bytes a weight, activations aside (they are counted in activations.py).

full, float32          4 weights + 4 gradients + 8 moments of AdamW                    = 16
full, mixed            2 weights + 2 gradients + 4 float32 copy + 8 moments            = 16    (2 to sample)
LoRA                   the frozen base in its format, 16 for each weight of the adapters
QLoRA                  the same with the base in 4 bits        Dettmers et al. 2023
"""

from regard.plan.formats import format_of


def full_bytes(parameters: int, mixed: bool = False) -> dict[str, int]:
    if mixed:
        copies = {"weights": 2, "gradients": 2, "float32 copy": 4, "moments": 8}
    else:
        copies = {"weights": 4, "gradients": 4, "moments": 8}
    return {name: size * parameters for name, size in copies.items()}


def lora_bytes(parameters: int, adapters: int, base: str = "bfloat16") -> dict[str, int]:
    """`base="nf4"` is QLoRA."""
    return {"frozen base": format_of(base).bytes(parameters)} | {
        f"adapters' {name}": size for name, size in full_bytes(adapters).items()
    }
