"""Text encoders equal those of `transformers`: hidden states, outputs of the head, gradients, padding, export.

The sequences contain no padding ids, because transformers computes no gradient for the embedding of such a token, and
RoBERTa and its relatives derive positions from them.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.checkpoint import export, load, save
from regard.families import FamilyError, family
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout
from regard.models.encoder import Encoder
from regard.models.heads import Classification, Pooler
from regard.models.stack import Repeat
from tests.families.cases import VOCAB, encoders, one_per_class, params
from tests.families.pairs import (
    LIMIT,
    Pair,
    check_config_roundtrip,
    check_laws,
    check_saved_and_loaded,
    make_pair,
    our_gradients,
    record_hidden_states,
    stored_gradients,
)
from tests.laws import assert_equal_weights, error, layout_with_padding

UNUSED = ("pooler.", "embed_positions.", "predictions.bias", "lm_head.bias")  # stored by classes that do not use them


@pytest.fixture(scope="module", params=params(encoders.CASES))
def shared_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    if shared_pair.model_type == "big_bird":  # transformers switches to full attention at the first short sequence
        shared_pair.theirs.base_model.set_attention_type(shared_pair.theirs.config.attention_type)
    return shared_pair


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(5))


def accepts(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def token_types(pair: Pair, ids: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """Token types of segments of equal length: the arguments for transformers, and the tensor for our model."""
    count = getattr(pair.ours.spec.input, "types", 0)
    if not count:
        return {}, None
    types = (torch.arange(ids.shape[1]) * count // ids.shape[1]).expand_as(ids)
    return {"token_type_ids": types}, types


def layout_arguments(pair: Pair, layout: TokenLayout) -> dict[str, Tensor]:
    """The layout as arguments for transformers."""
    spec, arguments = pair.ours.spec, {"attention_mask": layout.valid.long()}
    if accepts(pair.theirs, "position_ids"):
        arguments["position_ids"] = layout.positions + getattr(spec.position, "offset", 0)
    if accepts(pair.theirs, "global_attention_mask"):  # by default the first slot is global, even if it is padding
        count = spec.blocks[0].sublayers[0].body.mask.first_tokens
        arguments["global_attention_mask"] = ((layout.positions < count) & layout.valid).long()
    return arguments


def their_outputs(out: Any) -> tuple[Tensor, ...]:
    """The outputs of their head; the output per token comes first."""
    if "prediction_logits" in out:
        return out.prediction_logits, out.seq_relationship_logits
    return (out.logits if "logits" in out else out.last_hidden_state,)


def our_outputs(
    pair: Pair, ids: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None
) -> tuple[Tensor, ...]:
    found = pair.ours(ids, layout, types)
    if isinstance(found, tuple):
        return found
    return (found.squeeze(-1) if type(pair.theirs).__name__ == "ElectraForPreTraining" else found,)


def our_hidden_states(pair: Pair, ids: Tensor, layout: TokenLayout | None, types: Tensor | None) -> list[Tensor]:
    """The input of our first block and the outputs of all blocks, the last one after the final norm."""
    with record_hidden_states(pair.ours.stack) as states:
        encoded, _ = pair.ours.encode(ids, layout, types)
    return [*states[:-1], encoded.x]


def pooler_output(pair: Pair, ids: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None) -> Tensor:
    encoded, _ = pair.ours.encode(ids, layout, types)
    return pair.ours.head.pooled(encoded.x, encoded.layout)


@torch.no_grad()
def test_pooler_output_equals_transformers(pair: Pair) -> None:
    ids, layout = tokens(3, 12), layout_with_padding([4, 9, 12], 12, left=False)
    type_arguments, types = token_types(pair, ids)
    for our_layout, arguments in ((None, {}), (layout, layout_arguments(pair, layout))):
        expected = pair.theirs(ids, **arguments, **type_arguments).get("pooler_output")
        assert (expected is None) == (not isinstance(pair.ours.spec.head, Pooler))
        if expected is not None:
            assert error(pooler_output(pair, ids, our_layout, types), expected) <= LIMIT


@pytest.mark.parametrize("model", ["BertModel", "RobertaModel", "LongformerModel", "BigBirdModel"])
@torch.no_grad()
def test_a_file_without_a_pooler_is_loaded_without_one(model: str, tmp_path: Path) -> None:
    pair, ids = make_pair(encoders.CASES[f"{model}, 0"], tmp_path / "theirs"), tokens(2, 9)
    theirs = type(pair.theirs)(pair.theirs.config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert ours.spec.head is None
    assert error(ours(ids), theirs(ids).last_hidden_state) <= LIMIT
    export(ours, tmp_path / "out", pair.model_type)
    assert load(tmp_path / "out").spec == ours.spec


@pytest.mark.ledger("model.encoder", "fam.bert")
@torch.no_grad()
def test_hidden_states_and_outputs_of_the_head_equal_transformers(pair: Pair) -> None:
    ids = tokens(3, 33)
    type_arguments, types = token_types(pair, ids)
    theirs = pair.theirs(ids, output_hidden_states=True, **type_arguments)
    for found, expected in zip(our_hidden_states(pair, ids, None, types), theirs.hidden_states, strict=True):
        assert error(found, expected[:, : ids.shape[1]]) <= LIMIT  # transformers may pad to whole blocks
    for found, expected in zip(our_outputs(pair, ids, None, types), their_outputs(theirs), strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) <= LIMIT


@torch.no_grad()
def test_padding_on_either_side_equals_transformers(pair: Pair) -> None:
    ids = tokens(3, 12)
    type_arguments, types = token_types(pair, ids)
    for left in (False, True) if accepts(pair.theirs, "position_ids") else (False,):
        layout = layout_with_padding([4, 9, 12], 12, left)
        theirs = pair.theirs(ids, output_hidden_states=True, **layout_arguments(pair, layout), **type_arguments)
        for found, expected in zip(our_hidden_states(pair, ids, layout, types), theirs.hidden_states, strict=True):
            assert error(found[layout.valid], expected[layout.valid]) <= LIMIT
        for found, expected in zip(our_outputs(pair, ids, layout, types), their_outputs(theirs), strict=True):
            if expected.shape[:2] == ids.shape:
                assert error(found[layout.valid], expected[layout.valid]) <= LIMIT
            elif not left:  # transformers classifies by the first slot, even if it is padding
                assert error(found, expected) <= LIMIT


def losses(pair: Pair, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of transformers and our loss for the same labels, some of which are ignored."""
    head, name = pair.ours.spec.head, type(pair.theirs).__name__
    found, rows = our_outputs(pair, ids), torch.arange(len(ids))
    if head is None or isinstance(head, Pooler):
        weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(6))
        theirs, loss = pair.theirs(ids), (found[0] * weights).mean()
        expected = (theirs.last_hidden_state * weights).mean()
        if head is None:
            return expected, loss
        return expected + theirs.pooler_output[:, 0].sum(), loss + pooler_output(pair, ids)[:, 0].sum()
    if name == "ElectraForPreTraining":
        labels = (ids % 3 == 0).float()
        return pair.theirs(ids, labels=labels).loss, F.binary_cross_entropy_with_logits(found[0], labels)
    if found[0].shape[:2] == ids.shape:
        labels = (ids % found[0].shape[-1]).masked_fill(ids % 4 == 0, -100)
        loss = F.cross_entropy(found[0].flatten(0, 1), labels.flatten())
        if len(found) == 1:
            return pair.theirs(ids, labels=labels).loss, loss
        theirs = pair.theirs(ids, labels=labels, next_sentence_label=rows % 2)
        return theirs.loss, loss + F.cross_entropy(found[1], rows % 2)
    assert isinstance(head, Classification)
    if head.labels == 1:  # transformers treats one label as a regression
        return pair.theirs(ids, labels=rows.float()).loss, F.mse_loss(found[0].squeeze(-1), rows.float())
    return pair.theirs(ids, labels=rows % head.labels).loss, F.cross_entropy(found[0], rows % head.labels)


