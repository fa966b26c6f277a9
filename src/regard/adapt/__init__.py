"""Changing a model after it was built: modules swapped for others, LoRA adapters added, merged, saved and loaded."""

from regard.adapt.lora import AdapterError, LoRA, add_lora, merge_lora, unmerge_lora
from regard.adapt.peft import load_adapter, save_adapter
from regard.adapt.surgery import swap

__all__ = [
    "AdapterError",
    "LoRA",
    "add_lora",
    "load_adapter",
    "merge_lora",
    "save_adapter",
    "swap",
    "unmerge_lora",
]
