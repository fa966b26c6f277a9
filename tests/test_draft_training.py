"""Training of drafters: losses against loops, resuming, files that fit one model, and what training gains."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.model_folder import save
from regard.data.batch import Batch
from regard.draft_training import measure_acceptance, train_drafter
from regard.drafter_folder import load_drafter
from regard.engine.speculation.eagle import Eagle
from regard.engine.speculation.medusa import Medusa
from regard.models.decoder import Decoder, DecoderModule
from regard.models.eagle import EagleLayer
from regard.models.medusa import MedusaHeads
from regard.models.stack import Repeat
from regard.objectives.drafting import EagleLoss, MedusaLoss
from regard.text.train import character
from regard.training.base_model import fingerprint_model
from tests.engine.conftest import ATTENTION
from tests.laws import MODELS, VOCAB, build

TEXT = "the cat sat on the mat. the dog sat on the log. "
OPTIONS = {
    "train.steps": 30, "train.lr": 1e-2, "train.schedule.warmup": 2, "train.evaluate_every": 0, "train.save_every": 10,
    "data.length": 48, "data.rows": 2, "data.held_out": 1,
}  # fmt: skip


def packed_batch() -> Batch:
    """Two rows; the second has two documents, and padding with targets that are no ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 9), generator=generator)
    segments = torch.tensor([[0] * 8, [0] * 3 + [1] * 4 + [-1]])
    positions = torch.tensor([[*range(8)], [0, 1, 2, 0, 1, 2, 3, 0]])
    weights = (segments >= 0).float()
    weights[0, 2] = 0
    targets = ids[:, 1:].where(segments >= 0, -100)
    return Batch(tokens=ids[:, :-1], targets=targets, weights=weights, positions=positions, segments=segments)


def documents(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, targets, weights) of each document."""
    found = []
    for row, document in ((0, slice(0, 8)), (1, slice(0, 3)), (1, slice(3, 7))):
        found.append(tuple(getattr(batch, name)[row, document] for name in ("tokens", "targets", "weights")))
    return found


@pytest.mark.ledger("spec.medusa")
@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_of_medusa_equals_a_loop(shared: bool) -> None:
    target = build(MODELS["softcap"])
    heads = MedusaHeads.of(target.spec, 3, shared).build(seed=1).double()
    heads.copy_head(target)
    torch.nn.init.normal_(heads.blocks[1].weight, generator=torch.Generator().manual_seed(1))
    batch, expected, correct = packed_batch(), 0.0, [0.0] * 3
    for tokens, targets, weights in documents(batch):
        hidden = target.hidden(tokens[None])[0]
        for k in range(1, 4):
            block = heads.blocks[k - 1]
            x = hidden + F.silu(hidden @ block.weight.T + block.bias)
            logits = (target.logits(x) if shared else x @ heads.outputs[k - 1].weight.T).detach()
            for i in range(len(tokens) - k):
                logp = logits[i].log_softmax(-1)
                expected -= 0.8**k * float(weights[i + k] * logp[targets[i + k]])
                correct[k - 1] += float(weights[i + k] * (logp.argmax() == targets[i + k]))
    loss, count, metrics = MedusaLoss(target)(heads, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and float(count) == batch.weights.sum()
    pairs = [sum(float(w[k:].sum()) for *_, w in documents(batch)) for k in range(1, 4)]
    for k in range(1, 4):
        assert float(metrics[f"accuracy_{k}"] / count) == pytest.approx(correct[k - 1] / pairs[k - 1])
    loss.backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())


@pytest.mark.ledger("spec.eagle")
def test_the_loss_of_eagle_equals_a_loop() -> None:
    target = build(MODELS["grouped-query"])
    layer = EagleLayer.of(target.spec).build(seed=1).double().eval()
    batch, expected = packed_batch(), 0.0
    for tokens, targets, weights in documents(batch):
        hidden = target.hidden(tokens[None])[0]
        layout = regard.layout.TokenLayout.whole(1, len(tokens))
        predicted = layer(hidden[None], target.embed(targets[None]), layout)[0]
        for i in range(len(tokens) - 1):
            p, q = (target.logits(x).softmax(-1) for x in (hidden[i + 1], predicted[i]))
            regression = F.smooth_l1_loss(predicted[i], hidden[i + 1])
            expected += float(weights[i + 1] * (regression - 0.1 * (p * q.log()).sum()).detach())
    loss, _, _ = EagleLoss(target)(layer, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    layer.train()
    assert EagleLoss(target)(layer, batch)[0].item() != pytest.approx(expected, rel=1e-6)  # with noise


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A decoder that has learned the text by heart, and the text."""
    folder = tmp_path_factory.mktemp("drafts")
    (folder / "text.txt").write_text("\n".join([TEXT * 4] * 30))
    tokenizer = character([TEXT + "\n"])
    model = Decoder(tokenizer.vocab_size, 32, (Repeat((ATTENTION,), 2),), context=128).build(seed=0)
    save(model, folder / "start", tokenizer)
    overrides = OPTIONS | {"train.steps": 150}
    regard.train(start=folder / "start", data=folder / "text.txt", out=folder / "model", overrides=overrides)
    return folder / "model", folder / "text.txt"


