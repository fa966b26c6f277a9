"""What a bare vocabulary leaves open: the class that its rules come from, and what frames a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import processors

ReaderType = TypeVar("ReaderType")
Made = tuple[tokenizers.Tokenizer, dict[str, str]]  # the rules, and the names of markers where nobody says otherwise

SAME = {  # classes with the same rules, and the models that use them where the folder names no class
    "BertTokenizer": ("DistilBertTokenizer", "ElectraTokenizer", "bert", "distilbert", "electra"),
    "GPT2Tokenizer": ("CodeGenTokenizer", "gpt2", "gptj", "opt", "phi"),
    "RobertaTokenizer": (
        "BartTokenizer",
        "LEDTokenizer",
        "LongformerTokenizer",
        "bart",
        "led",
        "longformer",
        "roberta",
    ),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "LlamaTokenizer": ("llama", "mistral", "mixtral", "phi3"),
    "GemmaTokenizer": ("gemma2", "gemma3_text", "recurrent_gemma"),
    "T5Tokenizer": ("MT5Tokenizer", "t5", "mt5", "switch_transformers"),
}
RULES = {name: rules for rules, names in SAME.items() for name in (rules, *names)}


def kind_of(
    file: Path, readers: Mapping[str, ReaderType], config: Mapping[str, Any], model: Mapping[str, Any]
) -> ReaderType:
    """The reader for the class that `tokenizer_config.json` names, else the one that the model's type has."""
    named = config.get("tokenizer_class") or model.get("tokenizer_class") or model.get("model_type")
    rules = RULES.get(str(named).removesuffix("Fast"), "")
    if rules not in readers:
        raise ValueError(
            f"{file} is a bare vocabulary, and the rules of {named!r:.80} are not known here (those of "
            f"{', '.join(readers)} are); save the folder with transformers, which writes tokenizer.json"
        )
    return readers[rules]


def placed(core: tokenizers.Tokenizer, file: Path, piece: str) -> tuple[str, int]:
    id = core.token_to_id(piece)
    if id is None:
        raise ValueError(f"{file}: {piece!r} frames every text, but is not among its {core.get_vocab_size()} pieces")
    return piece, id


def text_of(config: Mapping[str, Any], name: str, defaults: Mapping[str, str]) -> str:
    entry = config.get(name) or defaults.get(name)
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(f"{name} is {entry!r:.80}; expected a string or an object with `content`")
    return text


def frame(
    core: tokenizers.Tokenizer, file: Path, config: Mapping[str, Any], defaults: Mapping[str, str]
) -> processors.PostProcessor:
    """The beginning and the end of a text, where `add_bos_token` and `add_eos_token` ask for them."""
    sides = {name: text_of(config, name, defaults) for name in ("bos_token", "eos_token") if config.get(f"add_{name}")}
    before, after = sides.get("bos_token"), sides.get("eos_token")

    def around(text: str, type: int) -> str:
        return " ".join(f"{part}:{type}" for part in (before, text, after) if part)

    return processors.TemplateProcessing(
        single=around("$A", 0),
        pair=f"{around('$A', 0)} {around('$B', 1)}",
        special_tokens=[placed(core, file, piece) for piece in dict.fromkeys(sides.values())],
    )
