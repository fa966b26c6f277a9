"""A tiny model that replies A or B, and a judge whose preference for the first place is known."""

import math
from collections.abc import Sequence

import pytest

from regard.language_model import LanguageModel
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.train import byte

CONTEXT = 1024


@pytest.fixture(scope="session")
def letters() -> LanguageModel:
    """Its random logits are raised for the two letters, which follow the generation prompt without a space."""
    tokenizer = byte()
    tokenizer.chat_template = DEFAULT_TEMPLATE.replace('"|> "', '"|>"')
    block = Block((Sublayer(Attention(2, position=Rope())),))
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((block,)),), context=CONTEXT, head_bias=True).build(3)
    model.state_dict()["head.bias"][tokenizer.encode("AB")] = 12.0
    return LanguageModel(model, tokenizer)


class BiasedJudge:
    """Prefers longer answers by one nat per character, and the answer shown first by `bias` nats."""

    def __init__(self, bias: float = 0.0):
        self.bias = bias
        self.questions: list[str] = []

    def ask(self, questions: Sequence[str]) -> list[float | None]:
        self.questions += questions
        found: list[float | None] = []
        for question in questions:
            first, second = question.partition("Answer A:\n")[2].split("\n\nAnswer B:\n")
            found.append(len(first) - len(second.partition("\n\n")[0]) + self.bias)
        return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
