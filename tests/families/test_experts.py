"""The balance loss of experts, and tensors in published files that are not loaded."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from regard.checkpoint import load
from regard.layout import TokenLayout
from regard.models.outputs import materialize
from tests.families.cases import experts
from tests.families.pairs import LIMIT, Pair, make_pair
from tests.families.test_decoders import tokens
from tests.laws import assert_equal_weights, error, layout_with_padding

BALANCED = {name: case for name, case in experts.CASES.items() if not name.startswith("deepseek")}
QUICK = ("mixtral: one layer, multi-query, top one, tied", "qwen2_moe: one dense layer")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BALANCED], ids=str
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_balance_loss_equals_transformers(name: str, padded: bool, tmp_path: Path) -> None:
    """transformers computes one loss over the tokens of all layers, which equals ours for a model with one layer."""
    model, settings = BALANCED[name]
    pair = make_pair((model, settings | {"router_aux_loss_coef": 0.5}), tmp_path)
    ids, layout = tokens(3, 12), layout_with_padding([4, 9, 12], 12, left=False) if padded else TokenLayout.whole(3, 12)
    mask = layout.valid.long() if padded else None
    labels = ids.masked_fill(~layout.valid, -100) if padded else ids
    theirs = pair.theirs(ids, labels=labels, attention_mask=mask, output_router_logits=True)
    top_k, count = pair.theirs.config.num_experts_per_tok, theirs.router_logits[0].shape[-1]
    layer_losses = [load_balancing_loss_func((layer,), count, top_k, mask) for layer in theirs.router_logits]
    pair.ours.train()
    out = pair.ours(ids, layout, outputs=True)
    assert error(out.losses["balance"], 0.5 * sum(layer_losses) / len(layer_losses)) <= LIMIT
    if len(layer_losses) == 1:
        loss = (
            F.cross_entropy(materialize(out.logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            + out.losses["balance"]
        )
        assert error(loss, theirs.loss) <= LIMIT
        loss.backward()
        theirs.loss.backward()
        router = pair.ours.stack.blocks[0].sublayers[1].body.router
        assert error(router.proj.weight.grad, router_gradient(pair)) <= LIMIT


def router_gradient(pair: Pair) -> torch.Tensor:
    """The gradient of the first router of transformers."""
    names = [name for name, _ in pair.theirs.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    return pair.theirs.get_parameter(names[0]).grad


@torch.no_grad()
def test_tensors_of_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    pair = make_pair(experts.CASES["deepseek_v3: grouped routing"], tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"eh_proj.weight": torch.zeros(48, 96), "shared_head.norm.weight": torch.ones(48)}
    save_file(load_file(file) | {f"model.layers.3.{name}": t for name, t in extra.items()}, file, {"format": "pt"})
    ids = tokens(2, 9)
    loaded = load(tmp_path)
    assert_equal_weights(loaded, pair.ours)
    assert error(loaded(ids), pair.ours(ids)) <= LIMIT
