"""Marker tokens, wherever a folder names them: the same ids, texts and names as in `transformers`."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, write
from tests.text.test_folders import both, same

FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
OWN = ["<tool>", "</tool>", "NOTE", "ü!", "<|x|>"]
AROUND = ["{0}", " {0} ", "a{0}b", "a {0}  b\n", "{0}{1}", " {1} {0}", "{2}s NOTEs {2}", "x{3}Ü! {4}.", "\t{4} \n{3}"]


def flags(random: Random) -> dict[str, bool]:
    return {flag: random.random() < 0.4 for flag in FLAGS}


def folder_of(random: Random, folder: Path) -> Path:
    """Markers of a model's own in its tokenizer.json, listed beside it, or named only, with any flags."""
    build, config = KINDS[random.choice(list(KINDS))]
    core, config, files = build(), dict(config), {}
    size = core.get_vocab_size()
    inside = random.sample(OWN, random.randrange(4))
    core.add_tokens([AddedToken(piece, **flags(random)) for piece in inside])
    listed = [piece for piece in OWN if piece in inside or random.random() < 0.5]
    new = [piece for piece in listed if piece not in inside]
    ids = {piece: core.token_to_id(piece) for piece in inside}
    ids |= {piece: size + len(inside) + rank for rank, piece in enumerate(new)}
    where = random.choice(["decoder", "old", "none"])
    if where == "decoder":
        config["added_tokens_decoder"] = {str(ids[piece]): {"content": piece, **flags(random)} for piece in listed}
    elif where == "old":
        files["added_tokens"] = {piece: ids[piece] for piece in listed}
        name, piece = random.choice(list(config.items()))
        if isinstance(piece, str):
            files["special_tokens_map"] = {name: {"content": piece, **flags(random)}}
    if random.random() < 0.5:
        config["extra_special_tokens"] = random.sample(OWN, 2)
    if random.random() < 0.3:
        config["image_token"] = random.choice(OWN)
    if random.random() < 0.3:
        config["mask_token"] = "NOTE"
    return write(folder, core, tokenizer_config=config, config={"vocab_size": size + 20}, **files)


@pytest.mark.parametrize("trials", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_markers_of_any_folder(trials: int, tmp_path: Path) -> None:
    random = Random(1)
    for trial in range(trials):
        ours, theirs = both(folder_of(random, tmp_path / str(trial)))
        assert ours.names == theirs.special_tokens_map
        assert ours.vocab_size == len(theirs)
        same(ours, theirs, [text.format(*random.sample(OWN, 5)) for text in AROUND])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a list of lists": ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder is"),
    "no id": ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "has the id 'x'"),
    "an id past belief": ({"added_tokens": {"a": 10**12}}, "has the id 1000000000000"),
    "another id": ({"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<x>"}}}}, "listed with id 9, but"),
    "a flag that is none": ({"special_tokens_map": {"eos_token": {"content": "a", "lstrip": 1}}}, "the flags"),
    "no content": ({"special_tokens_map": {"eos_token": {"lstrip": True}}}, "expected a string or an object"),
    "others in no list": ({"tokenizer_config": {"extra_special_tokens": 3}}, "expected a list"),
    "no room": ({"tokenizer_config": {"mask_token": "<x>"}, "config": {"vocab_size": 420}}, "nor has the model a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_belong_is_refused(name: str, tmp_path: Path) -> None:
    files, words = REFUSED[name]
    write(tmp_path, KINDS["gpt2"][0](), **files)
    with pytest.raises(ValueError, match=words):
        Tokenizer.load(tmp_path)


def test_ids_of_the_model_name_markers_that_nobody_named(tmp_path: Path) -> None:
    model = {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": 2, "vocab_size": 420}
    write(tmp_path, KINDS["llama2"][0](), config=model, generation_config={"eos_token_id": [2, 1, 9999]})
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos, ours.eos, ours.pad, ours.stops) == (1, 2, 2, (2, 1))
    assert ours.names == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
