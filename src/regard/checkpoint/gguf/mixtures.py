"""The types of a GGUF file's tensors: llama.cpp's mixtures, in which tensors that matter more have more bits.

    q4_k_m    Q4_K; Q6_K for the head, and for attn_v and ffn_down of every third layer and of the first and last ones

Vectors stay float32. A row that is no multiple of 256 numbers cannot have a K-quant: it gets the next type with blocks
of 32, and without these float16. A mixture with the name of a type has that type for all but the head.
"""

from typing import Literal, get_args

from torch import Tensor

from regard.formats.gguf_layouts import LAYOUTS, BlockType

GGUFFormat = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0",
    "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip
FORMATS: tuple[GGUFFormat, ...] = get_args(GGUFFormat)
FILE_TYPES: dict[GGUFFormat, int] = {  # general.file_type
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
    "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30,
    "bf16": 32,
}  # fmt: skip
FALLBACKS: dict[BlockType, BlockType] = {
    "q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
TensorType = Literal["f32", "f16", "bf16"] | BlockType


def tensor_type(name: str, tensor: Tensor, format: GGUFFormat, layers: int, groups: int, tied: bool) -> TensorType:
    """layers: of the model. groups: query heads per key/value head. tied: the embedding is the head too."""
    if format == "f32" or tensor.dim() == 1 or name.startswith("position_embd"):
        return "f32"
    if format in ("f16", "bf16"):
        return format
    is_head = name.startswith("token_embd" if tied else "output.")
    type = head_type(format, tensor) if is_head else body_type(name, format, layers, groups)
    if tensor.shape[-1] % LAYOUTS[type].block:
        type = FALLBACKS.get(type, type)
    return "f16" if tensor.shape[-1] % LAYOUTS[type].block else type


def head_type(format: GGUFFormat, tensor: Tensor) -> BlockType:
    return "q8_0" if format == "q8_0" or tensor.shape[-1] % 256 else "q6_k"


def body_type(name: str, format: GGUFFormat, layers: int, groups: int) -> BlockType:
    type: BlockType = next(type for type in LAYOUTS if format.startswith(type))
    part = name.rpartition(".weight")[0].rpartition(".")[2]
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    match format, part:
        case "q2_k", "attn_v":
            return "q4_k" if groups >= 4 else "q3_k"
        case "q2_k", "ffn_down" | "attn_output":
            return "q3_k"
        case "q3_k_m", "attn_v":
            return "q5_k" if layer < 2 else "q4_k"
        case "q3_k_m", "ffn_down":
            return "q5_k" if layer < layers // 16 else "q4_k"
        case ("q3_k_m", "attn_output") | ("q3_k_m" | "q3_k_l", "attn_qkv"):
            return "q4_k"
        case "q3_k_l", "attn_v" | "ffn_down" | "attn_output":
            return "q5_k"
        case "iq4_nl" | "iq4_xs", "attn_v":
            return "q5_k" if groups >= 4 else type
        case "q4_k_s", "attn_v":
            return "q5_k" if layer < 4 else type
        case "q4_k_s" | "iq4_nl" | "iq4_xs", "ffn_down":
            return "q5_k" if layer < layers // 8 else type
        case "q4_k_m" | "q5_k_m", "attn_v" | "ffn_down":
            return "q6_k" if has_more_bits(layer, layers) else type
        case "q4_k_m", "attn_qkv":
            return "q5_k"
        case "q5_k_m", "attn_qkv":
            return "q6_k"
    return type


def has_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third one between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
