"""Special tokens in any of the files that may define them: the same ids, strings and names as in `transformers`."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, write
from tests.text.test_tokenizer_folder import assert_same, load_both

FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
ADDED = ["<tool>", "</tool>", "NOTE", "ü!", "<|x|>"]
PATTERNS = ["{0}", " {0} ", "a{0}b", "a {0}  b\n", "{0}{1}", " {1} {0}", "{2}s NOTEs {2}", "x{3}Ü! {4}.", "\t{4} \n{3}"]


def random_flags(random: Random) -> dict[str, bool]:
    return {flag: random.random() < 0.4 for flag in FLAGS}


def random_folder(random: Random, folder: Path) -> Path:
    """Added tokens in tokenizer.json, listed in another file, or only named, with random flags."""
    build, config = KINDS[random.choice(list(KINDS))]
    core, config, files = build(), dict(config), {}
    size = core.get_vocab_size()
    in_tokenizer_json = random.sample(ADDED, random.randrange(4))
    core.add_tokens([AddedToken(token, **random_flags(random)) for token in in_tokenizer_json])
    listed = [token for token in ADDED if token in in_tokenizer_json or random.random() < 0.5]
    new = [token for token in listed if token not in in_tokenizer_json]
    ids = {token: core.token_to_id(token) for token in in_tokenizer_json}
    ids |= {token: size + len(in_tokenizer_json) + rank for rank, token in enumerate(new)}
    form = random.choice(["added_tokens_decoder", "older files", "not listed"])
    if form == "added_tokens_decoder":
        config[form] = {str(ids[token]): {"content": token, **random_flags(random)} for token in listed}
    elif form == "older files":
        files["added_tokens"] = {token: ids[token] for token in listed}
        name, token = random.choice(list(config.items()))
        if isinstance(token, str):
            files["special_tokens_map"] = {name: {"content": token, **random_flags(random)}}
    if random.random() < 0.5:
        config["extra_special_tokens"] = random.sample(ADDED, 2)
    if random.random() < 0.3:
        config["image_token"] = random.choice(ADDED)
    if random.random() < 0.3:
        config["mask_token"] = "NOTE"
    return write(folder, core, tokenizer_config=config, config={"vocab_size": size + 20}, **files)


@pytest.mark.parametrize("trials", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_special_tokens_equal_those_of_transformers(trials: int, tmp_path: Path) -> None:
    random = Random(1)
    for trial in range(trials):
        ours, theirs = load_both(random_folder(random, tmp_path / str(trial)))
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert ours.vocab_size == len(theirs)
        assert_same(ours, theirs, [pattern.format(*random.sample(ADDED, 5)) for pattern in PATTERNS])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a list of tokens": ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder is"),
    "not an id": ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "has the id 'x'"),
    "a huge id": ({"added_tokens": {"a": 10**12}}, "has the id 1000000000000"),
    "another id": ({"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<x>"}}}}, "listed with id 9, but"),
    "a flag that is not a bool": (
        {"special_tokens_map": {"eos_token": {"content": "a", "lstrip": 1}}},
        "the flags .* each must be true or false",
    ),
    "no content": ({"special_tokens_map": {"eos_token": {"lstrip": True}}}, "expected a string or an object"),
    "extra tokens not in a list": ({"tokenizer_config": {"extra_special_tokens": 3}}, "expected a list or an object"),
    "no embedding": (
        {"tokenizer_config": {"mask_token": "<x>"}, "config": {"vocab_size": 420}},
        "the model has no embedding for it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_files_are_refused(name: str, tmp_path: Path) -> None:
    files, message = REFUSED[name]
    write(tmp_path, KINDS["gpt2"][0](), **files)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_ids_in_the_model_config_define_special_tokens(tmp_path: Path) -> None:
    config = {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": 2, "vocab_size": 420}
    write(tmp_path, KINDS["llama2"][0](), config=config, generation_config={"eos_token_id": [2, 1, 9999]})
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos, ours.eos, ours.pad, ours.stop_ids) == (1, 2, 2, (2, 1))
    assert ours.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
