"""POST /tokenize and /detokenize: text or messages to ids and back, in vLLM's format."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, model_validator

from regard.server.chat_schema import Messages, TemplateVariables
from regard.server.errors import ApiError
from regard.server.model_registry import ModelRegistry
from regard.server.response_bodies import ResponseBody
from regard.server.schema import MAX_PROMPT, Id, Name, RequestBody, Text


class TokenizeBody(RequestBody):
    """A prompt, or the messages of a chat."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # before a prompt; by default true
    add_generation_prompt: bool | None = None  # after messages; by default true
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def check_exactly_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages are both set or both missing; send exactly one of them")
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is for messages; omit it")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("the chat template adds the special tokens of messages; omit add_special_tokens")
        return self


class DetokenizeBody(RequestBody):
    model: Name | None = None
    tokens: Annotated[list[Id], Field(max_length=MAX_PROMPT, fail_fast=True)]


class Tokenized(ResponseBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(ResponseBody):
    prompt: str


def router(models: ModelRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Tokenized:
        served = models.find_for(body)
        if body.messages is not None:
            add_prompt, variables = body.add_generation_prompt is not False, body.chat_template_kwargs
            ids = await served.encode_chat(body.messages, add_prompt, variables=variables)
        else:
            ids = await served.encode(body.prompt or "", special_tokens=body.add_special_tokens is not False)
        texts = await served.token_texts(ids) if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=served.capacity, tokens=ids, token_strs=texts)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Detokenized:
        served = models.find_for(body)
        if (largest := max(body.tokens, default=0)) >= (vocab := served.tokenizer.vocab_size):
            message = f"id {largest} is outside the vocabulary of {vocab}; send ids of this model"
            raise ApiError(400, message, code="invalid_value", param="tokens")
        return Detokenized(prompt=await served.decode(body.tokens))

    return routes
