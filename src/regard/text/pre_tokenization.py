"""Pre-tokenizers of byte-level BPE: how a string is split into words before merges apply.

A GGUF file stores no rule, only llama.cpp's name for the model whose rule it shares (`tokenizer.ggml.pre`).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from regard.gguf_header import GGUFError
from regard.spec import suggest_name

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{PUNCTUATION_AND_SPACE}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{PUNCTUATION_AND_SPACE}"

GGUF_NAMES = {  # rule: llama.cpp's names for it, of which the first is written
    "gpt-2": ("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "roberta-bpe"),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    "llama-bpe": ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "megrez"),
}
RULES = {name: rule for rule, names in GGUF_NAMES.items() for name in names}
LLAMA3_NAMES = GGUF_NAMES["llama-bpe"][:4]  # these add bos by default, and do not split words that are tokens


def build_pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "gpt-2":
        return byte_level
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = Regex(LLAMA3 if rule == "llama-bpe" else QWEN2)
    without_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), without_regex])


def pre_tokenizer_from_gguf(name: str, file: Path) -> pre_tokenizers.PreTokenizer:
    if name not in RULES:
        raise GGUFError(f"{file}: tokenizer.ggml.pre={name!r:.80} is not supported; {suggest_name(name, RULES)}")
    return build_pre_tokenizer(RULES[name])


def gguf_name(pre_tokenizer: Any, normalizer: Any) -> str:
    """llama.cpp's name for a pre-tokenizer and normalizer, both given as they are serialized in `tokenizer.json`."""
    for rule in GGUF_NAMES:
        same = _without_offsets(json.loads(build_pre_tokenizer(rule).__getstate__())) == _without_offsets(pre_tokenizer)
        if same and (normalizer is None or rule == "qwen2"):
            return rule
    raise GGUFError(
        f"GGUF has no name for this tokenizer's pre-tokenizer ({json.dumps(pre_tokenizer):.120}); write the file "
        "without a tokenizer"
    )


def _without_offsets(state: Any) -> Any:
    """A serialized pre-tokenizer without `trim_offsets`, which does not affect ids."""
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return [_without_offsets(value) for value in state] if isinstance(state, list) else state
