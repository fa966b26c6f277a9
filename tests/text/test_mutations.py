"""Tokenizer files with random changes are read or refused with a typed error, within two seconds."""

import shutil
import time
from pathlib import Path
from random import Random

import pytest

from regard.text.chat import ChatError, encode_chat
from regard.text.tokenizer import Tokenizer
from tests.checkpoint.mutations import change_a_value, change_bytes
from tests.text.folders import BYTES, KINDS, ROBERTA, write, write_kind
from tests.text.sample_texts import MIXED
from tests.text.test_chat import CHATML, CHATS
from tests.text.test_sentencepiece import BPE, BYTE, NORMAL, PIECES, UNIGRAM, serialize
from tests.text.test_slow_tokenizers import write_slow

MODEL_CONFIG = {
    "vocab_size": 600,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": [0],
    "tokenizer_class": None,
}
TEXTS = [*MIXED, "x" * 2000, "<tool> NOTE </s>"]
BERT_CONFIG = {
    "chat_template": CHATML,
    "do_lower_case": True,
    "strip_accents": None,
    "cls_token": "[CLS]",
    "mask_token": "a",
}
ADDED = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True, "lstrip": False}}}
LLAMA_CONFIG = {
    "add_bos_token": True,
    "bos_token": "<s>",
    "add_eos_token": True,
    "legacy": False,
    "add_prefix_space": True,
}
OTHER_FILES = {
    "special_tokens_map": {"eos_token": {"content": "NOTE", "lstrip": True}, "additional_special_tokens": ["<tool>"]},
    "generation_config": {"eos_token_id": [1, 2], "pad_token_id": 0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("valid")
    for kind in KINDS:
        folder = write_kind(kind, base / kind)
        (folder / "chat_template.jinja").write_text(CHATML)
        size = Tokenizer.load(folder).vocab_size
        write(folder, added_tokens={"NOTE": size, "<tool>": size + 1}, config=MODEL_CONFIG, **OTHER_FILES)
    for kind, config in (("bert", BERT_CONFIG), ("roberta", ROBERTA | ADDED)):
        model_config = MODEL_CONFIG | {"model_type": kind}
        write_slow(kind, base / f"slow {kind}", config=model_config, tokenizer_config=config)
    for kind, content in (
        ("llama", serialize([*PIECES, *((text, 0.0, BYTE) for text in BYTES)], BPE, byte_fallback=True)),
        ("t5", serialize([*PIECES, ("<pad>", 0.0, NORMAL)], UNIGRAM)),
    ):
        model_config = MODEL_CONFIG | {"model_type": kind}
        folder = write(base / f"sentencepiece {kind}", config=model_config, tokenizer_config=LLAMA_CONFIG)
        (folder / "tokenizer.model").write_bytes(content)
    return sorted(base.iterdir())


def load_and_use(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text, special=True))
        tokenizer.decode(tokenizer.encode_with_special_tokens(text, "b"), special=True)
    if tokenizer.chat_template is not None:
        encode_chat(tokenizer, CHATS[-1])


@pytest.mark.parametrize("trials", [300, pytest.param(2500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_every_mutation_is_read_or_refused(trials: int, folders: list[Path], tmp_path: Path) -> None:
    random, refused = Random(0), 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        shutil.copytree(random.choice(folders), folder)
        file = random.choice(sorted(folder.iterdir()))
        change = change_a_value if file.suffix == ".json" and random.random() < 0.8 else change_bytes
        file.write_bytes(change(file.read_bytes(), random))
        start = time.process_time()
        try:
            load_and_use(folder)
        except (ValueError, FileNotFoundError, ChatError) as error:
            assert str(error)
            refused += 1
        except BaseException as error:
            raise AssertionError(f"trial {trial}: {file}") from error
        assert time.process_time() - start < 2, file
        shutil.rmtree(folder)
    assert trials / 8 < refused < trials
