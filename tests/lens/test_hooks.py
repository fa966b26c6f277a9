"""Recording and patching: outputs are recorded exactly, replacements take effect, and no hook remains."""

import pytest
import torch

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.lens import patch, record

Z = "stack.blocks.0.sublayers.0.body.z"


def hooks(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_records_the_residual_stream(make, ids):
    model = make()
    with record(model, ["stack.input", "stack.blocks.?", "norm"]) as seen:
        logits = model(ids)
    assert list(seen) == ["stack.input", "stack.blocks.0", "stack.blocks.1", "stack.blocks.2", "norm"]
    assert torch.equal(seen["stack.input"], model.embedding(ids))
    assert torch.equal(model.head(model.norm(seen["stack.blocks.2"])), logits)


def test_records_copies_unless_gradients_are_wanted(make, ids):
    model = make()
    with record(model, Z) as seen:
        model(ids)
    assert not seen[Z].requires_grad
    with record(model, Z, grad=True) as seen:
        model(ids).sum().backward(inputs=[seen[Z]])
    assert seen[Z].grad.abs().sum() > 0


def test_recorded_keys_outlive_the_store(make, ids):
    model = make()
    store = Contiguous(model.spec.memory(), rows=1, capacity=16, dtype=torch.float64)
    layout = TokenLayout.whole(*ids.shape)
    with torch.no_grad(), record(model, "*.body.k") as seen:
        model(ids, layout, store.begin_forward(layout))
    before = {name: keys.clone() for name, keys in seen.items()}
    with torch.no_grad():
        model(ids.flip(1), layout, store.begin_forward(layout))
    assert before and all(torch.equal(seen[name], keys) for name, keys in before.items())


@pytest.mark.ledger("lens.patching")
def test_a_recorded_run_can_be_patched_into_another(make, ids):
    model, other = make(), torch.randint(0, 31, (1, 12))
    with record(model, "stack.blocks.1") as seen:
        wanted = model(ids)
    with patch(model, dict(seen)):
        assert torch.equal(model(other), wanted)
    assert not torch.equal(model(other), wanted)


@pytest.mark.ledger("lens.patching")
def test_patch_equals_an_edited_forward(make, ids):
    model = make()
    with patch(model, {Z: lambda z: z.index_fill(1, torch.tensor([2]), 0.0)}):
        patched = model(ids)
    o_proj = model.get_submodule(Z.removesuffix("z") + "o_proj")
    with torch.no_grad():
        o_proj.weight.view(16, 4, 4)[:, 2] = 0  # only these columns read head 2
    assert torch.allclose(patched, model(ids), rtol=0, atol=1e-12)


def test_patch_takes_patterns(make, ids):
    model = make()
    with patch(model, {"*.body": torch.zeros_like}):
        assert torch.equal(model(ids), model.head(model.norm(model.embedding(ids))))


@pytest.mark.parametrize("kind", ["record", "patch"])
def test_hooks_are_gone_after_an_error(make, ids, kind):
    model = make()
    context = record(model, "*") if kind == "record" else patch(model, {"*.body": torch.zeros_like})
    with pytest.raises(ZeroDivisionError), context:
        assert hooks(model) > 0
        raise ZeroDivisionError
    assert hooks(model) == 0


def test_nested_contexts_end_separately(make, ids):
    model = make()
    plain = model(ids)
    with record(model, Z) as outer:
        with patch(model, {Z: torch.zeros_like}), record(model, Z) as inner:
            model(ids)
        assert inner[Z].count_nonzero() == 0
        assert outer[Z].count_nonzero() > 0  # registered before the patch, so it records the module's own output
        assert torch.equal(model(ids), plain)
    assert hooks(model) == 0


def test_an_error_for_an_unknown_name_suggests_the_nearest(make):
    model = make()
    with pytest.raises(ValueError, match=r"did you mean 'stack.blocks.\*.sublayers.\*.body.q_proj'"):
        record(model, "stack.blocks.0.sublayers.0.body.qproj").__enter__()
    with pytest.raises(ValueError, match="no module is named 'stack.blocks.7'"):
        patch(model, {Z: torch.zeros_like, "stack.blocks.7": torch.zeros_like})
    assert hooks(model) == 0
    with record(model, "norm") as seen, pytest.raises(KeyError, match="head was not recorded"):
        seen["head"]


@pytest.mark.parametrize("edit", [lambda z: None, lambda z: z[:, :1], lambda z: z.float(), torch.zeros(2, 2)])
def test_a_patch_that_does_not_fit_is_refused(make, ids, edit):
    model = make()
    with patch(model, {Z: edit}), pytest.raises(ValueError, match=f"patch of {Z}"):
        model(ids)


def test_a_compiled_model_is_recorded(make, ids):
    model = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(ids)
    with record(model, Z) as seen, patch(model, {"stack.blocks.2": torch.zeros_like}):
        assert compiled(ids).count_nonzero() == 0
    assert seen[Z].shape == (1, 4, 12, 4)
    assert torch.equal(compiled(ids), plain)


@pytest.mark.slow
def test_taps_compile_into_one_graph(make, ids):
    model = make()
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(ids), model(ids), rtol=0, atol=1e-12)


def test_paged_keys_are_recorded_as_a_tensor(make, ids):
    model = make()
    store = Paged(model.spec.memory(), 1, 16, torch.float64, block=4, blocks=4)
    store.reserve(0, 12)
    with record(model, "stack.blocks.0.sublayers.0.body.k") as seen:
        model(ids, now := TokenLayout.whole(1, 12), store.begin_forward(now))
        (paged,) = seen.values()
        model(ids)
        (whole,) = seen.values()
    assert torch.equal(paged[:, :, :12], whole)


def test_taps_are_not_in_the_state_dict(make):
    model = make()
    taps = [name for name, module in model.named_modules() if type(module).__name__ == "Tap"]
    assert len(taps) == 1 + 2 * 4
    assert not [key for key in model.state_dict() if any(key.startswith(f"{tap}.") for tap in taps)]
