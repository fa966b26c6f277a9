"""Tied configs whose files also store a different head: the stored head is used, as in `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import export, load, save
from tests.families.cases import VOCAB, classic, decoders, encoder_decoders, encoders, experts, recurrent
from tests.families.pairs import LIMIT, Pair, make_pair
from tests.laws import assert_equal_weights, error

CASES = classic.CASES | decoders.CASES | experts.CASES | recurrent.CASES | encoders.CASES | encoder_decoders.CASES
LANGUAGE_MODEL_SUFFIXES = (
    "LMHeadModel",
    "ForCausalLM",
    "ForMaskedLM",
    "ForPreTraining",
    "ForConditionalGeneration",
    "MTModel",
)
# The head of the first has no vocabulary; the source of the second is audio.
EXCLUDED = ("ElectraForPreTraining", "WhisperForConditionalGeneration")


def one_tied_case_per_class() -> list[Any]:
    found = {}
    for model, settings in CASES.values():
        if model.endswith(LANGUAGE_MODEL_SUFFIXES) and model not in EXCLUDED:
            found.setdefault(model, (model, settings | {"tie_word_embeddings": True}))
    return [pytest.param(case, id=model) for model, case in found.items()]


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(5))


def their_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of transformers; an encoder-decoder gets the same ids as source and target."""
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    out = model(ids, **inputs)
    return out.prediction_logits if "prediction_logits" in out else out.logits


def our_logits(model: Any, ids: Tensor) -> Tensor:
    found = model(ids, ids) if model.spec.kind == "encoder_decoder" else model(ids)
    return found[0] if isinstance(found, tuple) else found


def names_of_head_and_embeddings(pair: Pair) -> tuple[str, str]:
    head = pair.theirs.get_output_embeddings().weight
    (name,) = (name for name, p in pair.theirs.named_parameters(remove_duplicate=False) if p is head and is_head(name))
    return name, pair.theirs.all_tied_weights_keys[name]


def is_head(name: str) -> bool:
    return any(part in name for part in ("head", "embed_out", "decoder.weight", "vocab_projector"))


@pytest.mark.parametrize("case", one_tied_case_per_class())
@torch.no_grad()
def test_a_stored_head_that_differs_from_the_embeddings_is_used(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    pair, ids = make_pair(case, tmp_path), tokens(2, 12)
    head, embeddings = names_of_head_and_embeddings(pair)
    stored = load_file(tmp_path / "model.safetensors")
    assert head not in stored
    stored[head] = stored[embeddings].flip(0).contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="but the files hold different numbers, so both are kept"):
        ours = load(tmp_path)
    theirs = type(pair.theirs).from_pretrained(tmp_path).eval()
    assert error(their_logits(theirs, ids), their_logits(pair.theirs, ids)) > 100 * LIMIT
    assert error(our_logits(ours, ids), their_logits(theirs, ids)) <= LIMIT


LLAMA = ("LlamaForCausalLM", decoders.LLAMA | {"tie_word_embeddings": True})


def change_tensors(folder: Path, **tensors: Tensor | None) -> None:
    """Change tensors of the file; None removes one."""
    stored = load_file(folder / "model.safetensors") | tensors
    remaining = {name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}
    save_file(remaining, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def test_an_equal_head_stays_tied(tmp_path: Path) -> None:
    pair, ids = make_pair(LLAMA, tmp_path), tokens(2, 12)
    change_tensors(
        tmp_path, **{"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]}
    )
    ours = load(tmp_path)
    assert ours.spec == pair.ours.spec
    assert ours.head.weight is ours.embedding.weight
    assert_equal_weights(ours, pair.ours)
    assert error(ours(ids), pair.ours(ids)) <= LIMIT


@torch.no_grad()
def test_a_file_without_embeddings_takes_them_from_the_tied_head(tmp_path: Path) -> None:
    pair, ids = make_pair(LLAMA, tmp_path), tokens(2, 12)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, **{"lm_head.weight": table, "model.embed_tokens.weight": None})
    ours = load(tmp_path)
    assert ours.head.weight is ours.embedding.weight
    assert_equal_weights(ours, pair.ours)
    assert error(ours(ids), pair.ours(ids)) <= LIMIT
    theirs = type(pair.theirs).from_pretrained(tmp_path)
    assert_equal_weights(theirs, pair.theirs)
    assert error(theirs(ids).logits, pair.theirs(ids).logits) <= LIMIT


@torch.no_grad()
def test_the_stored_head_survives_saving_and_exporting(tmp_path: Path) -> None:
    pair, ids = make_pair(LLAMA, tmp_path / "theirs"), tokens(2, 12)
    table = load_file(tmp_path / "theirs" / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path / "theirs", **{"lm_head.weight": -table})
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        ours = load(tmp_path / "theirs")
    save(ours, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert_equal_weights(loaded, ours)
    assert error(loaded(ids), ours(ids)) <= LIMIT
    export(ours, tmp_path / "out", "llama")
    reloaded = type(pair.theirs).from_pretrained(tmp_path / "out")
    assert not reloaded.config.tie_word_embeddings
    assert error(ours(ids), reloaded(ids).logits) <= LIMIT


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    make_pair(LLAMA, tmp_path)
    change_tensors(tmp_path, **{"lm_head.weight": torch.ones(VOCAB + 3, 48)})
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"lm_head.weight should be \(97, 48\)"):
        load(tmp_path)