def acceptance(model: Path, drafter) -> float:
    llm = regard.load(model)
    return measure_acceptance(llm.model, drafter, [llm.tokenizer.encode(TEXT)[:20]]).tokens_per_draft


@pytest.mark.ledger("spec.medusa", "spec.eagle")
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_a_trained_drafter_is_accepted_more_often(trained, tmp_path: Path, method) -> None:
    model, data = trained
    out = tmp_path / "drafter"
    statistics = train_drafter(model, out, method, OPTIONS | {"train.steps": 120}, data, device="cpu")
    assert statistics is not None and statistics.tokens_per_draft > 2.5
    checkpoint = next(iter((model / "checkpoints").glob("step-000150")))
    drafter = load_drafter(out, method, fingerprint_model(checkpoint))
    assert drafter.spec.kind == method
    target = regard.load(model).model
    assert isinstance(target, DecoderModule)
    untrained = (
        Medusa(MedusaHeads.of(target.spec).build(0))
        if method == "medusa"
        else Eagle(EagleLayer.of(target.spec).build(0))
    )
    trained_drafter = Medusa(drafter) if method == "medusa" else Eagle(drafter)
    assert acceptance(model, trained_drafter) > acceptance(model, untrained) + 1
    with pytest.raises(CheckpointError, match="was trained for a model with other weights"):
        load_drafter(out, method, fingerprint_model(model.parent / "start"))
    other = "eagle" if method == "medusa" else "medusa"
    with pytest.raises(CheckpointError, match=f"use --speculate {method}:"):
        load_drafter(out, other, fingerprint_model(checkpoint))
    with pytest.raises(ValueError, match="exists; choose another name"):
        train_drafter(model, out, method, OPTIONS, data)


def test_an_interrupted_training_is_resumed(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = trained

    def train(name: str, **options):
        train_drafter(model, tmp_path / name, "medusa", OPTIONS | options, data, heads=2, device="cpu")

    train("whole")
    step = regard.training.loop.Trainer.step

    def stop_at_15(trainer, batch, position, start):
        if position.step == 15:
            raise KeyboardInterrupt
        return step(trainer, batch, position, start)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(regard.training.loop.Trainer, "step", stop_at_15)
        train("resumed")
    assert not (tmp_path / "resumed").exists()
    with pytest.raises(ValueError, match="has the state of a training with other settings"):
        train("resumed", **{"train.steps": 40})
    with pytest.raises(ValueError, match="resume it with the same command: regard speculate train"):
        regard.train(resume=tmp_path / "resumed-training")
    train("resumed")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]


def test_a_training_that_fails_at_once_leaves_nothing(trained, tmp_path: Path) -> None:
    model, data = trained
    (tmp_path / "bad.jsonl").write_text('{"txt": "a misspelt field"}\n' * 9)
    drafts = tmp_path / "drafts"
    for method, path, overrides, message in (
        ("medusa", tmp_path / "bad.jsonl", {}, "an example needs `text`"),
        ("medusa", data, {"train.precision": "bfloat16"}, "needs a CUDA device"),
        ("medusa", data, {"train.lr": "abc"}, "Training.lr: expected float"),
        ("eagles", data, {}, "method='eagles' is unknown; choose one of medusa, eagle"),
    ):
        with pytest.raises(ValueError, match=message):
            train_drafter(model, drafts / "out", method, OPTIONS | overrides, path, device="cpu")
        assert not drafts.exists() or not any(drafts.iterdir()), message


def test_what_does_not_fit_is_refused(trained, tmp_path: Path) -> None:
    model, data = trained
    with pytest.raises(CheckpointError, match="has no drafter; train one: regard speculate train MODEL"):
        load_drafter(tmp_path, "medusa", "")
    with pytest.raises(CheckpointError, match="is a model and no drafter"):
        load_drafter(model.parent / "start", "medusa", "")
    target = build(MODELS["grouped-query"])
    for drafter in (
        Medusa(MedusaHeads(5, 8).build(0)),
        Eagle(EagleLayer.of(Decoder(5, 8, (Repeat((ATTENTION,)),))).build(0)),
    ):
        with pytest.raises(ValueError, match="trained for this model"):
            regard.engine.engine.Engine(target, rows=1, speculation=drafter)
    with pytest.raises(regard.SpecError, match="embedding_dim=8 .* use medusa"):
        EagleLayer.of(Decoder(5, 24, (Repeat((ATTENTION,)),), embedding_dim=8))
