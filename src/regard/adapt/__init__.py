"""Changing a built model: replacing modules; adding, merging, saving and loading LoRA adapters."""

from regard.adapt.lora import AdapterError, LoRA, add_lora, merge_lora, unmerge_lora
from regard.adapt.peft import load_adapter, save_adapter
from regard.adapt.replace_modules import replace_modules

__all__ = [
    "AdapterError",
    "LoRA",
    "add_lora",
    "load_adapter",
    "merge_lora",
    "replace_modules",
    "save_adapter",
    "unmerge_lora",
]
