"""The bodies of /regard/lens and /regard/patch."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from regard.server.attention_schema import Index
from regard.server.schema import Id, Ids, Name, RequestBody, Text

MAX_POSITIONS = 128  # whose predictions are computed in one request
MAX_TOP = 20

AnswerText = Annotated[str, StringConstraints(max_length=256)]


class LensBody(RequestBody):
    """A sequence to read: ids, or a text, which `chat` makes the message of a user in the model's chat template.

    For an encoder-decoder it is the source; with a `target`, the output so far as text or ids, its decoder is read
    instead of its encoder. The logit lens reads the positions from `start` to before `stop`, by default the last 32;
    with logits=false it is left out.
    """

    model: Name | None = None
    text: Text | None = None
    ids: Ids | None = None
    chat: bool = False
    target: Text | Annotated[list[Id], Field(fail_fast=True, max_length=1 << 20)] | None = None
    start: Index | None = None
    stop: Index | None = None
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5
    logits: bool = True

    @model_validator(mode="after")
    def check_combinations(self) -> "LensBody":
        if (self.text is None) == (self.ids is None):
            raise ValueError("text and ids are both set or both missing; send exactly one of them")
        if self.chat and self.text is None:
            raise ValueError("chat=true formats a text; send text, or omit chat")
        if self.start is not None and self.stop is not None and not 0 < self.stop - self.start <= MAX_POSITIONS:
            raise ValueError(
                f"start={self.start} and stop={self.stop} must be 1 to {MAX_POSITIONS} positions apart; choose others"
            )
        return self


class PatchBody(RequestBody):
    """Two prompts with as many tokens. `answer` and `wrong` are tokens, by default those that the model predicts after
    the clean and after the corrupted prompt.

    Without `layer` and `position` the effects of all cells are streamed, one layer of the residual stream at a time.
    With both, the next tokens of the corrupted prompt with this cell from the clean one are returned; layer 0 is the
    input of the stack, layer i the output of block i - 1.
    """

    model: Name | None = None
    clean: Text
    corrupted: Text
    chat: bool = False
    answer: AnswerText | None = None
    wrong: AnswerText | None = None
    layer: Index | None = None
    position: Index | None = None
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5

    @model_validator(mode="after")
    def check_combinations(self) -> "PatchBody":
        if (self.layer is None) != (self.position is None):
            raise ValueError("layer and position go together; send both for one cell, or neither for all of them")
        if (self.answer is None) != (self.wrong is None):
            raise ValueError("answer and wrong go together; send both, or neither for the model's predictions")
        return self
