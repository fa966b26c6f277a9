"""Recording and patching: outputs are recorded exactly, replacements take effect, and no hook remains."""

from pathlib import Path

import pytest
import torch

from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.lens import StoredActivations, patch, record

Z = "stack.blocks.0.sublayers.0.body.z"


def count_hooks(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_the_residual_stream_is_recorded(make_model, ids):
    model = make_model()
    with record(model, ["stack.input", "stack.blocks.?", "norm"]) as recorded:
        logits = model(ids)
    assert list(recorded) == ["stack.input", "stack.blocks.0", "stack.blocks.1", "stack.blocks.2", "norm"]
    assert torch.equal(recorded["stack.input"], model.embedding(ids))
    assert torch.equal(model.head(model.norm(recorded["stack.blocks.2"])), logits)


def test_recorded_tensors_are_detached_unless_grad_is_set(make_model, ids):
    model = make_model()
    with record(model, Z) as recorded:
        model(ids)
    assert not recorded[Z].requires_grad
    with record(model, Z, grad=True) as recorded:
        model(ids).sum().backward(inputs=[recorded[Z]])
    assert recorded[Z].grad.abs().sum() > 0


def test_recorded_keys_do_not_change_with_the_store(make_model, ids):
    model = make_model()
    store = Contiguous(model.spec.memory(), rows=1, capacity=16, dtype=torch.float64)
    layout = TokenLayout.whole(*ids.shape)
    with torch.no_grad(), record(model, "*.body.k") as recorded:
        model(ids, layout, store.begin_forward(layout))
    expected = {name: keys.clone() for name, keys in recorded.items()}
    with torch.no_grad():
        model(ids.flip(1), layout, store.begin_forward(layout))
    assert expected and all(torch.equal(recorded[name], keys) for name, keys in expected.items())


@pytest.mark.ledger("lens.patching")
def test_a_recorded_output_can_be_patched_into_another_run(make_model, ids):
    model, other = make_model(), torch.randint(0, 31, (1, 12))
    with record(model, "stack.blocks.1") as recorded:
        expected = model(ids)
    with patch(model, dict(recorded)):
        assert torch.equal(model(other), expected)
    assert not torch.equal(model(other), expected)


@pytest.mark.ledger("lens.patching")
def test_patch_equals_an_edited_forward(make_model, ids):
    model = make_model()
    with patch(model, {Z: lambda z: z.index_fill(1, torch.tensor([2]), 0.0)}):
        patched = model(ids)
    o_proj = model.get_submodule(Z.removesuffix("z") + "o_proj")
    with torch.no_grad():
        o_proj.weight.view(16, 4, 4)[:, 2] = 0  # only these columns multiply the output of head 2
    assert torch.allclose(patched, model(ids), rtol=0, atol=1e-12)


def test_a_patch_applies_to_all_modules_that_match_a_pattern(make_model, ids):
    model = make_model()
    with patch(model, {"*.body": torch.zeros_like}):
        assert torch.equal(model(ids), model.head(model.norm(model.embedding(ids))))


@pytest.mark.parametrize("kind", ["record", "patch"])
def test_hooks_are_removed_after_an_error(make_model, ids, kind):
    model = make_model()
    context = record(model, "*") if kind == "record" else patch(model, {"*.body": torch.zeros_like})
    with pytest.raises(ZeroDivisionError), context:
        assert count_hooks(model) > 0
        raise ZeroDivisionError
    assert count_hooks(model) == 0


def test_nested_contexts_remove_only_their_own_hooks(make_model, ids):
    model = make_model()
    expected = model(ids)
    with record(model, Z) as outer:
        with patch(model, {Z: torch.zeros_like}), record(model, Z) as inner:
            model(ids)
        assert inner[Z].count_nonzero() == 0
        assert outer[Z].count_nonzero() > 0  # registered before the patch, so it records the module's own output
        assert torch.equal(model(ids), expected)
    assert count_hooks(model) == 0


def test_an_error_for_an_unknown_name_suggests_the_nearest(make_model):
    model = make_model()
    with pytest.raises(ValueError, match=r"did you mean 'stack.blocks.\*.sublayers.\*.body.q_proj'"):
        record(model, "stack.blocks.0.sublayers.0.body.qproj").__enter__()
    with pytest.raises(ValueError, match="no module is named 'stack.blocks.7'"):
        patch(model, {Z: torch.zeros_like, "stack.blocks.7": torch.zeros_like})
    assert count_hooks(model) == 0
    with record(model, "norm") as recorded, pytest.raises(KeyError, match="head was not recorded"):
        recorded["head"]


@pytest.mark.parametrize("edit", [lambda z: None, lambda z: z[:, :1], lambda z: z.float(), torch.zeros(2, 2)])
def test_a_patch_of_another_type_shape_or_dtype_is_refused(make_model, ids, edit):
    model = make_model()
    with patch(model, {Z: edit}), pytest.raises(ValueError, match=f"patch of {Z}"):
        model(ids)


def test_a_compiled_model_can_be_recorded_and_patched(make_model, ids):
    model = make_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = compiled(ids)
    with record(model, Z) as recorded, patch(model, {"stack.blocks.2": torch.zeros_like}):
        assert compiled(ids).count_nonzero() == 0
    assert recorded[Z].shape == (1, 4, 12, 4)
    assert torch.equal(compiled(ids), expected)


def test_a_pattern_skips_outputs_that_are_no_tensors(make_model, ids):
    class Pair(torch.nn.Module):
        def forward(self, x):
            return {"x": x}

    model = make_model()
    model.pair = Pair()
    model.register_forward_hook(lambda model, args, output: model.pair(output)["x"])
    with record(model, "*") as recorded, patch(model, {"p?ir": torch.zeros_like}):
        expected = model(ids)
    assert "pair" not in recorded and {"norm", Z} < recorded.keys() and expected.count_nonzero()
    with record(model, "pair"), pytest.raises(ValueError, match="pair returns a dict, not a tensor"):
        model(ids)


def test_activations_are_recorded_on_another_device(make_model, ids):
    with record(model := make_model(), Z, device="meta") as recorded:
        model(ids)
    assert recorded[Z].device.type == "meta"
    with pytest.raises(ValueError, match="grad=True"):
        record(model, Z, grad=True, device="cpu").__enter__()


@pytest.mark.slow
def test_taps_compile_into_one_graph(make_model, ids):
    model = make_model()
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(ids), model(ids), rtol=0, atol=1e-12)


