"""An encoder of texts for the server: embeddings, or the relevance of documents by a cross-encoder."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.open_model import model_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regard.cli.open_engine import EngineChoice, EngineOptions
    from regard.language_model import LanguageModel
    from regard.server.served_model import TextEncoder


def open_text_encoder(
    name: Path, device: str, context: int | None, adapter: Path | None, dtype: str
) -> "tuple[LanguageModel, TextEncoder] | None":
    """The model and its functions; None if it is not an encoder. ValueError if its head has neither of them."""
    from regard.load_model import load
    from regard.models.encoder import Encoder
    from regard.models.heads import Classification, Pooled, Pooler
    from regard.parts.input import Tokens
    from regard.server.served_model import TextEncoder
    from regard.training.base_model import read_spec

    folder = model_folder(name)
    spec = read_spec(folder)
    if not isinstance(spec, Encoder):
        return None
    scores = isinstance(spec.head, Classification) and spec.head.labels == 1
    embeds = spec.head is None or isinstance(spec.head, Pooled | Pooler)
    if not isinstance(spec.input, Tokens) or not (scores or embeds):
        raise ValueError(
            f"{name} is an encoder that gives neither embeddings of texts nor one score for a pair of texts, so it "
            "cannot be served; use `regard predict`"
        )
    llm = load(name, device, dtype, context, adapter=adapter)
    limit = context or spec.context or spec.position.max_positions

    def score(pairs: "Sequence[tuple[str, str]]") -> list[float]:
        """The probability of relevance, as cross-encoders are trained: the sigmoid of their one output."""
        return [1 / (1 + math.exp(-prediction.value)) for prediction in llm.classify(list(pairs))]

    return llm, TextEncoder(score=score, context=limit) if scores else TextEncoder(llm.embed, context=limit)


def encoder_choices(
    llm: "LanguageModel", encoder: "TextEncoder", options: "EngineOptions", several: bool
) -> "list[EngineChoice]":
    """several: --context is for models that generate text, beside which this one is served."""
    from regard.cli.open_engine import EngineChoice, device_choice, dtype_choice

    weight = next(llm.model.parameters())
    length = "any number of" if encoder.context is None else str(encoder.context)
    reason = "the model's" if several or options.context is None else "--context"
    if several and options.context is not None:
        reason += "; --context is for models that generate text"
    return [
        device_choice(weight.device, options),
        dtype_choice(weight.dtype, options),
        EngineChoice("context", f"{length} tokens", reason),
    ]
