"""GGUF, the single-file format of llama.cpp: metadata instead of a config, short tensor names, quantized weights.

A file is read as a model of a supported family: `architectures` maps its metadata and tensor names to the config and
tensor names of the family. `reading` dequantizes tensors, `writing` stores them in the types of `mixtures`.
"""

from regard.checkpoint.gguf.mixtures import GGUFFormat
from regard.checkpoint.gguf.reading import open_gguf
from regard.checkpoint.gguf.writing import export_gguf

__all__ = ["GGUFFormat", "export_gguf", "open_gguf"]