@pytest.mark.ledger("model.encoder")
def test_loss_and_gradients_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected, loss = losses(pair, tokens(2, 17))
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    found = our_gradients(pair)
    expected = stored_gradients(pair.theirs, tmp_path)
    assert found.keys() <= expected.keys()
    for name, gradient in expected.items():
        if name in found:
            assert error(found[name], gradient) <= LIMIT, name
        else:  # a tensor that we do not store must be unused
            assert any(unused in name for unused in UNUSED) and not gradient.any(), name


@torch.no_grad()
def test_exported_model_is_equal_in_transformers(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    reloaded, ids = type(pair.theirs).from_pretrained(tmp_path / "out"), tokens(2, 20)
    found, expected = reloaded(ids), pair.theirs(ids)
    for ours, theirs in zip(their_outputs(found), their_outputs(expected), strict=True):
        assert error(ours, theirs) <= LIMIT
    if expected.get("pooler_output") is not None:
        assert error(found.pooler_output, expected.pooler_output) <= LIMIT
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert all(any(unused in name for unused in UNUSED) for name in theirs.keys() ^ ours.keys())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_saved_and_loaded_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    check_saved_and_loaded(pair, tmp_path / "saved")


def test_config_and_spec_round_trip(pair: Pair) -> None:
    check_config_roundtrip(pair)


@pytest.mark.slow
@pytest.mark.parametrize("shared_pair", one_per_class(encoders.CASES), indirect=True)
def test_laws_hold(pair: Pair) -> None:
    check_laws(pair)


@torch.no_grad()
def test_more_global_tokens_with_the_same_weights_equal_transformers(tmp_path: Path) -> None:
    pair, ids = make_pair(encoders.CASES["LongformerForMaskedLM, 0"], tmp_path), tokens(2, 30)
    is_global = torch.zeros_like(ids)
    is_global[:, :3] = 1
    expected = pair.theirs(ids, global_attention_mask=is_global).logits
    assert error(pair.ours(ids), expected) > 100 * LIMIT
    ours = with_global_tokens(pair.ours.spec, 3).build()
    ours.load_state_dict(pair.ours.state_dict())
    assert error(ours.eval()(ids), expected) <= LIMIT


def with_global_tokens(spec: Encoder, count: int) -> Encoder:
    """The same spec with `count` global tokens at the start."""
    (attention, feedforward), window = spec.blocks[0].sublayers, spec.blocks[0].sublayers[0].body.mask.size
    body = replace(attention.body, mask=Longformer(window, count))
    block = replace(spec.blocks[0], sublayers=(replace(attention, body=body), feedforward))
    return replace(spec, layers=(Repeat((block,), len(spec.blocks)),))


@torch.no_grad()
def test_rows_that_end_in_the_last_block_equal_transformers(tmp_path: Path) -> None:
    """transformers treats the last block of the batch as the end of every row; a shorter row attends to fewer keys."""
    pair, ids = make_pair(encoders.CASES["BigBirdForMaskedLM, 0"], tmp_path), tokens(2, 30)
    layout = layout_with_padding([29, 30], 30)
    expected = pair.theirs(ids, attention_mask=layout.valid.long()).logits
    assert error(pair.ours(ids, layout)[layout.valid], expected[layout.valid]) <= LIMIT


@torch.no_grad()
def test_tensor_names_of_old_files_are_read(tmp_path: Path) -> None:
    """The first BERT files have gamma and beta, position ids, and heads that the class does not use."""
    pair = make_pair(("BertForMaskedLM", encoders.BERT), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {
        next((name.replace(new, older) for new, older in norms.items() if new in name), name): tensor
        for name, tensor in stored.items()
    }
    table = stored["bert.embeddings.word_embeddings.weight"]
    old |= {
        "bert.embeddings.position_ids": torch.arange(64),
        "bert.pooler.dense.weight": torch.ones(48, 48),
        "cls.seq_relationship.bias": torch.ones(2),
        "cls.predictions.decoder.weight": table.clone(),
    }
    save_file(old, tmp_path / "model.safetensors")
    ids = tokens(2, 9)
    loaded = load(tmp_path)
    assert_equal_weights(loaded, pair.ours)
    assert error(loaded(ids), pair.ours(ids)) <= LIMIT
    save_file(old | {"cls.predictions.decoder.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.warns(
        UserWarning, match="ties cls.predictions.decoder.weight to bert.embeddings.word_embeddings.weight"
    ):
        ours = load(tmp_path)
    theirs = type(pair.theirs).from_pretrained(tmp_path).eval()
    assert error(ours(ids), theirs(ids).logits) <= LIMIT


@pytest.mark.parametrize(
    "model", ["BertForSequenceClassification", "RobertaForTokenClassification", "DistilBertForSequenceClassification"]
)
def test_label_names_are_kept(model: str, tmp_path: Path) -> None:
    names = {0: "negative", 1: "neutral", 2: "positive"}
    settings = encoders.CASES[f"{model}, 0"][1] | {"id2label": names, "label2id": {v: k for k, v in names.items()}}
    pair = make_pair((model, settings), tmp_path / "theirs")
    assert pair.ours.spec.head.label_names == ("negative", "neutral", "positive")
    save(pair.ours, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert loaded.spec == pair.ours.spec
    export(loaded, tmp_path / "out", pair.model_type)
    config = type(pair.theirs).from_pretrained(tmp_path / "out").config
    assert config.id2label == names
    assert config.label2id == pair.theirs.config.label2id


def test_label_numbers_with_gaps_are_refused() -> None:
    config = encoders.BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a", "2": "b"}}
    with pytest.raises(FamilyError, match="id2label=.* must have the keys 0 to 1; renumber the labels"):
        family("bert").spec(config)
