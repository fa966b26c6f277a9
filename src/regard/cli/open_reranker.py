"""A cross-encoder that orders search results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from regard.find_model import find_model

RerankOption = Annotated[
    Path | None,
    typer.Option(help="A cross-encoder, which reads each of the best results with the question and orders them."),
]


def open_reranker(name: Path, device: str) -> Callable[[str, Sequence[str]], list[float]]:
    """The scores of texts for a query. ValueError if the model is not a cross-encoder."""
    find_model(name)  # before torch is imported: a mistyped name is refused at once
    from regard.load_model import load
    from regard.models.encoder import EncoderModule
    from regard.models.heads import Classification

    llm = load(name, device)
    head = llm.model.spec.head if isinstance(llm.model, EncoderModule) else None
    if not isinstance(head, Classification) or head.labels != 1:
        raise ValueError(
            f"--rerank {name}: this model gives no score for a pair of texts; train one: regard train reranker"
        )
    return lambda query, texts: [prediction.value for prediction in llm.classify([(query, text) for text in texts])]
