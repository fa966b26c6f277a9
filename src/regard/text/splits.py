"""How text is cut into words before byte-pair encoding, under the names that llama.cpp has for it.

The vocabularies themselves carry no rule: a GGUF file only names the model whose rule it shares.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from regard.gguf_header import GGUFError
from regard.spec import nearest

CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"

SAME = {  # names of the same rule; the first of each is written
    "gpt-2": ("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "roberta-bpe"),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    "llama-bpe": ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "megrez"),
}
RULES = {name: rule for rule, names in SAME.items() for name in names}
BEGINS = SAME["llama-bpe"][:4]  # where nothing is said, a text begins with bos
WHOLE = BEGINS  # a word that is a token is taken as it is, whatever its merges


def split(name: str, file: Path) -> pre_tokenizers.PreTokenizer:
    if name not in RULES:
        raise GGUFError(f"{file}: tokenizer.ggml.pre={name!r:.80} names no rule that is known; {nearest(name, RULES)}")
    return rule(RULES[name])


def rule(name: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    pattern = Regex(LLAMA3 if name == "llama-bpe" else QWEN2)
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), characters])


def split_name(state: Any, normalizer: Any) -> str:
    """The name of a rule that stands in a tokenizer's file."""
    for name in SAME:
        if plain(json.loads(rule(name).__getstate__())) == plain(state) and (normalizer is None or name == "qwen2"):
            return name
    raise GGUFError(f"GGUF has no name for how this vocabulary cuts words ({json.dumps(state):.120}); write it without")


def plain(state: Any) -> Any:
    """Without what only moves offsets."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items() if key != "trim_offsets"}
    return [plain(value) for value in state] if isinstance(state, list) else state
