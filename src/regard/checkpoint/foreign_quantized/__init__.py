"""Quantized checkpoints of other libraries: `opening` and `keep_codes` read them, `writing` writes them."""
