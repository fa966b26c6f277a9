"""Tokenizers: strings round-trip, special tokens are parsed only on request, damaged folders are refused."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from regard.text.chat import render
from regard.text.tokenizer import Tokenizer
from regard.text.train import SPECIAL_TOKENS, bpe, byte, character

PROSE = ["Tom went to the kitchen. Mary took the ball.", "Where is Tom? In the kitchen, naïve 🙂."] * 20
BYTE, BPE, CHARACTER = byte(), bpe(PROSE, vocab=320), character(PROSE)


@pytest.mark.ledger("tok.total")
@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
@given(text=st.text() | st.sampled_from(SPECIAL_TOKENS) | st.text(alphabet=" \n\tTom<|end>👩‍👧é"))
def test_every_string_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet=sorted(set("".join(PROSE)))))
def test_characters_round_trip(text):
    assert CHARACTER.decode(CHARACTER.encode(text)) == text
    assert len(CHARACTER.encode(text)) == len(text)


def test_an_unknown_character_is_refused_and_named():
    with pytest.raises(ValueError, match="Ж"):
        CHARACTER.encode("Tom Ж")


@pytest.mark.parametrize("tokenizer", [BYTE, BPE, CHARACTER], ids=["byte", "bpe", "character"])
def test_special_tokens_are_parsed_only_with_special(tokenizer):
    assert tokenizer.encode("<|end|>", special=True) == [tokenizer.eos]
    if tokenizer is not CHARACTER:
        unparsed = tokenizer.encode("a<|end|>")
        assert tokenizer.eos not in unparsed
        assert tokenizer.decode(unparsed) == "a<|end|>"
    ids = tokenizer.encode("<|user|>Tom<|end|>", special=True)
    assert tokenizer.decode(ids) == "Tom"
    assert tokenizer.decode(ids, special=True) == "<|user|>Tom<|end|>"


def test_threads_with_and_without_special_tokens_do_not_disturb_each_other():
    tokenizer, text = byte(), "<|user|> a " * 200
    expected = {special: tokenizer.encode(text, special) for special in (False, True)}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda special: (special, tokenizer.encode(text, special)), [False, True] * 100))
    assert all(ids == expected[special] for special, ids in found)
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == expected[False]


def test_vocabularies_hold_all_bytes_and_special_tokens():
    assert BYTE.vocab_size == 256 + len(SPECIAL_TOKENS)
    assert BPE.vocab_size <= 320
    assert (BYTE.bos, BYTE.pad, BYTE.eos) == (None, 0, 1)
    assert BPE.decode_token(BPE.eos) == "<|end|>"
    assert BPE.decode_token(BPE.encode(" the")[0]) == " the"
    assert BYTE.decode_token(BYTE.encode("🙂")[0]) not in ("", "\ufffd")


def test_bpe_refuses_a_vocabulary_below_the_alphabet():
    with pytest.raises(ValueError, match="vocab=100"):
        bpe(PROSE, vocab=100)


@pytest.mark.parametrize("tokenizer", [BYTE, BPE, CHARACTER], ids=["byte", "bpe", "character"])
def test_a_saved_tokenizer_is_loaded_unchanged(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode(PROSE[1]) == tokenizer.encode(PROSE[1])
    assert (loaded.bos, loaded.eos, loaded.pad) == (tokenizer.bos, tokenizer.eos, tokenizer.pad)
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.vocab_size == tokenizer.vocab_size


def test_saving_what_was_loaded_gives_the_same_files(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    byte(("[MASK]", "[CLS]", "[SEP]")).save(first)
    Tokenizer.load(first).save(second)
    assert [file.name for file in sorted(first.iterdir())] == [file.name for file in sorted(second.iterdir())]
    assert all(file.read_bytes() == (second / file.name).read_bytes() for file in first.iterdir())


def test_transformers_loads_our_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    BPE.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(PROSE[1], add_special_tokens=False) == BPE.encode(PROSE[1])
    assert theirs.decode(BPE.encode(PROSE[1])) == PROSE[1]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (BPE.eos, BPE.pad)
    messages = [{"role": "user", "content": "Where is Tom?"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == render(
        BPE.chat_template, messages
    )


def change_json(folder, name, **changes):
    path = folder / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | changes))


def test_all_forms_of_a_config_are_read(tmp_path):
    BPE.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    change_json(
        tmp_path,
        "tokenizer_config.json",
        eos_token={"content": "<|end|>", "lstrip": False},
        bos_token="<|system|>",
        chat_template=[{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}],
    )
    change_json(tmp_path, "config.json", eos_token_id=[1, 2])
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos == BPE.eos
    assert loaded.decode_token(loaded.bos) == "<|system|>"
    assert loaded.stop_ids == (1, 2)
    assert loaded.chat_template == "yes"


def test_eos_of_the_model_config_is_used_without_a_tokenizer_config(tmp_path):
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    change_json(tmp_path, "config.json", eos_token_id=3)
    assert Tokenizer.load(tmp_path).stop_ids == (3,)
    assert Tokenizer.load(tmp_path).eos == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer.json", "[1, 2]", "tokenizer.json is damaged"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}', "is empty"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "'</s>' is not in the vocabulary, and the model has no"),
        ("tokenizer_config.json", '{"eos_token": 7}', "expected a string"),
        ("config.json", '{"eos_token_id": "x"}', "expected an id"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "chat_template is list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 1}]}', "chat_template is int"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, name, content, message):
    BPE.save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    if name != "tokenizer.json":
        (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Tokenizer.load(tmp_path)


def test_a_template_without_the_name_default_is_ignored(tmp_path):
    BPE.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    change_json(tmp_path, "tokenizer_config.json", chat_template=[{"name": ["x"], "template": "no"}])
    assert Tokenizer.load(tmp_path).chat_template is None


def test_files_above_the_size_limit_are_refused(tmp_path, monkeypatch):
    BPE.save(tmp_path)
    monkeypatch.setattr("regard.text.untrusted_input.MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes are not read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("id", [50256, 2**40, 2**70])
def test_stop_ids_outside_the_vocabulary_are_dropped(tmp_path, id):
    BPE.save(tmp_path)
    change_json(tmp_path, "config.json", eos_token_id=[id, 2])
    assert Tokenizer.load(tmp_path).stop_ids == (1, 2)


def test_a_panic_of_the_library_is_a_value_error():
    core = word_level("?", "a")
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")  # exponential backtracking
    with pytest.raises(ValueError, match="cannot be encoded .*retry-limit"):
        Tokenizer(core).encode("a" * 40 + "b")
    core = word_level("?", "a")
    core.normalizer = normalizers.Precompiled(b"\x04\0\0\0abcdzz\0")
    with pytest.raises(ValueError, match="cannot be encoded .*out of bounds"):
        Tokenizer(core).encode("a")


def test_all_stop_ids_are_saved(tmp_path):
    Tokenizer(BPE.core, eos="<|end|>", stop_ids=(3, 2)).save(tmp_path / "several")
    assert Tokenizer.load(tmp_path / "several").stop_ids == (1, 3, 2)
    BPE.save(tmp_path / "one")
    assert Tokenizer.load(tmp_path / "one").stop_ids == (1,)


def word_level(*words):
    core = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    return core


def test_prefix_ids_are_those_that_the_post_processor_adds():
    core = word_level("?", "a", "b", "<s>", "</s>")
    assert Tokenizer(core, bos="<s>").prefix_ids == ()
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)])
    assert Tokenizer(core).prefix_ids == (3,)
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 4)])
    assert Tokenizer(core).prefix_ids == ()


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    core = word_level("?", "a", "b")
    core.enable_truncation(2)
    core.enable_padding(length=4)
    Tokenizer(core).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("a b b") == [1, 2, 2] and loaded.encode("a") == [1]
