"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

A route raises `ApiError`; everything that FastAPI or Starlette raises is put into the same body. A client's mistake is
400 with the offending field as `param`; an unforeseen fault is 500 with a fixed sentence; its trace goes to the log.
"""

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

LONGEST_MESSAGE = 400  # a message may quote the client's own field names
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
STANDARD = {
    404: "there is nothing at this path; GET /openapi.json lists the routes",
    405: "this path does not take that method; GET /openapi.json lists the routes",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that ends the request: status, sentence for the reader, code for the program."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> dict:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": clean(str(self)), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def clean(text: str) -> str:
    """Bounded, and free of the lone surrogates that JSON allows and UTF-8 does not."""
    text = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + " …"
    return text.encode("utf-8", "replace").decode()


def describe(error: RequestValidationError) -> ApiError:
    """One broken rule, named by its field; of a field with several types, the rule of the one that was meant."""
    first = min(error.errors(), key=lambda broken: broken["type"].endswith("_type"))
    path = ".".join(str(step) for step in first["loc"][1:] if is_field(step))
    if first["type"] == "extra_forbidden":
        path = str(first["loc"][-1])
        message = f"unknown or unsupported parameter {path!r}; remove it"
    elif first["type"] == "json_invalid":
        path, message = "", "the body is not valid JSON"
    elif first["type"] == "value_error":  # one of schema.py's own sentences
        message = str(first["ctx"]["error"])
    elif not path:
        message = "the body cannot be read; send a JSON object, with Content-Type: application/json"
    else:
        message = f"{path}: {first['msg']}"
    return ApiError(400, message, code="invalid_value", param=clean(path) or None)


def is_field(step: str | int) -> bool:
    """Pydantic's paths also name the types of a union: `prompt`, `list[constrained-str]`, 3."""
    return isinstance(step, int) or (step.isidentifier() and step != "str")


def install(app: FastAPI) -> None:
    """Answer every exception in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return describe(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = STANDARD.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed on this request; its log has the details", code="internal").response()
