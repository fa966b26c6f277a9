"""Effects of patched cells equal plain hooks on `transformers`; patching everything is the clean run."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from regard.lens import ablate, activation_patching, logit_difference, patching, path_patching
from tests.laws import MODELS, OTHERS, VOCAB, build, random_ids
from tests.lens.their_hooks import IDS, blocks, edited_input, head_projection, inputs_of

if TYPE_CHECKING:
    from tests.families.pairs import Pair  # imports transformers, which takes seconds

CLEAN, CORRUPTED = IDS[0], IDS[0].clone()
CORRUPTED[4] = (CLEAN[4] + 1) % 97
METRIC = logit_difference(3, 8)


@pytest.mark.ledger("lens.patching")
@torch.no_grad()
def test_effects_of_residual_positions_equal_plain_hooks(pair: "Pair") -> None:
    done: list[tuple[int, int]] = []
    found = activation_patching(pair.ours, CLEAN, CORRUPTED, METRIC, progress=lambda *counts: done.append(counts))
    theirs = blocks(pair.theirs)
    with inputs_of(theirs) as inputs:
        clean = METRIC(pair.theirs(CLEAN[None]).logits)
    corrupted = METRIC(pair.theirs(CORRUPTED[None]).logits)
    assert found.clean == pytest.approx(clean.item(), abs=1e-4) and found.matrix.shape == (len(theirs) + 1, 13)
    names = ["stack.input", *(f"stack.blocks.{i}" for i in range(len(theirs) - 1))]
    for name, block, x in zip(names, theirs, inputs, strict=True):
        for position in (0, 4, 12):

            def edit(y: torch.Tensor, x: torch.Tensor = x, position: int = position) -> torch.Tensor:
                return torch.cat([y[:, :position], x[:, position : position + 1], y[:, position + 1 :]], 1)

            with edited_input(block, edit):
                value = METRIC(pair.theirs(CORRUPTED[None]).logits)
            expected = (value - corrupted) / (clean - corrupted)
            assert found.effects[name][position].item() == pytest.approx(expected.item(), abs=1e-4)
    assert found.effects["stack.input"][:4].count_nonzero() == 0  # the tokens are the same
    assert found.effects["stack.input"][4].item() == pytest.approx(1, abs=1e-4)
    assert found.effects[f"stack.blocks.{len(theirs) - 1}"][-1].item() == pytest.approx(1, abs=1e-4)
    assert done == [(i, len(theirs) + 1) for i in range(len(theirs) + 1)]


@torch.no_grad()
def test_effects_of_heads_equal_plain_hooks(pair: "Pair") -> None:
    found = activation_patching(pair.ours, CLEAN, CORRUPTED, METRIC, "*.body.z", by="head")
    module = head_projection(blocks(pair.theirs)[1])
    with inputs_of([module]) as inputs:
        clean = METRIC(pair.theirs(CLEAN[None]).logits)
    corrupted = METRIC(pair.theirs(CORRUPTED[None]).logits)
    effects = found.effects["stack.blocks.1.sublayers.0.body.z"]
    size = inputs[0].shape[-1] // len(effects)
    for head, effect in enumerate(effects.tolist()):
        columns = slice(head * size, head * size + size)
        with edited_input(
            module, lambda y, c=columns: torch.cat([y[..., : c.start], inputs[0][..., c], y[..., c.stop :]], -1)
        ):
            value = METRIC(pair.theirs(CORRUPTED[None]).logits)
        assert effect == pytest.approx(((value - corrupted) / (clean - corrupted)).item(), abs=1e-4)


@torch.no_grad()
def test_more_cells_than_rows_of_a_forward_and_whole_activations(make_model) -> None:
    model = make_model()
    clean = torch.arange(40) % 31
    corrupted = clean.roll(1)
    found = activation_patching(model, clean, corrupted, METRIC, ["stack.blocks.2", "*.body.pattern"])
    assert found.effects["stack.blocks.2"].shape == (40,)
    assert found.effects["stack.blocks.2"][:-1].abs().max() == 0  # only the last position reaches the last logits
    assert found.effects["stack.blocks.2"][-1].item() == pytest.approx(1)
    assert found.effects["stack.blocks.0.sublayers.0.body.pattern"].shape == (40,)
    whole = activation_patching(model, clean, corrupted, METRIC, "stack.blocks.?", by="all")
    assert whole.effects["stack.blocks.0"].item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["tied layers", "shared block", "experts"])
@torch.no_grad()
def test_blocks_before_the_patched_one_need_not_be_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, clean, corrupted = build(MODELS[name]), random_ids(6, seed=3), random_ids(6, seed=4)
    compare_with_whole_runs(model, clean, corrupted, monkeypatch)
    calls = [0] * len(model.stack.blocks)
    for i, block in enumerate(model.stack.blocks):
        block.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    activation_patching(model, clean, corrupted, METRIC, "stack.blocks.?")
    assert calls == [3 + i for i in range(len(calls))]  # two runs of all, and those that are patched at or before it


@torch.no_grad()
def test_blocks_that_are_not_computed_may_have_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(MODELS["hybrid"])
    with ablate(model, layers=[0]):
        compare_with_whole_runs(model, random_ids(6, seed=3), random_ids(6, seed=4), monkeypatch)


@torch.no_grad()
def test_the_encoder_need_not_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(OTHERS["encoder-decoder"]), random_ids(5)
    compare_with_whole_runs(model, (random_ids(7, seed=3), ids), (random_ids(7, seed=4), ids), monkeypatch)


def compare_with_whole_runs(model: Any, clean: Any, corrupted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, patterns = list(model.named_modules()), ["*stack.input", "*stack.blocks.?", "*.sublayers.0.body"]
    found = activation_patching(model, clean, corrupted, METRIC, patterns)
    assert list(model.named_modules()) == before
    with monkeypatch.context() as context:
        context.setattr(patching, "known_blocks", lambda *_: nullcontext())
        whole = activation_patching(model, clean, corrupted, METRIC, patterns)
    for name, effects in whole.effects.items():
        assert (found.effects[name] - effects).abs().max() <= 1e-6 * effects.abs().max().clamp_min(1), name


def test_unsuitable_inputs_are_refused(make_model) -> None:
    model = make_model()
    for arguments, options, message in [
        (([1, 2], [1, 2, 3], METRIC), {}, "same length"),
        (([1, 2], [1, 2], METRIC), {}, "no difference to explain"),
        (([1, 2], [3, 2], lambda logits: logits), {}, "one number per row"),
        (([1, 2], [3, 2], logit_difference(3, 5)), {"by": "head"}, "without heads; choose"),
    ]:
        with pytest.raises(ValueError, match=message):
            activation_patching(model, *arguments, **options)


@torch.no_grad()
def test_activations_of_an_encoder_decoder_are_patched() -> None:
    """Sources differ: all of the encoder's stream carries it, and so does the decoder's after its cross-attention."""
    model, ids = build(OTHERS["encoder-decoder"]), random_ids(5)
    clean, corrupted = random_ids(7, seed=3), random_ids(7, seed=3)
    corrupted[2] = (corrupted[2] + 1) % VOCAB
    metric = logit_difference(3, 4)
    found = activation_patching(model, (clean, ids), (corrupted, ids), metric)
    assert [effects.shape for effects in found.effects.values()] == [(7,)] * 3 + [(5,)] * 3
    assert found.effects["source.stack.input"][2].item() == pytest.approx(1)
    assert found.effects["source.stack.input"][[0, 1, 3]].abs().max() <= 1e-9
    assert found.effects["target.stack.input"].abs().max() <= 1e-9
    assert found.effects["target.stack.blocks.1"][-1].item() == pytest.approx(1)
    heads = activation_patching(model, (clean, ids), (corrupted, ids), metric, "target.*.sublayers.1.body.z", "head")
    assert heads.matrix.shape == (2, 4) and heads.matrix.abs().max() > 0.01
    paths = path_patching(model, (clean, ids), (corrupted, ids), metric, senders="target.*.sublayers.1.body.z")
    assert paths.matrix.shape == (2, 4) and paths.matrix.abs().max() > 0.01
    with pytest.raises(ValueError, match=r"needs a pair .source ids, ids."):
        activation_patching(model, ids, ids, metric)
    with pytest.raises(ValueError, match="needs ids, not a pair"):
        activation_patching(build(MODELS["dot"]), (ids, ids), (ids, ids), metric)
