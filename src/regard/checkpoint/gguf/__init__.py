"""GGUF, llama.cpp's one-file format: metadata instead of a config, short names, and weights in blocks of few bits.

A file is read as a family that is already known: `architectures` says which, and what keys and tensors are called
there. `reading` dequantizes on the way in, `writing` stores float32, float16 or Q8_0.
"""

from regard.checkpoint.gguf.reading import open_gguf
from regard.checkpoint.gguf.writing import FORMS, GGUFFormat, export_gguf

__all__ = ["FORMS", "GGUFFormat", "export_gguf", "open_gguf"]
