"""Every objective: sums and a count that do not depend on how a batch is split, and finite gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import kinds
from regard.data.batch import Batch
from regard.kernels.attention.mask import Mask, PrefixLM
from regard.models.generative.base import MLP
from regard.models.heads import PreTraining
from regard.models.presets import clip
from regard.objectives.bert_pretraining import BertPretraining
from regard.objectives.classification import classification
from regard.objectives.contrastive import Contrastive
from regard.objectives.denoising import Denoising
from regard.objectives.distillation import Distillation
from regard.objectives.embeddings import SentenceEmbeddings
from regard.objectives.gan import Adversarial
from regard.objectives.image_text import image_text
from regard.objectives.kto import KTO
from regard.objectives.masked import MaskedTokens
from regard.objectives.next_token import NextToken, next_token
from regard.objectives.policy_gradient import GRPO, REINFORCE, RLOO
from regard.objectives.ppo import PPO
from regard.objectives.preference import DPO, ORPO, SimPO
from regard.objectives.prefix_lm import PrefixLanguageModel
from regard.objectives.reconstruction import Reconstruction, Variational
from regard.objectives.reinforcement import ROLLOUT_METRICS
from regard.objectives.reward import Reward
from regard.objectives.scores import regression, relevance
from regard.objectives.span_corruption import SpanCorruption
from regard.objectives.translation import translation
from regard.training.teacher import TaughtObjective

OBJECTIVES = {
    "next_token": next_token,
    "z_loss": NextToken(z_loss=0.1),
    "image_text": image_text,
    "masked_lm": MaskedTokens(),
    "prefix_lm": PrefixLanguageModel(2),
    "bert_pretraining": BertPretraining(),
    "translation": translation,
    "span_corruption": SpanCorruption(label_smoothing=0.1),
    "denoising": Denoising(),
    "classification": classification,
    "token_classification": classification,
    "regression": regression,
    "relevance": relevance,
    "embeddings": SentenceEmbeddings(symmetric=True),
    "contrastive": Contrastive("softmax"),
    "sigmoid_contrastive": Contrastive("sigmoid"),
    "reward": Reward(center=0.1),
    "dpo": DPO(label_smoothing=0.1),
    "dpo_robust": DPO(loss="robust", label_smoothing=0.1, reference_free=True, length_normalized=True),
    "dpo_hinge": DPO(loss="hinge"),
    "ipo": DPO(loss="ipo"),
    "simpo": SimPO(),
    "orpo": ORPO(),
    "kto": KTO(good_weight=2.0),
    "reinforce": REINFORCE(),
    "rloo": RLOO(temperature=0.7),
    "grpo": GRPO(kl=0.5),
    "gspo": GRPO(ratio="sequence"),
    "ppo": PPO(value_weight=0.5),
    "reconstruction": Reconstruction(noise=0.1),
    "vae": Variational(beta=0.5),
    "gan": Adversarial(),
    "gan_generator": Adversarial().phase(1).loss,
    "gan_wasserstein": Adversarial(loss="wasserstein"),
}  # and distillation, whose teacher is a model
VOCAB, ROWS, LENGTH, WIDTH = 23, 4, 6, 16


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    fields: tuple[str, ...]  # of FIELDS
    extra_fields: dict[str, Tensor] = field(default_factory=dict)  # added to those of FIELDS, or replacing them


def block(mixer: regard.Body, *bodies: regard.Body) -> regard.Block:
    return regard.Block(tuple(regard.Sublayer(body) for body in (mixer, *bodies, regard.SwiGLU(24))))


def decoder(*bodies: regard.Body) -> regard.Decoder:
    layer = block(regard.Attention(2, position=regard.Rope()), *bodies)
    return regard.Decoder(VOCAB, WIDTH, (regard.Repeat((layer,)),))


def encoder(head: regard.Spec | None, input: regard.Spec | None = None, mask: Mask | None = None) -> regard.Encoder:
    layers = (regard.Repeat((block(regard.Attention(2, mask=mask or regard.Full())),)),)
    return regard.Encoder(input or regard.Tokens(VOCAB), WIDTH, layers, head=head)


def interleaved_model() -> nn.Module:
    vision = encoder(None, regard.Patches((4, 4), (8, 8)))
    return regard.Interleaved(vision, decoder(), marker=5).build(seed=0)


def encoder_decoder_model() -> nn.Module:
    return regard.EncoderDecoder(encoder(None), decoder(regard.CrossAttention(2))).build(seed=0)


def dual_encoder_model() -> nn.Module:
    text = {"vocab": VOCAB, "length": LENGTH, "text_width": WIDTH, "text_heads": 2}
    return clip(image=8, patch=4, width=WIDTH, heads=2, layers=1, dim=8, **text).build(seed=0)


def random_fields() -> dict[str, Tensor]:
    """Rows of two packed documents, of which the second is padding in row 0."""
    generator = torch.Generator().manual_seed(0)
    segments = torch.tensor([[0, 0, 0, 0, -1, -1]] + [[0, 0, 0, 0, 1, 1]] * (ROWS - 1))
    return {
        "tokens": torch.randint(6, VOCAB, (ROWS, LENGTH), generator=generator),
        "targets": torch.randint(VOCAB, (ROWS, LENGTH), generator=generator),
        "weights": (segments >= 0).double(),
        "positions": torch.tensor([0, 1, 2, 3, 0, 1]).expand(ROWS, LENGTH).clone(),
        "segments": segments,
        "labels": torch.tensor([0, 2, 1, 1]),
        "source": torch.randint(VOCAB, (ROWS, 5), generator=generator),
        "source_valid": torch.tensor([[True] * 5, [True] * 3 + [False] * 2] * 2),
        "images": torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64),
    }


FIELDS = random_fields()
TOKENS = ("tokens", "targets", "weights", "positions", "segments")
ONE_IMAGE = {  # of four patches, at the start of each row
    "tokens": torch.cat([torch.full((ROWS, 4), 5), FIELDS["tokens"][:, 4:]], 1),
    "images": FIELDS["images"].unsqueeze(1),
}
# The loss is one of sequences: targets, weights and the number of pairs do not count tokens.
PAIRS = Case(
    lambda: decoder().build(seed=0),
    ("tokens", "positions", "segments"),
    {
        "targets": FIELDS["targets"],
        "weights": FIELDS["weights"] * (FIELDS["positions"] > 0),
        "labels": torch.tensor([True, False, False, True]),
        "reference": -torch.arange(2.0 * ROWS, dtype=torch.float64).view(ROWS, 2),
    },
)
COUNTED = PAIRS.extra_fields["weights"]
SAMPLED = Case(
    PAIRS.model,
    PAIRS.fields,
    {
        "targets": FIELDS["targets"],
        "weights": COUNTED * 0.5,
        "advantages": COUNTED * torch.tensor([-3.0, 1.0, -2.0, -1.0]).unsqueeze(1),
        "old_logprobs": COUNTED * -3.0,
        "reference_logprobs": COUNTED * -2.5,
        "rollout": torch.arange(float(len(ROLLOUT_METRICS))).expand(ROWS, -1),
    },
)
SMALL = {"shape": (3, 8, 8), "latent": 5}
NOISY = {
    "data": FIELDS["images"],
    "corrupted": FIELDS["images"] + 0.1,
    "noise": torch.linspace(-2, 2, ROWS * 5, dtype=torch.float64).sin().view(ROWS, 5),
    "mix": torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64),
}
CASES = {
    "next_token": Case(lambda: decoder().build(seed=0), TOKENS),
    "image_text": Case(interleaved_model, TOKENS, ONE_IMAGE),
    "z_loss": Case(lambda: decoder().build(seed=0), TOKENS),
    "masked_lm": Case(lambda: encoder(regard.MaskedLM()).build(seed=0), TOKENS),
    "prefix_lm": Case(lambda: encoder(regard.MaskedLM(), mask=PrefixLM(2)).build(seed=0), TOKENS),
    "bert_pretraining": Case(
        lambda: encoder(PreTraining(regard.MaskedLM(), regard.Classification(2)), regard.Tokens(VOCAB, types=2)).build(
            seed=0
        ),
        ("tokens", "targets"),
        {
            "weights": FIELDS["weights"],
            "segments": FIELDS["segments"].clamp_max(0),
            "types": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            "labels": torch.tensor([0, 1, 1, 0]),
            "pair_weights": torch.full((ROWS,), 5.5, dtype=torch.float64),
        },
    ),
    "translation": Case(encoder_decoder_model, (*TOKENS, "source", "source_valid")),
    "span_corruption": Case(encoder_decoder_model, (*TOKENS, "source", "source_valid")),
    "denoising": Case(encoder_decoder_model, (*TOKENS, "source", "source_valid")),
    "classification": Case(lambda: encoder(regard.Classification(3)).build(seed=0), ("tokens", "labels")),
    "relevance": Case(
        lambda: encoder(regard.Classification(1)).build(seed=0),
        ("tokens",),
        {"labels": torch.tensor([0.0, 1.0, 0.5, 1.0])},
    ),
    "token_classification": Case(
        lambda: encoder(regard.Classification(VOCAB, "none")).build(seed=0),
        ("tokens", "weights"),
        {"labels": FIELDS["targets"]},
    ),
    "regression": Case(
        lambda: encoder(regard.Classification(1)).build(seed=0),
        ("tokens",),
        {"labels": torch.tensor([0.0, -1.0, 2.5, 1.0])},
    ),
    "embeddings": Case(
        lambda: encoder(regard.Pooled()).build(seed=0),
        (),
        {
            "tokens": torch.stack([FIELDS["tokens"].roll(shift) for shift in range(3)], 1),
            "valid": torch.tensor([True, True, True, True, False, False]).expand(ROWS, 3, LENGTH),
        },
    ),
    "contrastive": Case(dual_encoder_model, ("tokens", "images")),
    "sigmoid_contrastive": Case(dual_encoder_model, ("tokens", "images")),
    "reward": Case(
        lambda: encoder(regard.Classification(1)).build(seed=0),
        (),
        {
            "tokens": torch.stack([FIELDS["tokens"], FIELDS["targets"]], 1),
            "valid": torch.tensor([True, True, True, True, False, False]).expand(ROWS, 2, LENGTH),
            "weights": torch.tensor([1.0, 2.0, 0.5, 0.5], dtype=torch.float64),
            "margins": torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=torch.float64),
        },
    ),
    "distillation": Case(lambda: decoder().build(seed=0), TOKENS),
    **dict.fromkeys(("dpo", "dpo_robust", "dpo_hinge", "ipo", "simpo", "orpo", "kto"), PAIRS),
    **dict.fromkeys(("rloo", "grpo", "gspo"), SAMPLED),
    "ppo": Case(
        lambda: replace(decoder(), value_head=True).build(seed=0),
        PAIRS.fields,
        SAMPLED.extra_fields
        | {
            "old_values": COUNTED * 0.5,
            "returns": COUNTED * torch.tensor([2.0, 0.1, -1.0, 1.0]).unsqueeze(1),
            "rollout": torch.arange(float(len(PPO.rollout_metrics))).expand(ROWS, -1),
        },
    ),
    "reconstruction": Case(lambda: regard.Autoencoder(**SMALL, encoder=MLP((8,))).build(seed=0), (), NOISY),
    "vae": Case(lambda: regard.VAE(**SMALL, decoder=MLP((8,))).build(seed=0), (), NOISY),
    **dict.fromkeys(
        ("gan", "gan_generator", "gan_wasserstein"),
        Case(lambda: regard.GAN(**SMALL, discriminator=MLP((8,), spectral_norm=True)).build(seed=0), (), NOISY),
    ),
    # -log π has the sign of the advantage
    "reinforce": Case(PAIRS.model, PAIRS.fields, SAMPLED.extra_fields | {"advantages": COUNTED}),
}


TEACHER = decoder().build(seed=1).double().eval()
OBJECTIVES["distillation"] = TaughtObjective(Distillation(beta=0.3, weight=0.6), TEACHER)


def batch_of(case: Case) -> Batch:
    return Batch(**{name: FIELDS[name] for name in case.fields} | case.extra_fields)


def test_every_objective_has_a_case() -> None:
    assert CASES.keys() == OBJECTIVES.keys() and CASES.keys() >= kinds.OBJECTIVES.keys()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_and_metrics_are_sums(name: str) -> None:
    model, batch = CASES[name].model().double().train(), batch_of(CASES[name])
    loss, count, metrics = OBJECTIVES[name](model, batch)
    assert loss.shape == count.shape == () and count > 0 and loss > 0
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert 0 <= metrics.get("accuracy", 0) <= count
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", [name for name in CASES if getattr(OBJECTIVES[name], "scope", "token") == "token"])
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    objective = OBJECTIVES[name]
    model, batch = CASES[name].model().double().train(), batch_of(CASES[name])
    whole = objective(model, batch)
    parts = [objective(model, batch.rows(slice(start, start + 1))) for start in range(ROWS)]
    for index in (0, 1):
        total = sum(part[index] for part in parts)
        assert (total - whole[index]).abs() < 1e-9
    for metric, value in whole[2].items():
        assert (sum(part[2][metric] for part in parts) - value).abs() < 1e-9, metric


WEIGHTED = [name for name in CASES if {"weights", "targets"} <= set(CASES[name].fields)]


@pytest.mark.parametrize("name", WEIGHTED)
def test_targets_of_weight_zero_do_not_count(name: str) -> None:
    objective, model, batch = OBJECTIVES[name], CASES[name].model().double().eval(), batch_of(CASES[name])
    weights = batch.weights * (torch.arange(LENGTH) != 1)
    before = objective(model, Batch(**dict(batch) | {"weights": weights}))
    other = batch.targets.where(weights > 0, (batch.targets + 1) % VOCAB)
    after = objective(model, Batch(**dict(batch) | {"weights": weights, "targets": other}))
    assert before[1] == after[1] == weights.sum()
    assert (before[0] - after[0]).abs() < 1e-9
    changed = objective(model, Batch(**dict(batch) | {"weights": weights, "targets": (batch.targets + 1) % VOCAB}))
    assert (before[0] - changed[0]).abs() > 1e-3


@pytest.mark.parametrize("name", WEIGHTED)
def test_packed_documents_do_not_affect_each_other(name: str) -> None:
    """Changing the tokens of the first document does not change the loss of the second."""
    objective, model, batch = OBJECTIVES[name], CASES[name].model().double().eval(), batch_of(CASES[name])
    weights, first = batch.weights * (batch.segments == 1), batch.segments == 0
    other = batch.tokens.where(~first | (batch.tokens == 5), (batch.tokens - 6 + 1) % (VOCAB - 6) + 6)  # 5: an image
    before, after = (
        objective(model, Batch(**dict(batch) | {"weights": weights, "tokens": t})) for t in (batch.tokens, other)
    )
    assert (before[0] - after[0]).abs() < 1e-9
