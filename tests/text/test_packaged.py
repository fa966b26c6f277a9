"""Real vocabularies, where the packages that carry them are installed."""

from pathlib import Path

import pytest
import transformers

from regard.packaged import PACKAGED
from regard.text.chat import encode_chat, render
from regard.text.tokenizer import Tokenizer
from tests.text.mixed import LONG, MIXED, MORE
from tests.text.test_folders import same
from tests.text.test_templates import CHATS


def found(name: str) -> Path:
    path = PACKAGED[name].path
    return path if path is not None else pytest.skip(f"{name} is not installed: {PACKAGED[name].remedy}")


def test_a_real_wordpiece_vocabulary() -> None:
    folder = found("minilm")
    ours, theirs = Tokenizer.load(folder), transformers.BertTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.names) == (30522, theirs.special_tokens_map)
    same(ours, theirs, MIXED + MORE + LONG[:2])
    for first, second in zip(MORE[1:], MIXED, strict=False):
        expected = theirs(first, second, split_special_tokens=True)
        assert ours.framed(first, second) == expected["input_ids"]
        assert ours.sides(first, second) == expected["token_type_ids"]


def test_a_real_vocabulary_without_its_rules(tmp_path: Path) -> None:
    folder = found("minilm")
    for name in ("vocab.txt", "config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ours, whole = Tokenizer.load(tmp_path), Tokenizer.load(folder)
    assert ours.names == whole.names
    for text in MIXED + MORE:
        assert ours.framed(text) == whole.framed(text)
        assert ours.encode(text, special=True) == whole.encode(text, special=True)


def foreign_digit(char: str) -> bool:
    return char.isnumeric() and not char.isascii()


@pytest.mark.slow
def test_a_real_bytewise_vocabulary_and_its_template() -> None:
    file = found("smollm2")
    ours = Tokenizer.load(file)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # theirs reads no rule for digits from this file; the vocabulary's own rule and llama.cpp cut all of them off
    same(ours, theirs, [text for text in MIXED + MORE + LONG[:2] if not any(map(foreign_digit, text))])
    for chat in CHATS[:3]:
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert render(ours.chat_template or "", chat, names=ours.names) == text
        assert encode_chat(ours, chat) == theirs.encode(text, add_special_tokens=False)
