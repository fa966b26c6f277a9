"""What the encoders of `transformers` compute, computed here: every hidden state, what the head says, gradients; back.

Texts hold no padding ids: theirs gives such a token no gradient, and RoBERTa's relatives count positions by them.
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
from regard.families import family
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.models.stack import Repeat
from regard.verify.verdict import verify
from tests.families.cases import VOCAB, encoders, params
from tests.families.pairs import Pair, make, stored_gradients
from tests.laws import error, places

LIMIT = 1e-5
UNREAD = ("pooler.", "embed_positions.", "predictions.bias", "lm_head.bias")  # of theirs, in classes without use for it


@pytest.fixture(scope="module", params=params(encoders.CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def pair(made: Pair) -> Pair:
    if made.model_type == "big_bird":  # theirs attends to all from the first short text on
        made.theirs.base_model.set_attention_type(made.theirs.config.attention_type)
    return made


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(5))


def takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def typed(pair: Pair, text: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """The types of two texts in a row, for theirs and for ours."""
    known = getattr(pair.ours.spec.input, "types", 0)
    if not known:
        return {}, None
    types = (torch.arange(text.shape[1]) * known // text.shape[1]).expand_as(text)
    return {"token_type_ids": types}, types


def told(pair: Pair, layout: TokenLayout) -> dict[str, Tensor]:
    """Where the tokens stand, as theirs is told."""
    spec, said = pair.ours.spec, {"attention_mask": layout.valid.long()}
    if takes(pair.theirs, "position_ids"):
        said["position_ids"] = layout.positions + getattr(spec.position, "offset", 0)
    if takes(pair.theirs, "global_attention_mask"):  # theirs would take the first slot, be it padding
        first = spec.blocks[0].sublayers[0].body.mask.first_tokens
        said["global_attention_mask"] = ((layout.positions < first) & layout.valid).long()
    return said


def said(out: Any) -> tuple[Tensor, ...]:
    """What their head says, of every token first."""
    if "prediction_logits" in out:
        return out.prediction_logits, out.seq_relationship_logits
    return (out.logits if "logits" in out else out.last_hidden_state,)


def ours_said(
    pair: Pair, text: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None
) -> tuple[Tensor, ...]:
    found = pair.ours(text, layout, types)
    if isinstance(found, tuple):
        return found
    return (found.squeeze(-1) if type(pair.theirs).__name__ == "ElectraForPreTraining" else found,)


def recorded(pair: Pair, text: Tensor, layout: TokenLayout | None, types: Tensor | None) -> list[Tensor]:
    """What goes into our first block, and what comes out of each."""
    seen, stack = [], pair.ours.stack
    hooks = [stack.input.register_forward_hook(lambda _, __, out: seen.append(out))]
    hooks += [block.register_forward_hook(lambda _, __, out: seen.append(out[0])) for block in stack.blocks]
    read, _ = pair.ours.read(text, layout, types)
    for hook in hooks:
        hook.remove()
    return [*seen[:-1], read.x]  # theirs too: the last behind its norm


@pytest.mark.ledger("model.encoder")
@torch.no_grad()
def test_every_hidden_state_and_what_the_head_says(pair: Pair) -> None:
    text = tokens(3, 33)
    named, types = typed(pair, text)
    theirs = pair.theirs(text, output_hidden_states=True, **named)
    for found, expected in zip(recorded(pair, text, None, types), theirs.hidden_states, strict=True):
        assert error(found, expected[:, : text.shape[1]]) <= LIMIT  # theirs may stand padded to whole blocks
    for found, expected in zip(ours_said(pair, text, None, types), said(theirs), strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) <= LIMIT


@torch.no_grad()
def test_padding_on_either_side(pair: Pair) -> None:
    text = tokens(3, 12)
    named, types = typed(pair, text)
    for left in (False, True) if takes(pair.theirs, "position_ids") else (False,):
        layout = places([4, 9, 12], 12, left)
        theirs = pair.theirs(text, output_hidden_states=True, **told(pair, layout), **named)
        for found, expected in zip(recorded(pair, text, layout, types), theirs.hidden_states, strict=True):
            assert error(found[layout.valid], expected[layout.valid]) <= LIMIT
        for found, expected in zip(ours_said(pair, text, layout, types), said(theirs), strict=True):
            if expected.shape[:2] == text.shape:
                assert error(found[layout.valid], expected[layout.valid]) <= LIMIT
            elif not left:  # theirs takes the vector of the first slot, be it padding
                assert error(found, expected) <= LIMIT


def losses(pair: Pair, text: Tensor) -> tuple[Tensor, Tensor]:
    """Theirs and ours of the same labels, some of which do not count."""
    head, name = pair.ours.spec.head, type(pair.theirs).__name__
    found, first = ours_said(pair, text), torch.arange(len(text))
    if head is None:
        weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(6))
        return (pair.theirs(text).last_hidden_state * weights).mean(), (found[0] * weights).mean()
    if name == "ElectraForPreTraining":
        labels = (text % 3 == 0).float()
        return pair.theirs(text, labels=labels).loss, F.binary_cross_entropy_with_logits(found[0], labels)
    if found[0].shape[:2] == text.shape:
        labels = (text % found[0].shape[-1]).masked_fill(text % 4 == 0, -100)
        loss = F.cross_entropy(found[0].flatten(0, 1), labels.flatten())
        if len(found) == 1:
            return pair.theirs(text, labels=labels).loss, loss
        theirs = pair.theirs(text, labels=labels, next_sentence_label=first % 2)
        return theirs.loss, loss + F.cross_entropy(found[1], first % 2)
    assert isinstance(head, Classification)
    if head.labels == 1:  # theirs takes it for a regression
        return pair.theirs(text, labels=first.float()).loss, F.mse_loss(found[0].squeeze(-1), first.float())
    return pair.theirs(text, labels=first % head.labels).loss, F.cross_entropy(found[0], first % head.labels)


@pytest.mark.ledger("model.encoder")
def test_loss_and_gradients(pair: Pair, tmp_path: Path) -> None:
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected, loss = losses(pair, tokens(2, 17))
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.ours.named_parameters()}
    found = dict(family(pair.model_type).table(pair.ours.spec).write(gradients))
    expected = stored_gradients(pair.theirs, tmp_path)
    assert found.keys() <= expected.keys()
    for name, gradient in expected.items():
        if name in found:
            assert error(found[name], gradient) <= LIMIT, name
        else:  # nothing of theirs that we leave out takes part
            assert any(unread in name for unread in UNREAD) and not gradient.any(), name


@torch.no_grad()
def test_exported_it_is_the_same_model_there(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    back, text = type(pair.theirs).from_pretrained(tmp_path / "out"), tokens(2, 20)
    for found, expected in zip(said(back(text)), said(pair.theirs(text)), strict=True):
        assert torch.equal(found, expected)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert all(any(unread in name for unread in UNREAD) for name in theirs.keys() ^ ours.keys())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@torch.no_grad()
def test_saved_and_loaded_it_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    save(pair.ours, tmp_path / "own")
    again, expected = load(tmp_path / "own"), pair.ours.state_dict()
    assert again.spec == pair.ours.spec
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_the_config_comes_back(pair: Pair) -> None:
    foreign = family(pair.model_type)
    assert foreign.spec(foreign.config(pair.ours.spec)) == pair.ours.spec
    assert foreign.spec(pair.theirs.config.to_dict()) == pair.ours.spec


@pytest.mark.slow
def test_it_keeps_every_law(pair: Pair) -> None:
    broken = [verdict for verdict in verify(pair.ours, 24, 0) if verdict.result == "FAIL"]
    assert not broken, broken


@torch.no_grad()
def test_more_global_tokens_with_the_same_weights(tmp_path: Path) -> None:
    pair, text = make(encoders.CASES["LongformerForMaskedLM, 0"], tmp_path), tokens(2, 30)
    first = torch.zeros_like(text)
    first[:, :3] = 1
    expected = pair.theirs(text, global_attention_mask=first).logits
    assert error(pair.ours(text), expected) > 100 * LIMIT
    ours = globally(pair.ours.spec, 3).build()
    ours.load_state_dict(pair.ours.state_dict())
    assert error(ours.eval()(text), expected) <= LIMIT


def globally(spec: Encoder, count: int) -> Encoder:
    """The same model, in which so many first tokens are global."""
    (attention, feedforward), window = spec.blocks[0].sublayers, spec.blocks[0].sublayers[0].body.mask.size
    body = replace(attention.body, mask=Longformer(window, count))
    block = replace(spec.blocks[0], sublayers=(replace(attention, body=body), feedforward))
    return replace(spec, layers=(Repeat((block,), len(spec.blocks)),))


@torch.no_grad()
def test_texts_that_end_in_the_last_block_of_theirs(tmp_path: Path) -> None:
    """Theirs takes the batch's last block for the end of every text, so that a shorter text sees less of itself."""
    pair, text = make(encoders.CASES["BigBirdForMaskedLM, 0"], tmp_path), tokens(2, 30)
    layout = places([29, 30], 30)
    expected = pair.theirs(text, attention_mask=layout.valid.long()).logits
    assert error(pair.ours(text, layout)[layout.valid], expected[layout.valid]) <= LIMIT


@torch.no_grad()
def test_the_spelling_of_old_files_is_read(tmp_path: Path) -> None:
    """As BERT was first published: gamma and beta, positions and heads that its class has no use for."""
    pair = make(("BertForMaskedLM", encoders.BERT), tmp_path)
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
    text = tokens(2, 9)
    assert torch.equal(load(tmp_path)(text), pair.ours(text))
    save_file(old | {"cls.predictions.decoder.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is a copy of bert.embeddings.word_embeddings.weight by the config"):
        load(tmp_path)
