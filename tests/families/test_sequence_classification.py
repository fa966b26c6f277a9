"""Decoders that classify or score whole sequences equal the `…ForSequenceClassification` classes of `transformers`."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.checkpoint import export, load
from regard.checkpoint.gguf import export_gguf
from regard.families import FAMILIES, FamilyError, detect_family, family, family_config, family_spec, model_class
from regard.families.common.sequence_classification import CLASSES
from regard.layout import TokenLayout
from regard.models.causal_encoder import causal_encoder
from regard.models.decoder import Decoder
from regard.models.heads import Classification, Dense
from tests.families.cases import VOCAB, Cases
from tests.families.page import all_cases
from tests.families.pairs import LIMIT, Pair, make_pair, our_gradients, stored_gradients
from tests.laws import assert_equal_weights, error, layout_with_padding

PAD, LENGTHS = 0, [4, 9, 12]
FAST = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "gptj")
HEAD = Classification(3, "last", bias=False, pad=PAD)


def classifier_cases() -> Cases:
    """The first config of each family of decoders, for the class with another head."""
    found: Cases = {}
    for model, settings, *_ in all_cases().values():
        model_type = getattr(transformers, model).config_class.model_type
        if model_type in CLASSES and model_type not in found:
            found[model_type] = (CLASSES[model_type], settings | {"pad_token_id": PAD, "num_labels": 3})
    return found


CASES = classifier_cases()
PARAMS = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CLASSES]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(CASES[request.param], tmp_path_factory.mktemp("theirs"))


def tokens(*shape: int) -> Tensor:
    return torch.randint(PAD + 1, VOCAB, shape, generator=torch.Generator().manual_seed(5))


def their_logits(model: nn.Module, ids: Tensor, layout: TokenLayout) -> Tensor:
    assert layout.valid is not None
    positions = (
        {"position_ids": layout.positions} if "position_ids" in inspect.signature(model.forward).parameters else {}
    )
    return model(ids, attention_mask=layout.valid.long(), **positions, use_cache=False).logits


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_logits_of_padded_batches_equal_transformers(pair: Pair, left: bool) -> None:
    layout = layout_with_padding(LENGTHS, max(LENGTHS), left=left)
    assert layout.valid is not None
    ids = tokens(3, max(LENGTHS)).where(layout.valid, PAD)
    found = pair.ours(ids, layout)
    assert found.shape == (3, 3)
    for row, length in enumerate(LENGTHS):  # alone, without padding: what a batch must give
        alone = ids[row, -length:] if left else ids[row, :length]
        expected = pair.theirs(alone.unsqueeze(0)).logits
        assert error(found[row : row + 1], expected) <= LIMIT
        assert error(pair.ours(alone.unsqueeze(0)), expected) <= LIMIT
    assert error(found, their_logits(pair.theirs, ids, layout)) <= LIMIT


@torch.no_grad()
def test_a_sequence_that_ends_with_the_id_of_padding_is_pooled_before_it(pair: Pair) -> None:
    ids = tokens(2, 8)
    ids[0, -2:] = ids[1, -1] = ids[1, 3] = PAD  # as if padding and the end of a sequence had one id
    assert error(pair.ours(ids), pair.theirs(ids).logits) <= LIMIT


def test_gradients_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    ids, weight = tokens(2, 9), torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, -1.0]])
    (pair.theirs(ids).logits * weight).sum().backward()
    (pair.ours(ids) * weight).sum().backward()
    table = our_gradients(pair)
    for name, expected in stored_gradients(pair.theirs, tmp_path).items():
        assert error(table[name], expected) <= LIMIT, name


@torch.no_grad()
def test_an_exported_model_is_loaded_by_transformers(pair: Pair, tmp_path: Path) -> None:
    assert family_spec(family_config(pair.model_type, pair.ours.spec)) == pair.ours.spec
    export(pair.ours, tmp_path / "out", pair.model_type)
    theirs, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(theirs).__name__ == CLASSES[pair.model_type] and not any(loading.values())
    ids = tokens(3, 12)
    assert error(theirs.eval()(ids).logits, pair.theirs(ids).logits) <= LIMIT
    again = load(tmp_path / "out")
    assert again.spec == pair.ours.spec
    assert_equal_weights(again, pair.ours)


def test_a_class_is_listed_for_every_decoder_that_has_one() -> None:
    theirs = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    decoders = [name for name in FAMILIES if model_class(name) is Decoder]
    assert {name: theirs[name] for name in decoders if name in theirs} == CLASSES


def tiny_decoder(model_type: str) -> Decoder:
    for model, settings, *_ in all_cases().values():
        if getattr(transformers, model).config_class.model_type == model_type:
            return family(model_type).spec(getattr(transformers, model).config_class(**settings).to_dict())
    raise AssertionError(model_type)


@pytest.mark.parametrize("model_type", ["mamba", "granite"])
def test_a_decoder_without_such_a_class_is_refused_by_name(model_type: str) -> None:
    model = causal_encoder(tiny_decoder(model_type), HEAD)
    with pytest.raises(FamilyError, match=f"no class for sequence classification with {model_type} models; keep"):
        family_config(model_type, model)
    config = {"model_type": model_type, "architectures": ["SomeForSequenceClassification"]}
    with pytest.raises(FamilyError, match=f"no class for sequence classification with {model_type} models; keep"):
        family_spec(config)
    if model_type == "mamba":
        with pytest.raises(FamilyError, match="The nearest family is mamba: transformers has no class"):
            detect_family(model)


def test_heads_that_transformers_lacks_are_refused_with_the_field(tmp_path: Path) -> None:
    model = causal_encoder(tiny_decoder("llama"), HEAD)
    assert detect_family(model) == "llama"
    for head, message in (
        (replace(HEAD, bias=True), "encoder.head.bias=True, only False"),
        (replace(HEAD, dense=Dense()), "encoder.head.dense=Dense"),
    ):
        with pytest.raises(FamilyError, match=message):
            family_config("llama", replace(model, head=head))
    with pytest.raises(FamilyError, match="a llama model is a decoder, and this is an encoder"):
        family_config("llama", replace(model, head=Classification(3, "mean")))
    with pytest.raises(FamilyError, match="a GGUF llama model predicts the next token, and this one has another head"):
        export_gguf(model.build(0), tmp_path / "model.gguf", "llama")


def test_names_of_labels_are_kept() -> None:
    named = replace(HEAD, label_names=("bad", "fair", "good"), pad=None)
    config = family_config("llama", causal_encoder(tiny_decoder("llama"), named))
    assert config["id2label"] == {"0": "bad", "1": "fair", "2": "good"} and "pad_token_id" not in config
    assert family_spec(config).head == named  # ty: ignore[unresolved-attribute]
    reward = causal_encoder(tiny_decoder("llama"), replace(HEAD, labels=1))
    assert family_spec(family_config("llama", reward)) == reward
