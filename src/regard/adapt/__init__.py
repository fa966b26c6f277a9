"""Changing a built model: replacing modules, weights in few bits, and LoRA: adding, merging, saving, loading."""

from regard.adapt.adapters import adapter_names, add_lora, disable_adapters, merge_lora, set_adapter, unmerge_lora
from regard.adapt.lora import LoRA
from regard.adapt.peft import load_adapter, save_adapter
from regard.adapt.quantized import dequantize_linears, pack_weights, quantize_linears
from regard.adapt.replace_modules import replace_modules
from regard.adapt.targets import AdapterError

__all__ = [
    "AdapterError",
    "LoRA",
    "adapter_names",
    "add_lora",
    "dequantize_linears",
    "disable_adapters",
    "load_adapter",
    "merge_lora",
    "pack_weights",
    "quantize_linears",
    "replace_modules",
    "save_adapter",
    "set_adapter",
    "unmerge_lora",
]
