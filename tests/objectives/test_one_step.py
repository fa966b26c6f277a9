"""One optimizer step of each objective equals an independent implementation, in loss and updated weights.

The batches come from the loader. `theirs` is a tiny random model of `transformers` with the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import open_collection
from regard.families import family
from regard.kernels.attention.mask import PrefixLM
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.objectives.base import Objective
from regard.objectives.bert_pretraining import BertPretraining
from regard.objectives.denoising import Denoising
from regard.objectives.masked import MaskedTokens
from regard.objectives.next_token import NextToken
from regard.objectives.prefix_lm import PrefixLanguageModel
from regard.objectives.span_corruption import SpanCorruption
from regard.objectives.translation import Translation
from regard.parts.block import Block
from regard.text.train import character
from regard.training.step import take_step
from tests.families.cases.encoder_decoders import BART, T5
from tests.families.cases.encoders import BERT
from tests.families.pairs import Pair, make_pair

SENTENCES = [f"{a} {b} {c}." for a in ("the cat", "a dog", "one owl") for b in ("saw", "ate") for c in ("it", "us all")]
EXAMPLES = [
    {"text": " ".join(SENTENCES[n : n + 3]), "source": SENTENCES[n], "target": SENTENCES[n][::-1]} for n in range(10)
]
ROWS, LENGTH = 4, 30
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
LOSS = Callable[[Any, Batch], Tensor]


def labels_of(batch: Batch) -> Tensor:
    return batch.targets.where(batch.weights > 0, -100)


def additive_mask(batch: Batch, allowed: Tensor) -> Tensor:
    """0 where a query may attend to a key of its document (B, 1, L, L), else a large negative number."""
    same = batch.segments.unsqueeze(-1) == batch.segments.unsqueeze(-2)
    return torch.zeros(same.shape, dtype=torch.float64).masked_fill(~(same & allowed), -1e9).unsqueeze(1)


def inputs_of(batch: Batch, allowed: Tensor) -> dict[str, Tensor]:
    return {
        "input_ids": batch.tokens,
        "position_ids": batch.positions,
        "attention_mask": additive_mask(batch, allowed),
    }


QUERY, KEY = torch.arange(LENGTH).unsqueeze(-1), torch.arange(LENGTH)
ALL = torch.ones(LENGTH, LENGTH, dtype=torch.bool)


def their_logits(model: Any, batch: Batch) -> Tensor:
    return model(**inputs_of(batch, KEY <= QUERY)).logits


def causal_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(their_logits(model, batch).flatten(0, 1), labels_of(batch).flatten())


def causal_loss_with_z_loss(model: Any, batch: Batch) -> Tensor:
    logits, weights = their_logits(model, batch), batch.weights
    z_loss = (logits.exp().sum(-1).log().square() * weights).sum() / weights.sum()
    return causal_loss(model, batch) + 0.01 * z_loss


def masked_loss(model: Any, batch: Batch) -> Tensor:
    return model(**inputs_of(batch, ALL), labels=labels_of(batch)).loss


def roberta_loss(model: Any, batch: Batch) -> Tensor:
    """Rows are not packed, and positions start after the padding id."""
    return model(batch.tokens, attention_mask=(batch.segments >= 0).long(), labels=labels_of(batch)).loss


def prefix_loss(model: Any, batch: Batch) -> Tensor:
    in_prefix = (batch.positions < 3).unsqueeze(1)
    return model(**inputs_of(batch, (KEY <= QUERY) | in_prefix), labels=labels_of(batch)).loss


def pretraining_loss(model: Any, batch: Batch) -> Tensor:
    return model(
        batch.tokens,
        attention_mask=(batch.segments >= 0).long(),
        token_type_ids=batch.types,
        labels=labels_of(batch),
        next_sentence_label=batch.labels,
    ).loss


def sequence_loss(model: Any, batch: Batch) -> Tensor:
    inputs = {"attention_mask": batch.source_valid.long(), "decoder_input_ids": batch.tokens}
    return model(batch.source, **inputs, labels=labels_of(batch)).loss


def smoothed_loss(model: Any, batch: Batch) -> Tensor:
    inputs = {"attention_mask": batch.source_valid.long(), "decoder_input_ids": batch.tokens}
    logits = model(batch.source, **inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels_of(batch).flatten(), label_smoothing=0.1)


@dataclass(frozen=True)
class Case:
    objective: Objective
    theirs: str
    settings: dict[str, Any]
    loss: LOSS
    tolerance: float = 1e-10


IN_FLOAT32 = 1e-5  # T5 of transformers computes its norms and softmax in float32
CASES = {
    "next_token": Case(NextToken(), "GPT2LMHeadModel", GPT2, causal_loss),
    "z_loss": Case(NextToken(z_loss=0.01), "GPT2LMHeadModel", GPT2, causal_loss_with_z_loss),
    "masked_lm": Case(MaskedTokens(share=0.3), "BertForMaskedLM", BERT, masked_loss),
    "masked_lm, whole words": Case(
        MaskedTokens(whole_words=True, packed=False), "RobertaForMaskedLM", BERT | {"pad_token_id": 0}, roberta_loss
    ),
    "bert_pretraining": Case(BertPretraining(), "BertForPreTraining", BERT, pretraining_loss),
    "prefix_lm": Case(PrefixLanguageModel(3), "BertForMaskedLM", BERT, prefix_loss),
    "span_corruption": Case(SpanCorruption(sentinels=8), "T5ForConditionalGeneration", T5, sequence_loss, IN_FLOAT32),
    "denoising": Case(Denoising(), "BartForConditionalGeneration", BART, sequence_loss),
    "translation": Case(Translation(), "BartForConditionalGeneration", BART, smoothed_loss),
}
WITHOUT_DROPOUT = dict.fromkeys(
    (
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "dropout",
        "dropout_rate",
        "attention_dropout",
        "activation_dropout",
        "hidden_dropout_prob",
    ),
    0.0,
) | {"attention_probs_dropout_prob": 0.0}


def batch_of(objective: Objective) -> Batch:
    tokenizer = character([example["text"] for example in EXAMPLES], objective.special_tokens)
    objective.prepare_tokenizer(tokenizer)
    examples = open_collection("sentences", EXAMPLES, seed=0, hold_out=False).train
    return next(Loader(examples, objective, tokenizer, ROWS, LENGTH))


def pair_of(case: Case, folder: Path) -> Pair:
    """Both models in float64."""
    pair = make_pair((case.theirs, case.settings | WITHOUT_DROPOUT), folder)
    if isinstance(case.objective, PrefixLanguageModel):
        weights = pair.ours.state_dict()
        pair.ours = with_mask(pair.ours.spec, PrefixLM(case.objective.prefix)).build(0)
        pair.ours.load_state_dict(weights)
    pair.theirs.double().train(), pair.ours.double().train()
    return pair


def with_mask(spec: Encoder, mask: PrefixLM) -> Encoder:
    def masked(block: Block) -> Block:
        attention, feedforward = block.sublayers
        return replace(block, sublayers=(replace(attention, body=replace(attention.body, mask=mask)), feedforward))

    layers = [Repeat(tuple(masked(block) for block in run.blocks), run.times) for run in spec.layers]
    return replace(spec, layers=tuple(layers))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """With a large eps, because Adam scales rounding errors of gradients near 0 to the size of the learning rate."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_weights_after_one_step_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    pair, batch = pair_of(case, tmp_path / "pair"), batch_of(case.objective)
    assert batch.weights.sum() > 3
    loss = take_step(pair.ours, case.objective, batch, optimizer_of(pair.ours), micro_batches=2)["loss"]
    expected = case.loss(pair.theirs, batch)
    expected.backward()
    optimizer_of(pair.theirs).step()
    assert abs(loss - expected.item()) <= case.tolerance * max(1.0, expected.item())
    pair.theirs.save_pretrained(tmp_path / "updated")
    updated = load_file(tmp_path / "updated" / "model.safetensors")
    found = dict(family(pair.model_type).table(pair.ours.spec).write(dict(pair.ours.named_parameters())))
    before = load_file(tmp_path / "pair" / "model.safetensors")
    keys = found.keys() & updated.keys() - {"final_logits_bias"}  # a buffer in BART of transformers
    assert len(keys) >= len(updated) - 2
    for key in keys:
        assert (found[key] - updated[key]).abs().max() <= case.tolerance, key
    assert any((before[key] - updated[key]).abs().max() > 1e-3 for key in updated)
