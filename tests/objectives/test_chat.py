"""Conversations: only what the assistant writes counts, for any chat template that extends a conversation."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from regard.objectives.chat import tokenize_chat
from regard.objectives.next_token import NextToken
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is Anna?"},
    {"role": "assistant", "content": "In the barn."},
    {"role": "user", "content": "And <|end|> Ben?"},
    {"role": "assistant", "content": "He left."},
]
PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_END = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}" + PROMPT
LAST_ANSWER_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
    "{{ m.role ~ ': ' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}" + PROMPT
)
ROLES = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>")


def tokenizer(template: str, specials: tuple[str, ...] = ("<|end|>",)) -> Tokenizer:
    vocab = {char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(list(specials))
    return Tokenizer(core, eos=specials[-1], chat_template=template)


TOKENIZERS = {
    "default": (byte(), [" In the barn.<|end|>", " He left.<|end|>"]),
    "chatml": (tokenizer(CHATML, ("<|im_start|>", "<|im_end|>")), ["In the barn.<|im_end|>\n", "He left.<|im_end|>\n"]),
}


TOOL_TOKENIZER = tokenizer(
    "{% for tool in tools or [] %}{{ '[' ~ tool.function.name ~ ']' }}{% endfor %}"
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name ~ ' ' ~ (call.function.arguments.values() | join(' ')) }}{% endfor %}{{ '<|end|>' }}"
    "{% endfor %}" + PROMPT
)


@pytest.mark.ledger("ft.sft")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_exactly_the_answers_and_their_end_tokens_count(name: str) -> None:
    tokenizer, expected = TOKENIZERS[name]
    columns = tokenize_chat(DIALOGUE, tokenizer)
    assert tokenizer.decode(columns["ids"].tolist(), special=True).count("Be brief.") == 1
    starts = np.flatnonzero(np.diff(columns["weights"], prepend=0) == 1)
    ends = np.flatnonzero(np.diff(columns["weights"], append=0) == -1) + 1
    answers = [tokenizer.decode(columns["ids"][a:b].tolist(), special=True) for a, b in zip(starts, ends, strict=True)]
    assert answers == expected


def test_calls_of_tools_count_and_their_results_do_not() -> None:
    """Arguments may be objects or their JSON; the template gets objects. Tools are given to the template."""
    tools = [{"type": "function", "function": {"name": "where", "parameters": {}}}]
    question = {"role": "user", "content": "Where is Anna?"}
    results = [{"role": "tool", "content": "barn"}, {"role": "assistant", "content": "In the barn."}]
    columns = []
    for arguments, given in (({"who": "Anna"}, tools), ('{"who": "Anna"}', json.dumps(tools))):
        calls = [{"function": {"name": "where", "arguments": arguments}}]
        call = {"role": "assistant", "content": None, "tool_calls": calls}
        example = {"messages": [question, call, *results], "tools": given}
        columns.append(NextToken().tokenize(example, TOOL_TOKENIZER))
        split = {"prompt": [question], "completion": [call, *results], "tools": given}
        columns.append(NextToken().tokenize(split, TOOL_TOKENIZER))
    for found in columns:
        assert all((found[name] == columns[0][name]).all() for name in ("ids", "weights"))
    ids, weights = columns[0]["ids"], columns[0]["weights"] > 0
    assert TOOL_TOKENIZER.decode(ids[weights].tolist(), special=True) == "where Anna<|end|>In the barn.<|end|>"
    assert TOOL_TOKENIZER.decode(ids.tolist(), special=True).startswith("[where]user: Where is Anna?")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"tools": "where"}, "must be a list of functions"),
        ({"tools": [1]}, "must be a list of functions"),
        ({"calls": [{"name": "where"}]}, "needs a `function` with `name`"),
        ({"calls": [{"function": {"name": "where", "arguments": "{"}}]}, "needs a `function` with `name`"),
        ({"calls": 1}, "needs a `function` with `name`"),
        ({"calls": []}, "needs `role`"),
    ],
)
def test_wrong_tools_and_calls_are_refused(example: dict, message: str) -> None:
    calls = example.get("calls", [{"function": {"name": "where"}}])
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    with pytest.raises(ValueError, match=message):
        NextToken().tokenize({"messages": messages, "tools": example.get("tools")}, TOOL_TOKENIZER)


@pytest.mark.ledger("ft.sft")
def test_a_prompt_does_not_count_and_its_completion_ends_with_eos() -> None:
    tokenizer = byte()
    example = {"prompt": "Where is Anna? ", "completion": "In the barn."}
    columns = NextToken().tokenize(example, tokenizer)
    counted = columns["ids"][columns["weights"] == 1].tolist()
    assert counted == [*tokenizer.encode("In the barn."), tokenizer.eos]
    assert "weights" not in NextToken(train_on="all").tokenize(example, tokenizer)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (DEFAULT_TEMPLATE, DIALOGUE[:2], "no token to train on"),
        (WITHOUT_END, DIALOGUE, "does not end the assistant's messages with a stop token"),
        (LAST_ANSWER_ONLY, DIALOGUE, "writes message 2 differently"),
        (DEFAULT_TEMPLATE, [], "at least one message"),
        (DEFAULT_TEMPLATE, "hello", "must be a list"),
        (DEFAULT_TEMPLATE, [{"role": "user"}], "needs `role`"),
        (DEFAULT_TEMPLATE, [{"role": "user", "content": 3}], "needs `role`"),
        (DEFAULT_TEMPLATE, [{"role": "wizard", "content": "x"}], "role wizard is unknown"),
        (None, DIALOGUE, "no chat template"),
    ],
)
def test_conversations_without_a_trainable_answer_are_refused(template, messages, message) -> None:
    with pytest.raises(ValueError, match=message):
        NextToken().tokenize({"messages": messages}, tokenizer(template, ROLES))


def test_an_example_without_text_names_its_keys() -> None:
    with pytest.raises(ValueError, match="needs `text`, `messages`, or `prompt` and `completion`; this one has words"):
        NextToken().tokenize({"words": "x"}, byte())
    with pytest.raises(ValueError, match="`text` of an example must be a string, found 5"):
        NextToken().tokenize({"text": 5}, byte())
