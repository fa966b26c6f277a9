"""Next-token prediction after an image: captions, and questions about images. Liu et al. 2023 (LLaVA).

    <image> … <image>  text        loss = Σ_t w_t · -log p(token_{t+1} | image, tokens up to t)

The image comes first, one marker token per patch; the model replaces the embeddings of the markers by the patches.
Markers are not targets. The rest is a document of next_token: `text`, a `prompt` with its `completion`, or `messages`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, item_length, pack
from regard.data.sources.base import Example, Splits
from regard.models.base import Model
from regard.models.interleaved import Interleaved
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    layout_of,
    require_keys,
    require_model,
    token_loss,
)
from regard.objectives.inputs import check_first_example, encode_input, stack_images
from regard.objectives.next_token import slice_columns, tokenize_document
from regard.spec import SpecError, require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImageText(Objective):
    """Examples have an `image`, and a `text`, a `prompt` with its `completion`, or `messages`."""

    token: str = "<image>"  # the marker
    patches: int = 0  # markers per image; 0: as many as the model has

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.token,)

    def check(self) -> None:
        require(self.patches >= 0, f"{self.kind}: patches={self.patches} must not be negative")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Interleaved), "an interleaved model")
        assert isinstance(model, Interleaved)
        require(
            self.patches in (0, model.patches),
            f"objective {self.kind} has patches={self.patches}, and the model {model.patches} per image; leave it out",
        )

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.marker(tokenizer)

    def marker(self, tokenizer: Tokenizer) -> int:
        id = tokenizer.core.token_to_id(self.token)
        if id is None:
            raise SpecError(f"this tokenizer has no image token {self.token}; set objective.token to the one it has")
        return id

    def model_options(self, tokenizer: Tokenizer) -> Mapping[str, Any]:
        return {"marker": self.marker(tokenizer)}

    def fit(self, splits: Splits, model: Model) -> Self:
        assert isinstance(model, Interleaved), "checked in check_model"
        check_first_example(model.vision, splits.train)
        return replace(self, patches=model.patches)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "image")
        document = tokenize_document({key: value for key, value in example.items() if key != "image"}, tokenizer)
        ids, prefix = document["ids"], tokenizer.prefix_ids
        start = len(prefix) if tuple(ids[: len(prefix)]) == prefix else 0  # as in generation
        ids = np.insert(ids, start, [self.marker(tokenizer)] * self.patches)
        weights = np.insert(document.get("weights", np.ones(len(document["ids"]))), start, np.zeros(self.patches))
        return {"ids": ids, "weights": weights.astype(np.float32), **encode_input(example, tokenizer)}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        item = slice_columns(columns, 0, length)
        markers = int((item["tokens"] == self.marker(tokenizer)).sum())
        if markers < self.patches:
            raise ValueError(f"data.length={length} is too short for an image of {self.patches} tokens; raise it")
        return [{**item, "image": columns["image"]}] if item["weights"].any() else []

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        documents = [[{name: array for name, array in item.items() if name != "image"}] for item in items]
        tokens = pack(documents, max(map(item_length, items)), tokenizer.pad or 0)
        return Batch(**tokens, images=stack_images(items).unsqueeze(1))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return image_text(model, batch)


def image_text(model: nn.Module, batch: Batch) -> LossResult:
    """Needs the fields of next_token, and images (B, n, C, height, width): n per row, in the order of their markers.

    The markers that images replace are not targets: their weight is 0.
    """
    return token_loss(model(batch.tokens, layout_of(batch), images=batch.images.flatten(0, 1), outputs=True), batch)
