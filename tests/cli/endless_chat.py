"""`regard chat` with an engine whose answers never end, for tests in a pseudo-terminal."""

from torch import nn

from regard.__main__ import main
from regard.cli import open_model
from regard.language_model import LanguageModel
from tests.server.fake_engine import FakeEngine
from tests.training.tiny import TOKENIZER


def endless_model(*_: object, **__: object) -> LanguageModel:
    llm = LanguageModel(nn.Identity(), TOKENIZER)
    llm.engine = FakeEngine(TOKENIZER, "again and ", repeat=True)
    llm.engine.step_seconds = 0.005
    return llm


if __name__ == "__main__":
    import sys

    open_model.open_model = endless_model
    sys.argv = ["regard", "chat", "endless", "--max-new", "1000000"]
    main()
