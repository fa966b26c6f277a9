"""The loss is the weighted mean over tokens, however they are packed, padded or split into micro-batches."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pack
from regard.kernels.attention.mask import Causal
from regard.models.decoder import Decoder
from regard.models.outputs import materialize
from regard.models.stack import Repeat
from regard.objectives.base import cross_entropy, layout_of, token_loss
from regard.objectives.next_token import NextToken, next_token
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import FeedForward
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.alibi import Alibi
from regard.parts.position.learned import Learned
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from regard.text import train as tokenizers

VOCAB = 11


def model_of(mixer: Body, learned_positions: bool = False) -> nn.Module:
    block = Block((Sublayer(mixer), Sublayer(FeedForward(24))))
    extra = {"position": Learned(20)} if learned_positions else {}
    return Decoder(VOCAB, 16, (Repeat((block,), 2),), **extra).build(seed=1).double()


MODELS = {
    "rope": (Attention(4, kv_heads=2, position=Rope(), mask=Causal()), False),
    "alibi": (Attention(4, position=Alibi()), False),
    "learned": (Attention(4), True),
    "linear_attention": (LinearAttention(4), False),
}


def documents(*lengths: int) -> list[Item]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCAB, (n + 1,), generator=generator).tolist() for n in lengths]
    weights = [torch.rand(len(i), generator=generator, dtype=torch.float64).numpy() for i in ids]
    return [
        {"tokens": np.array(i[:-1]), "targets": np.array(i[1:]), "weights": w[1:]}
        for i, w in zip(ids, weights, strict=True)
    ]


def to_float64(batch: Batch) -> Batch:
    return Batch(**{name: t.double() if t.is_floating_point() else t for name, t in batch.items()})


def gradients(model: nn.Module, batches: list[Batch]) -> tuple[Tensor, list[Tensor]]:
    """The loss over all batches and its gradients, divided by the total count."""
    model.zero_grad()
    sums = []
    for batch in batches:
        loss, count, _ = next_token(model, batch)
        loss.backward()
        sums.append(torch.stack([loss.detach(), count]))
    loss, count = torch.stack(sums).sum(0)
    return loss / count, [p.grad / count for p in model.parameters()]


def test_the_loss_equals_a_loop() -> None:
    model = model_of(*MODELS["rope"])
    batch = to_float64(pack([documents(5, 3), documents(4)], 10))
    loss, count, metrics = next_token(model, batch)
    log_p = model(batch.tokens, layout_of(batch)).log_softmax(-1)
    expected, correct = 0.0, 0.0
    for row in range(2):
        for t in range(10):
            weight, target = batch.weights[row, t], batch.targets[row, t]
            expected -= weight * log_p[row, t, target]
            correct += weight * (log_p[row, t].argmax() == target)
    assert abs(loss - expected) < 1e-12
    assert abs(metrics["accuracy"] - correct) < 1e-12
    assert abs(count - batch.weights.sum()) < 1e-12


@pytest.mark.ledger("tr.ntp")
def test_targets_are_the_inputs_shifted_by_one() -> None:
    """From a text to the loss: the mean of torch's cross-entropy of every token given the tokens before it."""
    tokenizer, objective = tokenizers.byte(), NextToken()
    columns = objective.tokenize({"text": "an owl saw a vole"}, tokenizer)
    ids = torch.from_numpy(columns["ids"])
    items = objective.sample(columns, tokenizer, 32, np.random.default_rng(0))
    batch = objective.collate([items], tokenizer, 32)
    assert batch.tokens[0, : len(ids) - 1].tolist() == ids[:-1].tolist()
    assert batch.targets[0, : len(ids) - 1].tolist() == ids[1:].tolist()
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((Block((Sublayer(Attention(4)),)),)),)).build(0).double()
    loss, count, _ = objective(model, to_float64(batch))
    assert count == len(ids) - 1 and tokenizer.decode(ids[: int(count)].tolist()) == "an owl saw a vole"
    assert abs(loss / count - nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:])) < 1e-12


