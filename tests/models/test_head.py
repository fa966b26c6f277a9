"""The output of a decoder: the final norm, the head, its tie with the embedding, and the initial logits."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt import LoRA, add_lora
from regard.checkpoint import load, save
from regard.data.batch import Batch
from regard.kernels import linear_cross_entropy
from regard.kernels.attention.mask import Causal, attention_mask
from regard.layout import TokenLayout
from regard.models.decoder import Decoder, DecoderModule
from regard.models.outputs import LazyLogits, materialize
from regard.models.presets import transformer_2017
from regard.models.stack import Repeat
from regard.objectives.next_token import next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from tests.kernels.largest_tensor import LargestTensor
from tests.laws import assert_equal_weights, error

VOCAB = 1000


def small_gpt(tied: bool = True, style: str = "pre") -> Decoder:
    """A small GPT: four layers of width 256, eight heads, 512 learned positions."""
    norm = LayerNorm()
    block = Block((Sublayer(Attention(8, bias=True), norm), Sublayer(FeedForward(1024), norm)), style=style)
    return Decoder(VOCAB, 256, (Repeat((block,), 4),), position=Learned(512), norm=norm, tied=tied)


def random_ids() -> Tensor:
    return torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))


def loss(model: DecoderModule) -> Tensor:
    return F.cross_entropy(model(random_ids()[:, :-1]).flatten(0, 1), random_ids()[:, 1:].flatten())


@pytest.mark.ledger("model.tie")
def test_a_tied_head_is_one_table_with_both_gradients(tmp_path: Path) -> None:
    tied, untied = small_gpt().build(seed=0).double(), small_gpt(tied=False).build(seed=0).double()
    untied.load_state_dict(tied.state_dict())
    assert tied.head.weight is tied.embedding.weight
    counts = [sum(p.numel() for p in model.parameters()) for model in (untied, tied)]
    assert counts[0] - counts[1] == VOCAB * 256
    for model in (tied, untied):
        loss(model).backward()
    expected = untied.head.weight.grad + untied.embedding.weight.grad
    assert (tied.embedding.weight.grad - expected).abs().max() < 1e-12
    assert untied.head.weight.grad.any()
    assert untied.embedding.weight.grad.any()
    save(tied, tmp_path / "tied")
    loaded = load(tmp_path / "tied")
    assert loaded.head.weight is loaded.embedding.weight
    assert_equal_weights(loaded, tied)
    assert error(loaded(random_ids()), tied(random_ids())) <= 1e-12


HEADS = {
    "tied": {},
    "untied, bias": {"tied": False, "head_bias": True},
    "scaled": {"logit_scale": 0.25},
    "capped": {"softcap": 2.0, "logit_scale": 3.0},
}


@pytest.mark.ledger("model.head")
@pytest.mark.parametrize("head", HEADS)
def test_a_chunked_head_has_the_loss_and_gradients_of_all_logits(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, accuracy and every gradient equal those of logits = W_U h + b and their log-softmax, in float64."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 40 * VOCAB)
    block = Block((Sublayer(Attention(4)), Sublayer(FeedForward(64))))
    spec = dataclasses.replace(small_gpt(), layers=(Repeat((block,), 1),), width=32, ahead=(block,), **HEADS[head])
    model, tokens = spec.build(seed=0).double(), random_ids()
    batch = Batch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=torch.rand(2, 63, dtype=torch.float64),
        positions=torch.arange(63).expand(2, 63), segments=torch.zeros(2, 63, dtype=torch.long),
    )  # fmt: skip
    with LargestTensor() as largest:
        loss, _, metrics = next_token(model, batch)
        loss.backward()
    assert largest.numel < 2 * 63 * VOCAB
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    out = model(batch.tokens, outputs=True)
    z = model.hidden(batch.tokens) @ model.head.weight.T + (0 if model.head.bias is None else model.head.bias)
    z = z * spec.logit_scale
    z = z if spec.softcap is None else spec.softcap * (z / spec.softcap).tanh()
    assert (materialize(out.logits) - z).abs().max() < 1e-12
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    target_p = p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    ahead_log_p = (
        materialize(out.ahead_logits[0])[:, :-1]
        .log_softmax(-1)
        .gather(-1, batch.targets[:, 1:].unsqueeze(-1))
        .squeeze(-1)
    )
    expected = -(batch.weights * target_p.log()).sum() - (batch.weights[:, 1:] * ahead_log_p).sum()
    assert abs(loss - expected) < 1e-9
    assert metrics["accuracy"] == ((z.argmax(-1) == batch.targets) * batch.weights).sum()
    expected.backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert (gradient - parameter.grad).abs().max() < 1e-9


def test_an_adapted_head_computes_all_logits() -> None:
    model = small_gpt(tied=False).build(seed=0)
    assert isinstance(model(random_ids(), outputs=True).logits, LazyLogits)
    add_lora(model, LoRA(targets=("head",)))
    out = model(random_ids(), outputs=True)
    assert isinstance(out.logits, Tensor)
    assert torch.equal(out.logits, model(random_ids()))


@pytest.mark.ledger("model.tie.init")
@torch.no_grad()
def test_an_untrained_model_predicts_almost_uniformly() -> None:
    """A tied table of unit deviation, the default of `nn.Embedding`, results in logits of deviation √256."""
    uniform_loss = math.log(VOCAB)
    assert uniform_loss == pytest.approx(6.91, abs=5e-3)
    unit_deviation = small_gpt().build(seed=0)
    nn.init.normal_(unit_deviation.embedding.weight)
    nn.init.normal_(unit_deviation.position.table.weight)
    assert loss(unit_deviation).item() == pytest.approx(170, rel=0.03)
    assert loss(small_gpt().build(0, "gpt2")).item() == pytest.approx(uniform_loss, rel=0.05)
    assert loss(small_gpt().build(0, "gpt2")).item() == pytest.approx(7.02, abs=0.1)
    # embeddings of deviation 1/√width: logits of deviation 1, which add half a nat
    assert uniform_loss < loss(small_gpt().build(0)).item() < uniform_loss + 0.75


@pytest.mark.ledger("model.gptlite.device")
def test_masks_are_on_the_device_of_the_tokens_and_each_norm_runs_once() -> None:
    with torch.device("meta"):
        model = small_gpt().build()
    tokens = torch.empty(2, 64, dtype=torch.long, device="meta")
    layout, calls = TokenLayout(torch.empty(2, 64, dtype=torch.long, device="meta")), []
    for module in model.modules():
        if type(module).__name__.startswith("LayerNorm"):
            module.register_forward_hook(lambda *_: calls.append(1))
    assert model(tokens, layout).device.type == "meta"
    assert attention_mask(Causal(), layout).device.type == "meta"
    assert len(calls) == 2 * 4 + 1


@pytest.mark.gpu
@pytest.mark.ledger("model.gptlite.device")
@torch.no_grad()
def test_logits_on_a_gpu_equal_those_on_the_cpu() -> None:
    model, tokens = small_gpt().build(seed=0), random_ids()
    expected = model(tokens)
    assert (model.cuda()(tokens.cuda()).cpu() - expected).abs().max() < 1e-2


@pytest.mark.ledger("blk.finalnorm")
@torch.no_grad()
def test_a_pre_norm_stack_needs_a_final_norm_and_a_post_norm_stack_does_not() -> None:
    assert Decoder(VOCAB, 256, small_gpt().layers).norm is not None
    assert transformer_2017(layers=1).target.norm == NoNorm()
    layout, x = TokenLayout.whole(2, 64), torch.randn(2, 64, 256)
    for style in ("pre", "post"):
        model = small_gpt(style=style).build(seed=0)
        hidden, _ = model.stack(x, layout)
        change = (model.norm(hidden) - hidden).abs().max()
        assert change > 0.1 if style == "pre" else change < 1e-3
        assert model.norm(hidden).var(-1, correction=0).mean().item() == pytest.approx(1, abs=1e-3)
