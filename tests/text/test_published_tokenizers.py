"""Published tokenizers, if the packages that contain them are installed."""

from pathlib import Path

import pytest
import transformers

from regard.find_model import PACKAGED
from regard.text.chat import encode_chat, render
from regard.text.tokenizer import Tokenizer
from tests.text.sample_texts import EDGE_CASES, LONG, MIXED
from tests.text.test_chat import CHATS
from tests.text.test_tokenizer_folder import assert_same


def installed_path(name: str) -> Path:
    path = PACKAGED[name].path
    return path if path is not None else pytest.skip(f"{name} is not installed: {PACKAGED[name].install_command}")


def test_minilm_wordpiece_equals_transformers() -> None:
    folder = installed_path("minilm")
    ours, theirs = Tokenizer.load(folder), transformers.BertTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.special_tokens_map) == (30522, theirs.special_tokens_map)
    assert_same(ours, theirs, MIXED + EDGE_CASES + LONG[:2])
    for first, second in zip(EDGE_CASES[1:], MIXED, strict=False):
        expected = theirs(first, second, split_special_tokens=True)
        assert ours.encode_with_special_tokens(first, second) == expected["input_ids"]
        assert ours.token_type_ids(first, second) == expected["token_type_ids"]


def test_minilm_without_tokenizer_json_encodes_the_same_ids(tmp_path: Path) -> None:
    folder = installed_path("minilm")
    for name in ("vocab.txt", "config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ours, expected = Tokenizer.load(tmp_path), Tokenizer.load(folder)
    assert ours.special_tokens_map == expected.special_tokens_map
    for text in MIXED + EDGE_CASES:
        assert ours.encode_with_special_tokens(text) == expected.encode_with_special_tokens(text)
        assert ours.encode(text, special=True) == expected.encode(text, special=True)


def is_non_ascii_digit(char: str) -> bool:
    return char.isnumeric() and not char.isascii()


@pytest.mark.slow
def test_smollm2_ids_and_chat_template_equal_transformers() -> None:
    file = installed_path("smollm2")
    ours = Tokenizer.load(file)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers reads no pre-tokenizer for digits from this file; the original tokenizer and llama.cpp split them
    assert_same(
        ours, theirs, [text for text in MIXED + EDGE_CASES + LONG[:2] if not any(map(is_non_ascii_digit, text))]
    )
    for chat in CHATS[:3]:
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert render(ours.chat_template or "", chat, special_tokens_map=ours.special_tokens_map) == text
        assert encode_chat(ours, chat) == theirs.encode(text, add_special_tokens=False)
