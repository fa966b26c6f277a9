"""`regard.load` and its object: prompts to text, conversations to answers, texts to vectors."""

from pathlib import Path

import pytest
from torch import nn

import regard
from regard.engine.request import Sampling
from regard.language_model import LanguageModel
from regard.models.heads import Pooled
from regard.parts.input import Tokens
from tests.server.fake_engine import FakeEngine
from tests.text.test_detokenizer import byte_fallback_tokenizer
from tests.training.tiny import SETTINGS, SPEC, TOKENIZER, trainer

PROMPTS = ["Anna went to the barn", "Ben", "", "a b c d e f g"]


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    return LanguageModel(SPEC.build(seed=3), TOKENIZER, context=200, rows=2)


def test_generates_what_the_engine_generates(llm: LanguageModel) -> None:
    ids = llm.encode(PROMPTS[0])
    tokens = llm.engine.generate(ids, Sampling(max_new=12, temperature=0, stop_ids=TOKENIZER.stop_ids))
    text = TOKENIZER.decode([token.id for token in tokens])
    assert llm.generate(PROMPTS[0], max_new=12, temperature=0) == text


def test_several_prompts_give_what_each_gives_alone(llm: LanguageModel) -> None:
    prompts = [prompt for prompt in PROMPTS if prompt] * 2  # more than the engine's rows
    options = {"max_new": 9, "temperature": 0.9, "seed": 5}
    together = llm.generate(prompts, **options)
    assert together == [llm.generate(prompt, **options) for prompt in prompts]
    assert llm.engine.idle and llm.generate([], max_new=3) == []


def test_more_prompts_than_the_engine_can_hold() -> None:
    llm = LanguageModel(SPEC.build(seed=3), TOKENIZER, context=64, rows=2)
    llm.engine.queue = 1
    prompts = ["a", "b", "c", "d", "e", "f", "g"]
    assert llm.generate(prompts, max_new=2, temperature=0) == [
        llm.generate(prompt, max_new=2, temperature=0) for prompt in prompts
    ]


def test_a_prompt_that_fails_leaves_no_other_in_the_engine(llm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="shorten it"):
        llm.generate(["Ben", "long " * 100], max_new=5)
    assert llm.engine.idle


def test_a_stream_is_the_text_in_pieces(llm: LanguageModel) -> None:
    pieces = list(llm.stream("Ben", max_new=20, temperature=0))
    assert "".join(pieces) == llm.generate("Ben", max_new=20, temperature=0)
    assert all(pieces) and len(pieces) > 1


def test_a_stream_that_is_left_gives_its_row_back(llm: LanguageModel) -> None:
    stream = llm.stream("Ben", max_new=50, temperature=0)
    next(stream)
    stream.close()
    assert llm.engine.idle


def test_a_stop_string_ends_the_text_before_it(llm: LanguageModel) -> None:
    text = llm.generate("Ben", max_new=30, temperature=0)
    stop = text[4:6]
    assert llm.generate("Ben", max_new=30, temperature=0, stop=[stop]) == text[: text.index(stop)]


def test_a_chat_is_rendered_by_the_models_template(llm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "Where is Anna?"}]
    assert TOKENIZER.chat_template is not None
    answer = llm.chat(messages, max_new=8, temperature=0)
    assert answer == llm.chat("Where is Anna?", max_new=8, temperature=0)
    assert answer == "".join(llm.stream(messages, max_new=8, temperature=0))


def test_a_continuation_keeps_its_first_space_and_an_answer_does_not() -> None:
    words = byte_fallback_tokenizer()
    for continues, text in ((True, " a"), (False, "a")):
        llm = LanguageModel(nn.Identity(), words)
        llm.engine = FakeEngine(words, "a", repeat=True)
        deltas = llm.submit(words.encode("a a"), (), continues, {"max_new": 1})
        assert [delta for _, delta in deltas] == [text]


def encoder(head: regard.Pooled | None) -> LanguageModel:
    block = regard.Block((regard.Sublayer(regard.Attention(2, mask=regard.Full())),))
    spec = regard.Encoder(Tokens(TOKENIZER.vocab_size), 16, (regard.Repeat((block,)),), head=head, context=24)
    return LanguageModel(spec.build(seed=0).double(), TOKENIZER)


@pytest.mark.parametrize("kind", ["pooled", "no head", "decoder"])
def test_embeddings_are_unit_vectors_that_do_not_depend_on_the_batch(kind: str) -> None:
    if kind == "decoder":
        llm = LanguageModel(SPEC.build(seed=3).double(), TOKENIZER, context=24)
    else:
        llm = encoder(Pooled("mean") if kind == "pooled" else None)
    texts = [chr(97 + n % 26) * (1 + n % 40) for n in range(70)]  # some longer than the context
    vectors = llm.embed(texts)
    assert vectors.shape == (70, 16) and (vectors.norm(dim=-1) - 1).abs().max() < 1e-12
    for n in (0, 30, 39):
        assert (llm.embed(texts[n]) - vectors[n]).abs().max() < 1e-9


def test_a_model_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="of kind encoder and does not generate text"):
        encoder(None).generate("a")
    with pytest.raises(ValueError, match="this encoder ends in classification"):
        encoder(regard.Classification(3)).embed("a")
    with pytest.raises(ValueError, match="a text has no tokens"):
        encoder(None).embed([""])
    with pytest.raises(ValueError, match="no chat template"):
        LanguageModel(SPEC.build(seed=3), byte_fallback_tokenizer()).chat("abc")


def test_loads_a_run_and_a_folder(tmp_path: Path) -> None:
    trainer(tmp_path / "run", SETTINGS, tokenizer=TOKENIZER).train()
    run = regard.load(tmp_path / "run", device="cpu", context=64)
    regard.save(run.model, tmp_path / "folder", run.tokenizer)
    folder = regard.load(tmp_path / "folder", device="cpu", context=64)
    assert run.generate("Anna", max_new=8, temperature=0) == folder.generate("Anna", max_new=8, temperature=0)


def test_an_unknown_public_name_gets_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'Attention'"):
        regard.Atention  # noqa: B018


def test_a_mistyped_name_is_answered_with_the_nearest_and_all_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    expected = (
        "'smolm2' is neither a file or folder nor a known name; did you mean 'smollm2'? "
        "(models: minilm, runs/mine, smollm2)"
    )
    with pytest.raises(ValueError) as refused:
        regard.load("smolm2")
    assert str(refused.value) == expected
    with pytest.raises(ValueError, match=r"did you mean 'runs/mine'\?"):
        regard.load(Path("runs/mien"))