def test_paged_keys_are_recorded_as_a_tensor(make_model, ids):
    model = make_model()
    store = Paged(model.spec.memory(), 1, 16, torch.float64, block=4, blocks=4)
    store.reserve(0, 12)
    with record(model, "stack.blocks.0.sublayers.0.body.k") as recorded:
        model(ids, layout := TokenLayout.whole(1, 12), store.begin_forward(layout))
        (paged,) = recorded.values()
        model(ids)
        (whole,) = recorded.values()
    assert torch.equal(paged[:, :, :12], whole)


def test_taps_are_not_in_the_state_dict(make_model):
    model = make_model()
    taps = [name for name, module in model.named_modules() if type(module).__name__ == "Tap"]
    assert len(taps) == 1 + 2 * 6 + 3  # the input; in two layers q, k, v, z, scores, pattern; in three the neurons
    assert not [key for key in model.state_dict() if any(key.startswith(f"{tap}.") for tap in taps)]


def test_activations_are_recorded_in_a_folder(make_model, ids, tmp_path) -> None:
    """One file per name, read when it is used, by another process too; the latest call replaces earlier ones."""
    model, patterns = make_model(), ["stack.blocks.?", "*.pattern"]
    with torch.no_grad(), record(model, patterns) as expected, record(model, patterns, folder=tmp_path) as recorded:
        model(ids.flip(1))
        model(ids)
    assert list(recorded) == list(expected) and len(list(tmp_path.iterdir())) == len(expected)
    for found in (recorded, StoredActivations(tmp_path)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
    with pytest.raises(KeyError, match="stack.input was not recorded; recorded: "):
        recorded["stack.input"]
    with pytest.raises(ValueError, match="leave folder out"), record(model, "*", grad=True, folder=tmp_path):
        pass
    with torch.no_grad(), patch(model, {"stack.blocks.0": recorded["stack.blocks.0"]}):
        model(ids)


def test_a_full_disk_leaves_the_old_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredActivations(tmp_path)
    stored.keep("x", torch.ones(2))

    def fail(tensors: dict, file: Path, metadata: None) -> None:
        file.write_bytes(b"the first part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.compat.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        stored.keep("x", torch.zeros(2))
    assert stored["x"].equal(torch.ones(2)) and [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
