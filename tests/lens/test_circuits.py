"""The test finds the one head that carries the metric, and no effect of a head that does nothing."""

import pytest
import torch

from regard.lens import circuit_test, logit_difference
from regard.models.decoder import DecoderModule


@pytest.fixture
def model(make_model) -> DecoderModule:
    """Only head 1 of layer 2 writes to the residual stream."""
    model = make_model()
    with torch.no_grad():
        for layer, block in enumerate(model.stack.blocks):
            for sublayer in block.sublayers:
                for name, parameter in sublayer.body.named_parameters():
                    if name in ("o_proj.weight", "down_proj.weight"):
                        parameter.view(len(parameter), 4, -1)[:, [i for i in range(4) if (layer, i) != (2, 1)]] = 0
                        if name == "down_proj.weight":
                            parameter.zero_()
    return model


def test_the_head_that_matters_is_told_from_the_others(model: DecoderModule, ids) -> None:
    with torch.no_grad():
        scores = (model(ids) - model.logits(model.final_norm(model.embedding(ids))))[0, -1]  # what the head adds
    metric = logit_difference(int(scores.argmax()), int(scores.argmin()))
    found = circuit_test(model, ids, metric, [(2, 1)])
    assert found.ablated < found.whole and found.p_value == 1 / 21
    assert torch.allclose(found.random, torch.tensor(found.whole).float())
    idle = circuit_test(model, ids, metric, [(0, 2)])
    assert idle.ablated == pytest.approx(idle.whole) and idle.p_value > 0.05


def test_too_few_other_heads_are_refused(model: DecoderModule, ids) -> None:
    with pytest.raises(ValueError, match="5 are tested and 3 are left"):
        circuit_test(model, ids, logit_difference(1, 2), [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0)])
