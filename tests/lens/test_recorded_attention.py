"""One forward, the map of any layer on demand, and no trace on the model's modules."""

import torch

from regard.lens import RecordedAttention, attention_maps
from regard.lens.recorded_attention import copy_with_shared_tensors


def test_the_map_of_each_layer_equals_attention_maps(make_model) -> None:
    model, ids = make_model(), [3, 1, 4, 1, 5]
    recorded = RecordedAttention(model, ids)
    for layer, expected in enumerate(attention_maps(model, ids)):
        found = recorded.weights(layer)
        assert (found is None) == (expected is None)
        if found is not None:
            assert torch.equal(found, expected)
    assert recorded.nbytes > 0


def test_the_copy_shares_the_weights_and_has_no_hooks(make_model) -> None:
    model = make_model()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    copy = copy_with_shared_tensors(model)
    assert [parameter.data_ptr() for parameter in copy.parameters()] == pointers
    assert not {id(module) for module in copy.modules()} & {id(module) for module in model.modules()}
    recorded = RecordedAttention(model, [1, 2])
    assert not seen and recorded.weights(0) is not None
    assert len(model._forward_hooks) == 1
    assert not any(module._forward_hooks for module in model.modules() if module is not model)
