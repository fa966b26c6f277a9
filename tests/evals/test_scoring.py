"""Which tokens are scored, given which others; and their likelihoods, against one forward per row in float64."""

import pytest
import torch

from regard.evals.local_model import LocalModel
from regard.evals.scoring import ScoredRow, answer_row, continuation_row, text_rows
from regard.language_model import LanguageModel
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.input import Tokens
from tests.evals.tiny_decoder import TEXT, tiny_decoder


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(tiny_decoder(), rows=3)


@torch.no_grad()
def reference(model: LocalModel, row: ScoredRow) -> tuple[float, bool]:
    logprobs = model.llm.model(torch.tensor([row.ids[:-1]])).log_softmax(-1)[0]
    targets = list(row.ids[row.start :])
    rows = logprobs[row.start - 1 :]
    return float(rows[range(len(targets)), targets].sum()), rows.argmax(-1).tolist() == targets


def test_context_and_continuation_are_encoded_together(model: LocalModel) -> None:
    encode = model.encode
    assert len(encode("unable")) < len(encode("un")) + len(encode("able")), "the test needs a word that is one token"
    row = continuation_row(model, "They are un", "able")
    assert list(row.ids) == encode("They are unable") and row.start == len(encode("They are"))
    row = continuation_row(model, "They are", " unable")
    assert list(row.ids) == encode("They are unable") and row.start == len(encode("They are"))


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation(model: LocalModel) -> None:
    assert continuation_row(model, "They are ", "unable") == continuation_row(model, "They are", " unable")


def test_a_text_without_context_starts_after_the_token_that_ends_texts(model: LocalModel) -> None:
    eos = model.llm.tokenizer.eos
    assert continuation_row(model, "", "unable") == ScoredRow((eos, *model.encode("unable")), 1)
    with_prefix = LocalModel(tiny_decoder())
    with_prefix.llm.tokenizer.prefix_ids = (eos, 7)
    assert continuation_row(with_prefix, "", "unable") == ScoredRow((eos, 7, *model.encode("unable")), 2)
    assert text_rows(with_prefix, "unable") == [ScoredRow((eos, 7, *model.encode("unable")), 2)]


def test_a_tokenizer_without_bos_and_eos_cannot_start_a_text() -> None:
    model = LocalModel(tiny_decoder())
    model.start_id = None
    with pytest.raises(ValueError, match="no token that begins or ends texts"):
        text_rows(model, "unable")
    assert continuation_row(model, "They are", " unable").start > 0


def test_a_long_context_is_truncated_from_the_left() -> None:
    model = LocalModel(tiny_decoder(), window=8)
    ids = model.encode(TEXT + " unable")
    row = continuation_row(model, TEXT, " unable")
    assert list(row.ids) == ids[-9:] and row.truncated and row.start == 9 - (len(ids) - len(model.encode(TEXT)))
    with pytest.raises(ValueError, match="more than the 8 that the model reads"):
        continuation_row(model, "They", TEXT)
    with pytest.raises(ValueError, match="adds no token"):
        continuation_row(model, "They", "")


@pytest.mark.parametrize("window", [1, 2, 5, 8, 63])
def test_the_windows_of_a_text_score_every_token_once(window: int) -> None:
    model = LocalModel(tiny_decoder(), window=window)
    rows, ids = text_rows(model, TEXT), model.encode(TEXT)
    assert [id for row in rows for id in row.ids[row.start :]] == ids
    assert all(len(row.ids) <= window + 1 for row in rows)
    assert len(rows[-1].ids) == min(window, len(ids)) + 1  # the last window has a full context
    assert all(row.start == 1 for row in rows[:-1])


def test_batches_and_choices_of_one_token_have_the_likelihoods_of_single_rows(model: LocalModel) -> None:
    contexts = [TEXT[:end] for end in (3, 9, 20, 41, 5, 60)]
    rows = [continuation_row(model, context, word) for context in contexts for word in (" a", " red box", ".", " the")]
    done: list[int] = []
    found = model.score(rows, done.append)
    assert sum(done) == len(rows)
    for row, likelihood in zip(rows, found, strict=True):
        logprob, greedy = reference(model, row)
        assert likelihood.logprob == pytest.approx(logprob, abs=1e-10) and likelihood.greedy == greedy
        assert likelihood.tokens == len(row.ids) - row.start
        assert model.score([row])[0].logprob == pytest.approx(likelihood.logprob, abs=1e-10)


def test_a_greedy_continuation_is_recognized(model: LocalModel) -> None:
    ids = model.encode("They are")
    best = int(model.llm.model(torch.tensor([ids]))[0, -1].argmax())
    assert model.score([ScoredRow((*ids, best), len(ids))])[0].greedy


def test_an_answer_of_a_chat_ends_before_the_tokens_of_the_template(model: LocalModel) -> None:
    messages = [{"role": "user", "content": "Where is <|end|> the lamp?"}]
    row = answer_row(model, messages, "the red box")
    prompt = model.encode_chat(messages)
    assert list(row.ids) == [*prompt, *model.encode(" the red box")] and row.start == len(prompt)


def test_other_models_are_refused_by_their_kind() -> None:
    llm = tiny_decoder()
    block = Block((Sublayer(Attention(2)),))
    encoder = Encoder(Tokens(llm.tokenizer.vocab_size), 16, (Repeat((block,), 1),)).build(seed=0)
    with pytest.raises(ValueError, match="runs/bert is of kind encoder, and likelihoods of texts need a decoder"):
        LocalModel(LanguageModel(encoder, llm.tokenizer), name="runs/bert")
    with pytest.raises(ValueError, match="window=65 is not between 1 and the 64 tokens"):
        LocalModel(llm, window=65)
