"""Decoders equal those of `transformers`: logits, hidden states, gradients, greedy tokens, padding, export."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from regard.checkpoint import export
from regard.engine.stores.contiguous import Contiguous
from regard.layout import TokenLayout
from regard.parts.feedforward import GatedModule
from tests.families.cases import VOCAB, classic, decoders, experts, one_per_class, params, recurrent
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

DECODERS = classic.CASES | decoders.CASES | experts.CASES | recurrent.CASES
# In these, the first hidden state of transformers is the output of the first block, not the embeddings.
WITHOUT_EMBEDDINGS = ("falcon_mamba", "mamba", "mamba2", "rwkv")


@pytest.fixture(scope="module", params=params(DECODERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("theirs"))


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.ledger("model.decoder")
@torch.no_grad()
def test_logits_and_hidden_states_equal_transformers(pair: Pair) -> None:
    ids = tokens(3, 33)
    theirs = pair.theirs(ids, output_hidden_states=True)
    with record_hidden_states(pair.ours.stack) as states:
        assert error(pair.ours(ids), theirs.logits) <= LIMIT
    # transformers returns the embeddings and the output of each block, the last one after the final norm.
    block_outputs = theirs.hidden_states[0 if pair.model_type in WITHOUT_EMBEDDINGS else 1 : -1]
    for found, expected in zip(states[1:][: len(block_outputs)], block_outputs, strict=True):
        assert error(found, expected) <= LIMIT
    assert error(pair.ours.hidden(ids), theirs.hidden_states[-1]) <= LIMIT


@pytest.mark.ledger("model.decoder")
def test_loss_and_gradients_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    ids = tokens(2, 17)
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected = pair.theirs(ids, labels=ids).loss
    loss = F.cross_entropy(pair.ours(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    found, expected = our_gradients(pair), stored_gradients(pair.theirs, tmp_path)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= LIMIT, name


@pytest.mark.ledger("kv.cache", "dec.sampling")
@torch.no_grad()
def test_forty_greedy_tokens_with_a_cache_equal_transformers(pair: Pair) -> None:
    prompt = tokens(2, 7)
    expected = pair.theirs.generate(prompt, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt))
    store = Contiguous(pair.ours.spec.memory(), 2, 48, torch.float32)
    ids, new_ids = prompt, prompt
    for _ in range(40):
        positions = torch.arange(ids.shape[1] - new_ids.shape[1], ids.shape[1]).expand(2, -1)
        # check=False: LongRoPE is cached exactly here, because the prompt is already longer than the trained length.
        states = store.begin_forward(layout := TokenLayout(positions), check=False)
        new_ids = pair.ours(new_ids, layout, states)[:, -1:].argmax(-1)
        ids = torch.cat([ids, new_ids], 1)
    assert torch.equal(ids, expected)
    assert len(ids[:, 7:].unique()) > 5, "a model that repeats itself is a weak test"


@torch.no_grad()
def test_logits_with_padding_on_either_side_equal_transformers(pair: Pair) -> None:
    ids = tokens(3, 12)
    accepts_positions = "position_ids" in inspect.signature(pair.theirs.forward).parameters
    # With padding on the left, transformers is wrong if it accepts no positions, or if a convolution mixes in the
    # padding: always in RecurrentGemma, and in Mamba if a bias makes the padding differ from zero.
    biased = any(getattr(pair.theirs.config, key, False) for key in ("mamba_proj_bias", "add_bias_linear"))
    mixes_padding = pair.model_type == "recurrent_gemma" or biased
    for left in (False, True) if accepts_positions and not mixes_padding else (False,):
        layout = layout_with_padding([7, 9, 12], 12, left)
        positions = {"position_ids": layout.positions} if accepts_positions else {}
        theirs = pair.theirs(ids, attention_mask=layout.valid.long(), **positions).logits
        assert error(pair.ours(ids, layout)[layout.valid], theirs[layout.valid]) <= LIMIT


@torch.no_grad()
def test_exported_model_is_equal_in_transformers(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    reloaded = type(pair.theirs).from_pretrained(tmp_path / "out")
    ids = tokens(2, 20)
    assert error(reloaded(ids).logits, pair.theirs(ids).logits) <= LIMIT
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_saved_and_loaded_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    loaded = check_saved_and_loaded(pair, tmp_path / "saved")
    assert (loaded.head.weight is loaded.embedding.weight) == pair.ours.spec.tied


def test_config_and_spec_round_trip(pair: Pair) -> None:
    check_config_roundtrip(pair)


@pytest.mark.ledger("ffn.names")
@torch.no_grad()
def test_swapped_gate_and_up_change_the_logits(pair: Pair) -> None:
    body = pair.ours.stack.blocks[0].sublayers[-1].body
    if not isinstance(body, GatedModule):
        assert pair.model_type != "llama", "the feed-forward of Llama is gated"
        return
    ids = tokens(2, 9)
    body.gate_proj, body.up_proj = body.up_proj, body.gate_proj
    swapped = pair.ours(ids)
    body.gate_proj, body.up_proj = body.up_proj, body.gate_proj
    theirs = pair.theirs(ids).logits
    assert error(swapped, theirs) > 100 * LIMIT
    assert error(pair.ours(ids), theirs) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("pair", one_per_class(DECODERS), indirect=True)
def test_laws_hold(pair: Pair) -> None:
    check_laws(pair)


@pytest.mark.parametrize(
    "model", ["Llama", "Mistral", "Qwen2", "Qwen3", "Granite", "Olmo2", "SmolLM3", "Phi3", "Cohere2"]
)
@torch.no_grad()
def test_gated_units_with_another_activation_equal_transformers(model: str, tmp_path: Path) -> None:
    settings = next(settings for name, settings in DECODERS.values() if name == f"{model}ForCausalLM")
    pair, ids = make_pair((f"{model}ForCausalLM", settings | {"hidden_act": "gelu"}), tmp_path / "theirs"), tokens(2, 9)
    expected = pair.theirs(ids).logits
    assert error(pair.ours(ids), expected) <= LIMIT
    check_config_roundtrip(pair)
    export(pair.ours, tmp_path / "out", pair.model_type)
    reloaded = type(pair.theirs).from_pretrained(tmp_path / "out")
    assert_equal_weights(reloaded, pair.theirs)
    assert error(reloaded(ids).logits, expected) <= LIMIT
