"""Changing a built model: replacing modules, weights in eight bits, and LoRA: adding, merging, saving, loading."""

from regard.adapt.adapters import adapter_names, add_lora, disable_adapters, merge_lora, set_adapter, unmerge_lora
from regard.adapt.int8 import quantize_int8
from regard.adapt.lora import LoRA
from regard.adapt.peft import load_adapter, save_adapter
from regard.adapt.replace_modules import replace_modules
from regard.adapt.targets import AdapterError

__all__ = [
    "AdapterError",
    "LoRA",
    "adapter_names",
    "add_lora",
    "disable_adapters",
    "load_adapter",
    "merge_lora",
    "quantize_int8",
    "replace_modules",
    "save_adapter",
    "set_adapter",
    "unmerge_lora",
]
