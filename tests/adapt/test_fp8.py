"""Linear layers in FP8: which are replaced, and that nothing else of the model changes."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.adapt.fp8 import Float8Linear, use_fp8
from regard.kernels.fp8_linear import fp8_linear
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from tests.training import tiny

SPEC = Decoder(64, 32, (Repeat((Block((Sublayer(Attention(2)), Sublayer(SwiGLU(40)))),)),))


def test_layers_by_their_dims() -> None:
    names = use_fp8(SPEC.build(0), smallest=16)
    assert [name.rsplit(".", 1)[1] for name in names] == ["q_proj", "k_proj", "v_proj", "o_proj"]  # 40 = 2.5 · 16
    assert use_fp8(SPEC.build(0)) == []  # at least 256 by default


def test_parameters_and_evaluation_stay() -> None:
    model = SPEC.build(0)
    plain, tokens = copy.deepcopy(model), torch.arange(12).view(2, 6)
    use_fp8(model, smallest=16)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))
    assert not torch.equal(model.train()(tokens), plain.train()(tokens))


@pytest.mark.ledger("q.fp8")
def test_training_uses_the_fp8_product() -> None:
    linear = Float8Linear(torch.nn.Linear(16, 32))
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear.train()(x), fp8_linear(x, linear.weight, linear.bias))


def test_training_in_fp8_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision='fp8' needs a CUDA device"):
        tiny.trainer(tmp_path / "run", replace(tiny.SETTINGS, precision="fp8")).train()


@pytest.mark.gpu
def test_steps_in_fp8_follow_those_in_bfloat16() -> None:
    """20 compiled steps on one batch: the loss falls alike; float32 tensors in, the same parameters out."""
    from regard.data.batch import Batch
    from regard.objectives.next_token import next_token
    from regard.training.optimizer import AdamW
    from regard.training.step import autocast, take_step

    device = torch.device("cuda")
    spec = Decoder(512, 512, (Repeat((Block((Sublayer(Attention(8)), Sublayer(SwiGLU(1024)))),), 2),))
    tokens = torch.randint(512, (8, 129), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(128, device=device).expand(8, -1)
    batch = Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=torch.ones(8, 128, device=device),
        positions=positions,
        segments=torch.zeros_like(positions),
    )
    losses = {}
    for precision in ("bfloat16", "fp8"):
        model = spec.build(0).to(device).train()
        if precision == "fp8":
            assert len(use_fp8(model)) == 14
        optimizer, compiled = AdamW().build(model, lr=1e-3), torch.compile(model)
        context = autocast(precision, device)
        losses[precision] = [
            take_step(compiled, next_token, batch, optimizer, 1.0, precision=context)["loss"] for _ in range(20)
        ]
    assert losses["bfloat16"][-1] < 0.7 * losses["bfloat16"][0]
    for plain, fp8 in zip(*losses.values(), strict=True):
        assert abs(fp8 - plain) < 0.02 * losses["bfloat16"][0]
