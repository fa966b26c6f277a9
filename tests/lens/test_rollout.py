"""Attention rollout equals the product written out, and its rows sum to one."""

import pytest
import torch

from regard.lens import attention_maps, attention_rollout


def test_rollout_is_the_product_of_the_mixed_layers(make_model, ids) -> None:
    maps = attention_maps(make_model(), ids[0])
    rollout = attention_rollout(maps, residual=0.3)
    first, last = (0.3 * torch.eye(12).double() + 0.7 * maps[layer].mean(0) for layer in (0, 2))
    assert torch.allclose(rollout, last @ first, atol=1e-12)
    assert torch.allclose(rollout.sum(-1), torch.ones(12).double())
    assert torch.equal(attention_rollout(maps, residual=1.0), torch.eye(12).double())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="no layer has an attention map"):
        attention_rollout([None])
    with pytest.raises(ValueError, match="share from 0 to 1"):
        attention_rollout([torch.eye(2)[None]], residual=2)
