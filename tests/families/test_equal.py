"""What `transformers` computes, computed here: logits, hidden states, gradients, greedy text, padding; and back."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from regard.checkpoint import export, load, save
from regard.engine.stores.contiguous import Contiguous
from regard.families import family
from regard.layout import TokenLayout
from regard.parts.feedforward import GatedModule
from regard.verify.verdict import verify
from tests.families.cases import VOCAB
from tests.families.pairs import Pair, stored_gradients
from tests.laws import error, places

LIMIT = 1e-5
UNEMBEDDED = ("falcon_mamba", "mamba", "mamba2", "rwkv")  # their hidden states begin behind the first block


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.ledger("model.decoder")
def test_logits_and_every_hidden_state(pair: Pair) -> None:
    text, seen = tokens(3, 33), []
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out[0])) for block in pair.ours.stack.blocks]
    with torch.no_grad():
        theirs = pair.theirs(text, output_hidden_states=True)
        assert error(pair.ours(text), theirs.logits) <= LIMIT
        last = pair.ours.hidden(text)
    for hook in hooks:
        hook.remove()
    # Theirs: embeddings, every block but the last, then the normed last.
    between = theirs.hidden_states[0 if pair.model_type in UNEMBEDDED else 1 : -1]
    for found, expected in zip(seen[: len(between)], between, strict=True):
        assert error(found, expected) <= LIMIT
    assert error(last, theirs.hidden_states[-1]) <= LIMIT


@pytest.mark.ledger("model.decoder")
def test_loss_and_gradients(pair: Pair, tmp_path: Path) -> None:
    text = tokens(2, 17)
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    expected = pair.theirs(text, labels=text).loss
    loss = F.cross_entropy(pair.ours(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    assert error(loss, expected) <= LIMIT
    expected.backward()
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.ours.named_parameters()}
    found = dict(family(pair.model_type).table(pair.ours.spec).write(gradients))
    expected = stored_gradients(pair.theirs, tmp_path)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= LIMIT, name


@pytest.mark.ledger("kv.cache", "dec.sampling")
@torch.no_grad()
def test_forty_greedy_tokens_with_a_cache(pair: Pair) -> None:
    prompt = tokens(2, 7)
    expected = pair.theirs.generate(prompt, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt))
    store = Contiguous(pair.ours.spec.memory(), 2, 48, torch.float32)
    text, new = prompt, prompt
    for _ in range(40):
        where = torch.arange(text.shape[1] - new.shape[1], text.shape[1]).expand(2, -1)
        new = pair.ours(new, now := TokenLayout(where), store.begin_forward(now))[:, -1:].argmax(-1)
        text = torch.cat([text, new], 1)
    assert torch.equal(text, expected)
    assert len(text[:, 7:].unique()) > 5, "a model that repeats itself proves little"


@torch.no_grad()
def test_padding_on_either_side(pair: Pair) -> None:
    text = tokens(3, 12)
    told = "position_ids" in inspect.signature(pair.theirs.forward).parameters
    # On the left theirs is wrong without positions, and where a convolution sees padding: RecurrentGemma's always does,
    # Mamba's where a bias makes something of it.
    biased = any(getattr(pair.theirs.config, key, False) for key in ("mamba_proj_bias", "add_bias_linear"))
    sees_padding = pair.model_type == "recurrent_gemma" or biased
    for left in (False, True) if told and not sees_padding else (False,):
        layout = places([7, 9, 12], 12, left)
        where = {"position_ids": layout.positions} if told else {}
        theirs = pair.theirs(text, attention_mask=layout.valid.long(), **where).logits
        assert error(pair.ours(text, layout)[layout.valid], theirs[layout.valid]) <= LIMIT


@torch.no_grad()
def test_exported_it_is_the_same_model_there(pair: Pair, tmp_path: Path) -> None:
    export(pair.ours, tmp_path / "out", pair.model_type)
    back = type(pair.theirs).from_pretrained(tmp_path / "out")
    text = tokens(2, 20)
    assert torch.equal(back(text).logits, pair.theirs(text).logits)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@torch.no_grad()
def test_saved_and_loaded_it_is_bit_identical(pair: Pair, tmp_path: Path) -> None:
    save(pair.ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.spec == pair.ours.spec
    assert (again.head.weight is again.embedding.weight) == pair.ours.spec.tied
    expected = pair.ours.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.mark.ledger("gqa.users")
def test_the_config_comes_back(pair: Pair) -> None:
    foreign = family(pair.model_type)
    assert foreign.spec(foreign.config(pair.ours.spec)) == pair.ours.spec
    assert foreign.spec(pair.theirs.config.to_dict()) == pair.ours.spec


@pytest.mark.ledger("ffn.names")
@torch.no_grad()
def test_a_gate_taken_for_the_other_matrix_is_seen(pair: Pair) -> None:
    body = pair.ours.stack.blocks[0].sublayers[-1].body
    if not isinstance(body, GatedModule):
        assert pair.model_type != "llama"
        return
    text = tokens(2, 9)
    body.gate_proj, body.up_proj = body.up_proj, body.gate_proj
    swapped = pair.ours(text)
    body.gate_proj, body.up_proj = body.up_proj, body.gate_proj
    theirs = pair.theirs(text).logits
    assert error(swapped, theirs) > 100 * LIMIT
    assert error(pair.ours(text), theirs) <= LIMIT


@pytest.mark.slow
def test_it_keeps_every_law(pair: Pair) -> None:
    broken = [verdict for verdict in verify(pair.ours, 24, 0) if verdict.result == "FAIL"]
    assert not broken, broken