@pytest.mark.ledger("tr.ntp")
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_separate_equals_micro_batches(name: str) -> None:
    model = model_of(*MODELS[name])
    sequences = documents(5, 3, 7, 2, 6, 4, 3, 8)
    packed = to_float64(pack([sequences[0:2], sequences[2:4], sequences[4:6], sequences[6:8]], 16))
    separate = [to_float64(pack([[sequence]], len(sequence["tokens"]))) for sequence in sequences]
    expected, expected_grads = gradients(model, separate)
    for parts in (1, 2, 4):
        found, grads = gradients(model, [packed.rows(slice(i, i + 4 // parts)) for i in range(0, 4, 4 // parts)])
        assert abs(found - expected) <= 1e-12
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert (grad - expected_grad).abs().max() <= 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_padding_do_not_change_the_loss(name: str) -> None:
    model = model_of(*MODELS[name])
    sequences = documents(5, 3)
    expected, expected_grads = gradients(model, [to_float64(pack([sequences], 9))])
    found, grads = gradients(model, [to_float64(pack([sequences, []], 12))])
    assert abs(found - expected) <= 1e-12
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).abs().max() <= 1e-12


def test_layout_is_ordered_only_if_every_row_is_one_unpadded_document() -> None:
    assert layout_of(pack([documents(6), documents(6)], 6)).ordered
    assert not layout_of(pack([documents(6), documents(5)], 6)).ordered
    assert not layout_of(pack([documents(6), documents(2, 4)], 6)).ordered


def test_losses_under_autocast_are_summed_in_float32() -> None:
    model, batch = model_of(*MODELS["rope"]).float(), pack([documents(6)], 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, count, metrics = next_token(model, batch)
        log_p = model(batch.tokens, layout_of(batch)).float().log_softmax(-1)
    expected = -(log_p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1) * batch.weights).sum()
    assert {loss.dtype, count.dtype, metrics["accuracy"].dtype} == {torch.float32}
    assert (loss - expected).abs() < 1e-5


def test_losses_of_half_precision_logits_are_float32() -> None:
    model = model_of(*MODELS["rope"]).bfloat16()
    loss, count, metrics = next_token(model, pack([documents(6)], 6))
    assert {loss.dtype, count.dtype, metrics["accuracy"].dtype} == {torch.float32}


@pytest.mark.ledger("tr.perplexity")
def test_perplexity_is_the_effective_number_of_choices() -> None:
    """The mean loss of probabilities 1/4, 1/2 and 1/8 is ln 4, so 4 choices; uniform predictions have V choices."""
    probabilities = torch.tensor(
        [[[1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 6, 1 / 2, 1 / 6, 1 / 6], [1 / 8, 3 / 8, 3 / 8, 1 / 8]]]
    )
    targets = torch.tensor([[2, 1, 0]])
    loss, _ = cross_entropy(probabilities.double().log(), targets, torch.ones(1, 3, dtype=torch.float64))
    assert math.exp(loss / 3) == pytest.approx(4, abs=1e-6)
    model = Decoder(1000, 8, (Repeat((Block((Sublayer(FeedForward(8)),)),)),), tied=False).build(seed=0)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        loss, count, _ = next_token(model, pack([documents(6)], 6))
    assert (loss / count).item() == pytest.approx(6.908, abs=5e-4)
    assert math.exp(loss / count) == pytest.approx(1000, rel=1e-5)


@pytest.mark.ledger("tr.parallel", "mask.parallel")
@pytest.mark.parametrize("name", MODELS)
def test_one_forward_equals_a_forward_per_prefix(name: str) -> None:
    model = model_of(*MODELS[name])
    batch = to_float64(pack([documents(7)], 7))
    whole = model(batch.tokens)
    found, grads = gradients(model, [batch])
    model.zero_grad()
    losses = []
    for n in range(1, 8):
        logits = model(batch.tokens[:, :n])[:, -1]
        assert (logits - whole[:, n - 1]).abs().max() <= 1e-12
        losses.append(batch.weights[0, n - 1] * nn.functional.cross_entropy(logits, batch.targets[:, n - 1]))
    expected = torch.stack(losses).sum() / batch.weights.sum()
    expected.backward()
    assert abs(found - expected) <= 1e-12
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert (grad - parameter.grad).abs().max() <= 1e-12


def test_targets_of_weight_zero_are_ignored():
    model = Decoder(7, 8, (Repeat((Block((Sublayer(Attention(2)),)),)),)).build(seed=0)
    tokens, weights = torch.arange(6).unsqueeze(0), torch.tensor([[1.0, 1, 0, 1, 0, 1]])
    layout = {"positions": torch.arange(6).unsqueeze(0), "segments": torch.zeros(1, 6, dtype=torch.int64)}
    whole = Batch(tokens=tokens, targets=tokens, weights=weights, **layout)
    ignored = Batch(tokens=tokens, targets=tokens.where(weights > 0, -100), weights=weights, **layout)
    assert next_token(model, whole)[0] == next_token(model, ignored)[0]


def test_a_random_slice_of_a_long_document_depends_on_the_generator_only() -> None:
    columns = {"ids": np.arange(50)}
    starts = set()
    for seed in range(40):
        [item] = NextToken(slices="random").sample(columns, tokenizers.byte(), 8, np.random.default_rng(seed))
        [again] = NextToken(slices="random").sample(columns, tokenizers.byte(), 8, np.random.default_rng(seed))
        start = int(item["tokens"][0])
        assert item["tokens"].tolist() == list(range(start, start + 8)) == again["tokens"].tolist()
        assert item["targets"].tolist() == list(range(start + 1, start + 9))
        starts.add(start)
    assert len(starts) > 20 and min(starts) >= 0 and max(starts) <= 41
    short = NextToken(slices="random").sample({"ids": np.arange(5)}, tokenizers.byte(), 8, np.random.default_rng(0))
    assert [item["tokens"].tolist() for item in short] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("tied", [True, False], ids=["chunked", "logits"])
def test_z_loss_and_label_smoothing_equal_their_formula(tied: bool) -> None:
    """The decoder's logits are lazy; a tensor of logits has the same loss."""
    model = model_of(*MODELS["rope"])
    batch = to_float64(pack([documents(5, 3), documents(4)], 10))
    outputs = model(batch.tokens, layout_of(batch), outputs=True)
    outputs = outputs if tied else outputs._replace(logits=materialize(outputs.logits))
    loss, _, _ = token_loss(outputs, batch, label_smoothing=0.1, z_loss=0.01)
    logits = materialize(outputs.logits).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="none", label_smoothing=0.1)
    expected = ((losses + 0.01 * logits.logsumexp(-1).square()) * batch.weights.flatten()).sum()
    assert abs(loss - expected) < 1e-11
    gradients = (torch.autograd.grad(value, model.parameters(), retain_graph=True) for value in (loss, expected))
    for found, gradient in zip(*gradients, strict=True):
        assert (found - gradient).abs().max() <= 1e-11


def test_the_objective_adds_its_z_loss() -> None:
    model, batch = model_of(*MODELS["rope"]), to_float64(pack([documents(5)], 5))
    without, with_z_loss = NextToken()(model, batch)[0], NextToken(z_loss=0.5)(model, batch)[0]
    log_sums = model(batch.tokens).logsumexp(-1)
    assert abs(with_z_loss - without - 0.5 * (log_sums.square() * batch.weights).sum()) < 1e-11
    with pytest.raises(SpecError, match="z_loss=-1.0 must not be negative"):
        NextToken(z_loss=-1.0)
