"""Tokenizer folders of every kind that published models have, trained here on a few lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard.text.splits import LLAMA3, QWEN2

TEXTS = [
    "The cat sat on the mat; the dog didn't sit, it ran. We'll see what they've done: 12 or 345?",
    "def area(r):\n    return 3.14 * r ** 2  # squared\n",
    "日本語のテキストと中文字符。 한국어 Ελληνικά кириллица عربى שלום naïve Å é 🙂👩‍👧",
    "supercalifragilistic abab aaaa hello world, user assistant system",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    core = Tokenizer(model)
    for name, part in parts.items():
        setattr(core, name, part)
    core.train_from_iterator(TEXTS, trainer)
    return core


def bytewise(split: Any, special: list[str], normalizer: Any = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    parts = {"pre_tokenizer": split, "decoder": decoders.ByteLevel()}
    return trained(models.BPE(), trainer, **parts, **({"normalizer": normalizer} if normalizer else {}))


def cut(pattern: str) -> Any:
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), rest])


def around(core: Tokenizer, single: str, pair: str, *pieces: str) -> None:
    ids = [(piece, core.token_to_id(piece)) for piece in pieces]
    core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def gpt2() -> Tokenizer:
    return bytewise(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])


def llama3() -> Tokenizer:
    core = bytewise(cut(LLAMA3), ["<|begin|>", "<|eot|>"])
    around(core, "<|begin|> $A", "<|begin|> $A <|begin|>:1 $B:1", "<|begin|>")
    return core


def qwen2() -> Tokenizer:
    return bytewise(cut(QWEN2), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())


def roberta() -> Tokenizer:
    core = bytewise(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<s>", "<pad>", "</s>", "<unk>"])
    core.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return core


def sentence_pairs(**parts: Any) -> Tokenizer:
    """Llama 2's kind: byte-pair encoding of characters with ▁ for spaces, and bytes for the rest."""
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    marks = ["<unk>", "<s>", "</s>", *BYTES]
    core = trained(model, trainers.BpeTrainer(vocab_size=420, special_tokens=marks, show_progress=False), **parts)
    state = json.loads(core.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are pieces, not markers
    core = Tokenizer.from_str(json.dumps(state))
    around(core, "<s> $A", "<s> $A <s>:1 $B:1", "<s>")
    return core


def llama2() -> Tokenizer:
    steps = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentence_pairs(normalizer=steps, decoder=decoders.Sequence(back))


def llama2_first() -> Tokenizer:
    """The later form, where only the first word of a text gets a space before it."""
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentence_pairs(pre_tokenizer=space, decoder=decoders.Sequence(back))


def t5() -> Tokenizer:
    marks = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=marks, unk_token="<unk>", show_progress=False)
    space = pre_tokenizers.Metaspace(prepend_scheme="always")
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    core = trained(models.Unigram(), trainer, normalizer=normalizers.NFKC(), pre_tokenizer=split)
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    around(core, "$A </s>", "$A </s> $B </s>", "</s>")
    core.add_special_tokens([f"<extra_id_{n}>" for n in range(3)])
    return core


def unigram_bytes() -> Tokenizer:
    marks = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=marks, unk_token="<unk>", show_progress=False)
    core = trained(
        models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    )
    state = json.loads(core.to_str())
    state["model"]["vocab"] += [[piece, -20.0] for piece in BYTES]
    state["model"]["byte_fallback"] = True
    core = Tokenizer.from_str(json.dumps(state))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def bert(lowercase: bool = True) -> Tokenizer:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=marks, show_progress=False)
    parts = {"normalizer": normalizers.BertNormalizer(lowercase=lowercase), "decoder": decoders.WordPiece()}
    core = trained(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizer=pre_tokenizers.BertPreTokenizer(), **parts
    )
    around(core, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS]", "[SEP]")
    return core


ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
           "pad_token": "<pad>", "mask_token": "<mask>"}  # fmt: skip
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}

KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "gpt2": (gpt2, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "llama3": (llama3, {"bos_token": "<|begin|>", "eos_token": "<|eot|>", "clean_up_tokenization_spaces": True}),
    "qwen2": (
        qwen2,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>"]},
    ),
    "roberta": (roberta, ROBERTA),
    "llama2": (llama2, LLAMA),
    "llama2, a space at the start": (llama2_first, LLAMA),
    "t5": (t5, T5 | {"clean_up_tokenization_spaces": True}),
    "unigram with bytes": (unigram_bytes, LLAMA),
    "bert": (bert, BERT | {"clean_up_tokenization_spaces": True}),
    "bert, cased": (lambda: bert(lowercase=False), BERT),
}


def write(folder: Path, core: Tokenizer | None = None, **files: Any) -> Path:
    """`tokenizer_config={…}` becomes tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if core is not None:
        core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def make(kind: str, folder: Path) -> Path:
    build, config = KINDS[kind]
    return write(folder, build(), tokenizer_config=config)
