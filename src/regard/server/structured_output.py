"""Structured output: what a request asks for, and its compilation to a grammar in a thread.

OpenAI's `response_format` has JSON schemas; vLLM's `structured_outputs` also regular expressions, choices and
context-free grammars.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from regard.engine.grammar import Grammar, GrammarCompiler
from regard.server.errors import ApiError
from regard.server.schema import RequestBody, StructuredOutputs
from regard.server.tool_calls import OfferedTools
from regard.server.worker_thread import WorkerThread
from regard.text.tokenizer import Tokenizer
from regard.text.vocabulary import token_bytes

if TYPE_CHECKING:
    from regard.engine.engine import Engine


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """`strict` makes no difference: every schema is enforced."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, StringConstraints(max_length=1024)] | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    """As in chat."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatJsonSchemaFormat(NamedSchema):
    """As in responses."""

    type: Literal["json_schema"]


def outputs_of(format: RequestBody | None) -> StructuredOutputs | None:
    match format:
        case JsonObjectFormat():
            schema: dict[str, Any] = {"type": "object"}
        case JsonSchemaFormat():
            schema = format.json_schema.json_schema
        case FlatJsonSchemaFormat():
            schema = format.json_schema
        case _:
            return None
    return StructuredOutputs.model_validate({"json": schema})


class GrammarThread:
    """Compiles grammars. Building the compiler reads the whole vocabulary, so it happens with the first request."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.thread = WorkerThread("grammars")
        self.compiler: GrammarCompiler | None = None

    async def compile(self, outputs: StructuredOutputs | OfferedTools, engine: "Engine") -> Grammar:
        with self.thread.request():
            try:
                return await self.thread.run(self._compile, outputs, engine.model.spec.vocab)
            except ValueError as error:
                raise ApiError(400, str(error), code="invalid_grammar") from error
            except RecursionError as error:
                raise ApiError(400, "the schema is nested too deeply; simplify it", code="invalid_grammar") from error

    def _compile(self, outputs: StructuredOutputs | OfferedTools, vocab: int) -> Grammar:
        if self.compiler is None:
            self.compiler = GrammarCompiler(token_bytes(self.tokenizer), self.tokenizer.stop_ids, vocab)
        if isinstance(outputs, OfferedTools):
            return outputs.compile(self.compiler)
        if outputs.json_schema is not None:
            return self.compiler.json_schema(outputs.json_schema)
        if outputs.regex is not None:
            return self.compiler.regex(outputs.regex)
        if outputs.choice is not None:
            return self.compiler.choice(outputs.choice)
        assert outputs.grammar is not None, "exactly one field is set"
        return self.compiler.ebnf(outputs.grammar)
