"""Tokenizer folders of every kind that published models use, trained on a few lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard.text.pre_tokenization import LLAMA3, QWEN2

TEXTS = [
    "The cat sat on the mat; the dog didn't sit, it ran. We'll see what they've done: 12 or 345?",
    "def area(r):\n    return 3.14 * r ** 2  # squared\n",
    "日本語のテキストと中文字符。 한국어 Ελληνικά кириллица عربى שלום naïve Å é 🙂👩‍👧",
    "supercalifragilistic abab aaaa hello world, user assistant system",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train(model: Any, trainer: Any, **components: Any) -> Tokenizer:
    core = Tokenizer(model)
    for name, component in components.items():
        setattr(core, name, component)
    core.train_from_iterator(TEXTS, trainer)
    return core


def byte_level(pre_tokenizer: Any, special_tokens: list[str], normalizer: Any = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    components = {"pre_tokenizer": pre_tokenizer, "decoder": decoders.ByteLevel()}
    return train(models.BPE(), trainer, **components, **({"normalizer": normalizer} if normalizer else {}))


def split_by(pattern: str) -> Any:
    without_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), without_regex])


def set_post_processor(core: Tokenizer, single: str, pair: str, *tokens: str) -> None:
    ids = [(token, core.token_to_id(token)) for token in tokens]
    core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def gpt2() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])


def llama3() -> Tokenizer:
    core = byte_level(split_by(LLAMA3), ["<|begin|>", "<|eot|>"])
    set_post_processor(core, "<|begin|> $A", "<|begin|> $A <|begin|>:1 $B:1", "<|begin|>")
    return core


def qwen2() -> Tokenizer:
    return byte_level(split_by(QWEN2), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())


def roberta() -> Tokenizer:
    core = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<s>", "<pad>", "</s>", "<unk>"])
    core.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return core


def sentencepiece_bpe(**components: Any) -> Tokenizer:
    """As in Llama 2: byte-pair encoding of characters, ▁ for spaces, byte fallback."""
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    core = train(model, trainer, **components)
    state = json.loads(core.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are pieces, not special tokens
    core = Tokenizer.from_str(json.dumps(state))
    set_post_processor(core, "<s> $A", "<s> $A <s>:1 $B:1", "<s>")
    return core


def llama2() -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder_steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece_bpe(normalizer=normalizer, decoder=decoders.Sequence(decoder_steps))


def llama2_prefix_space() -> Tokenizer:
    """The later form of Llama 2's tokenizer, which adds a space only before the first word of a string."""
    decoder_steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentencepiece_bpe(pre_tokenizer=metaspace, decoder=decoders.Sequence(decoder_steps))


def t5() -> Tokenizer:
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    words_with_metaspace = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    core = train(models.Unigram(), trainer, normalizer=normalizers.NFKC(), pre_tokenizer=words_with_metaspace)
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    set_post_processor(core, "$A </s>", "$A </s> $B </s>", "</s>")
    core.add_special_tokens([f"<extra_id_{n}>" for n in range(3)])
    return core


def unigram_bytes() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core = train(models.Unigram(), trainer, pre_tokenizer=metaspace)
    state = json.loads(core.to_str())
    state["model"]["vocab"] += [[piece, -20.0] for piece in BYTES]
    state["model"]["byte_fallback"] = True
    core = Tokenizer.from_str(json.dumps(state))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def bert(lowercase: bool = True) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    core = train(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=lowercase),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    set_post_processor(core, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS]", "[SEP]")
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
    "llama2, prefix space": (llama2_prefix_space, LLAMA),
    "t5": (t5, T5 | {"clean_up_tokenization_spaces": True}),
    "unigram with bytes": (unigram_bytes, LLAMA),
    "bert": (bert, BERT | {"clean_up_tokenization_spaces": True}),
    "bert, cased": (lambda: bert(lowercase=False), BERT),
}


def write(folder: Path, core: Tokenizer | None = None, **files: Any) -> Path:
    """Write a folder; `tokenizer_config={…}` becomes tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if core is not None:
        core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_kind(kind: str, folder: Path) -> Path:
    build, config = KINDS[kind]
    return write(folder, build(), tokenizer_config=config)
