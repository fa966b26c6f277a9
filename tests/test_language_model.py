"""`regard.load` and its object: text for prompts, replies for conversations, embeddings for strings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard.engine.request import Sampling
from regard.language_model import LanguageModel
from regard.models.heads import Pooled
from regard.parts.input import Tokens
from regard.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.test_tools import HERMES
from tests.text.test_detokenizer import byte_fallback_tokenizer
from tests.training.tiny import SETTINGS, SPEC, TOKENIZER, trainer

PROMPTS = ["Anna went to the barn", "Ben", "", "a b c d e f g"]


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    return LanguageModel(SPEC.build(seed=3), TOKENIZER, context=200, rows=2)


def test_generated_text_equals_the_decoded_tokens_of_the_engine(llm: LanguageModel) -> None:
    ids = llm.encode(PROMPTS[0])
    tokens = llm.engine.generate(ids, Sampling(max_new=12, temperature=0, stop_ids=TOKENIZER.stop_ids))
    text = TOKENIZER.decode([token.id for token in tokens])
    assert llm.generate(PROMPTS[0], max_new=12, temperature=0) == text


def test_a_batch_of_prompts_equals_each_prompt_alone(llm: LanguageModel) -> None:
    prompts = [prompt for prompt in PROMPTS if prompt] * 2  # more than the engine's rows
    options = {"max_new": 9, "temperature": 0.9, "seed": 5}
    batched = llm.generate(prompts, **options)
    assert batched == [llm.generate(prompt, **options) for prompt in prompts]
    assert llm.engine.idle and llm.generate([], max_new=3) == []


def test_more_prompts_than_the_queue_holds_are_generated() -> None:
    llm = LanguageModel(SPEC.build(seed=3), TOKENIZER, context=64, rows=2)
    llm.engine.queue = 1
    prompts = ["a", "b", "c", "d", "e", "f", "g"]
    assert llm.generate(prompts, max_new=2, temperature=0) == [
        llm.generate(prompt, max_new=2, temperature=0) for prompt in prompts
    ]


def test_a_refused_prompt_leaves_no_request_in_the_engine(llm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="shorten it"):
        llm.generate(["Ben", "long " * 100], max_new=5)
    assert llm.engine.idle


def test_streamed_chunks_join_to_the_generated_text(llm: LanguageModel) -> None:
    chunks = list(llm.stream("Ben", max_new=20, temperature=0))
    assert "".join(chunks) == llm.generate("Ben", max_new=20, temperature=0)
    assert all(chunks) and len(chunks) > 1


def test_closing_a_stream_frees_its_row(llm: LanguageModel) -> None:
    stream = llm.stream("Ben", max_new=50, temperature=0)
    next(stream)
    stream.close()
    assert llm.engine.idle


def test_a_stop_string_ends_the_text_before_it(llm: LanguageModel) -> None:
    text = llm.generate("Ben", max_new=30, temperature=0)
    stop = text[4:6]
    assert llm.generate("Ben", max_new=30, temperature=0, stop=[stop]) == text[: text.index(stop)]


def test_chat_and_stream_render_messages_with_the_template(llm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "Where is Anna?"}]
    assert TOKENIZER.chat_template is not None
    reply = llm.chat(messages, max_new=8, temperature=0)
    assert reply == llm.chat("Where is Anna?", max_new=8, temperature=0)
    assert reply == "".join(llm.stream(messages, max_new=8, temperature=0))


def test_a_continuation_keeps_its_first_space_and_a_reply_does_not() -> None:
    tokenizer = byte_fallback_tokenizer()
    for continues, text in ((True, " a"), (False, "a")):
        llm = LanguageModel(nn.Identity(), tokenizer)
        llm.engine = FakeEngine(tokenizer, "a", repeat=True)
        deltas = llm.submit(tokenizer.encode("a a"), (), continues, {"max_new": 1})
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


def test_unsupported_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="of kind encoder and does not generate text"):
        encoder(None).generate("a")
    with pytest.raises(ValueError, match="the head of this encoder is classification"):
        encoder(regard.Classification(3)).embed("a")
    with pytest.raises(ValueError, match="a text has no tokens"):
        encoder(None).embed([""])
    with pytest.raises(ValueError, match="no chat template"):
        LanguageModel(SPEC.build(seed=3), byte_fallback_tokenizer()).chat("abc")


def test_a_dtype_is_given_by_torch_or_by_its_name(tmp_path: Path) -> None:
    regard.save(LanguageModel(SPEC.build(seed=3), TOKENIZER), tmp_path / "folder")
    for dtype, expected in (
        ("bfloat16", torch.bfloat16),
        ("float64", torch.float64),
        ("auto", torch.float32),
        (None, torch.float32),
        (torch.float16, torch.float16),
    ):
        loaded = regard.load(tmp_path / "folder", device="cpu", dtype=dtype)
        assert {weight.dtype for weight in loaded.model.parameters()} == {expected}
    for wrong in ("bf16", "torch.bfloat16", "long", float):
        with pytest.raises(ValueError, match="is unknown; choose one of auto, float32, bfloat16, float16"):
            regard.load(tmp_path / "nosuch", dtype=wrong)


def test_a_context_that_the_model_does_not_support_is_refused_at_load(tmp_path: Path) -> None:
    model = replace(SPEC, context=96).build(seed=3)
    regard.save(model, tmp_path / "folder", TOKENIZER)
    for context, message in ((97, "context=97 exceeds the model's context of 96 tokens"), (0, "context=0 must be pos")):
        with pytest.raises(ValueError, match=message):
            regard.load(tmp_path / "folder", device="cpu", context=context)
    assert regard.load(tmp_path / "folder", device="cpu", context=96).generate("a", max_new=2)
    with pytest.raises(ValueError, match="exceeds the model's context of 24 tokens"):
        LanguageModel(encoder(None).model, TOKENIZER, context=25)


def test_its_repr_shows_folder_kind_size_dtype_device_and_context(tmp_path: Path) -> None:
    model = replace(SPEC, context=96).build(seed=3)
    shown = f"decoder, parameters={sum(p.numel() for p in model.parameters()):,}, float32 on cpu, context="
    assert repr(LanguageModel(model, TOKENIZER)) == f"LanguageModel({shown}96)"
    regard.save(model, tmp_path / "folder", TOKENIZER)
    loaded = regard.load(tmp_path / "folder", device="cpu", context=64)
    assert repr(loaded) == f"LanguageModel('{tmp_path / 'folder'}', {shown}64)"


def test_a_run_and_its_saved_folder_generate_the_same_text(tmp_path: Path) -> None:
    trainer(tmp_path / "run", SETTINGS, tokenizer=TOKENIZER).train()
    run = regard.load(tmp_path / "run", device="cpu", context=64)
    regard.save(run.model, tmp_path / "folder", run.tokenizer)
    folder = regard.load(tmp_path / "folder", device="cpu", context=64)
    assert run.generate("Anna", max_new=8, temperature=0) == folder.generate("Anna", max_new=8, temperature=0)


def test_a_saved_language_model_is_loaded_with_its_tokenizer_and_generation_settings(tmp_path: Path) -> None:
    settings = {"generation_config.json": b'{"eos_token_id": 1}'}
    llm = LanguageModel(SPEC.build(seed=3), TOKENIZER, extra_files=settings, source_family="llama")
    expected = llm.generate("Ben", max_new=9, temperature=0)  # saved after the engine was used
    regard.save(llm, tmp_path / "saved")
    loaded = regard.load(tmp_path / "saved", device="cpu")
    assert loaded.generate("Ben", max_new=9, temperature=0) == expected
    assert loaded.extra_files == settings and loaded.source_family == "llama"
    regard.save(llm, tmp_path / "other", extra_files={})
    assert not (tmp_path / "other" / "generation_config.json").exists()


def test_an_exported_language_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    attention = regard.Attention(4, kv_heads=2, position=regard.Rope())
    block = regard.Block((regard.Sublayer(attention), regard.Sublayer(regard.SwiGLU(48))))
    spec = regard.Decoder(TOKENIZER.vocab_size, 32, (regard.Repeat((block,), 2),), context=64)
    llm = LanguageModel(spec.build(seed=0), TOKENIZER)
    regard.export(llm, tmp_path / "exported", "llama")
    loaded = regard.load(tmp_path / "exported", device="cpu")
    assert loaded.source_family == "llama"
    assert loaded.generate("Ben", max_new=9, temperature=0) == llm.generate("Ben", max_new=9, temperature=0)


def test_only_models_can_be_saved_and_only_modules_adapted(llm: LanguageModel, tmp_path: Path) -> None:
    for write in (lambda: regard.save(SPEC, tmp_path), lambda: regard.export(SPEC, tmp_path / "e", "llama")):
        with pytest.raises(TypeError, match="or a LanguageModel"):
            write()
    lora = regard.LoRA(2, 4.0, ("q_proj",))
    uses = [
        lambda: regard.add_lora(llm, lora),
        lambda: regard.merge_lora(llm),
        lambda: regard.unmerge_lora(llm, {}),
        lambda: regard.set_adapter(llm, None),
        lambda: regard.adapter_names(llm),
        lambda: regard.save_adapter(llm, tmp_path / "adapter"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"found LanguageModel; .* llm\.model"):
            use()
    model = SPEC.build(seed=0)
    regard.add_lora(model, regard.LoRA(2, 4.0, "all-linear"))
    regard.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"llm\.model"):
        regard.load_adapter(llm, tmp_path / "adapter")


def test_an_unknown_sampling_option_is_refused_with_the_nearest_one(llm: LanguageModel) -> None:
    for use in (llm.generate, llm.chat, llm.stream_tokens):
        with pytest.raises(TypeError, match="no sampling option 'max_tokens'; did you mean 'max_new'"):
            use("a", max_tokens=4)
    assert llm.engine.idle


def test_an_unknown_public_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'Attention'"):
        regard.Atention  # noqa: B018


def test_a_mistyped_model_is_refused_with_the_nearest_and_all_known_names(
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


def test_chat_offers_tools_and_returns_a_message_with_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    with pytest.raises(ValueError, match="no tools"):
        LanguageModel(SPEC.build(seed=3), TOKENIZER, context=200).chat("Where?", tools=[tool])
    tokenizer = Tokenizer(TOKENIZER.core, eos="<|end|>", chat_template=HERMES)
    llm = LanguageModel(SPEC.build(seed=3), tokenizer, context=400, rows=2)
    submitted = []

    def reply(prompts: list) -> list[str]:
        submitted.extend(tokenizer.decode(prompt.ids, special=True) for prompt in prompts)
        return ['I look. <tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>'] * len(prompts)

    monkeypatch.setattr(llm.texts, "generate", reply)
    messages = [{"role": "user", "content": "Where?"}]
    message = llm.chat(messages, tools=[tool])
    assert message["content"] == "I look." and json.dumps(tool) in submitted[0]
    assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": {"a": 1}}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "There."}
    assert len(llm.chat([[*messages, message, result]] * 2, tools=[tool])) == 2
    assert '<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call><|user|>There.' in submitted[-1]
    assert llm.chat("Where?").startswith("I look. <tool_call>")  # without tools, all is text


def test_chat_gives_variables_to_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(TOKENIZER.core, eos="<|end|>", chat_template="{{ messages[0].content }}{{ style }}")
    llm = LanguageModel(SPEC.build(seed=3), tokenizer, context=400, rows=2)
    monkeypatch.setattr(llm.texts, "generate", lambda prompts: [tokenizer.decode(each.ids) for each in prompts])
    assert llm.chat("Where?") == "Where?"
    assert llm.chat(["Where?", "Who?"], chat_template_kwargs={"style": " brief"}) == ["Where? brief", "Who? brief"]
    for name, message in (("styl", "has no variable 'styl'; it has style"), ("messages", "is set already")):
        with pytest.raises(ValueError, match=f"chat_template_kwargs: the .*{message}"):
            llm.chat("Where?", chat_template_kwargs={name: 1})


def test_stop_ids_and_prompts_that_are_no_text_are_refused_with_a_remedy(llm: LanguageModel) -> None:
    with pytest.raises(TypeError, match="stop_sequences"):
        llm.generate("a", stop_ids=[1])
    for prompt in (5, [1, 2]):
        with pytest.raises(ValueError, match="give a string, or a list of strings"):
            llm.generate(prompt)
