"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

Routes raise `ApiError`; exceptions of FastAPI and Starlette are converted to the same body. An invalid request is a 400
with the field as `param`. An unexpected exception is a 500 with a fixed message; its traceback goes to the log.
"""

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from regard.engine.async_engine import EngineStopped
from regard.server.request_id import HEADER, request_id
from regard.server.validation_message import field_path, message_of, most_specific

log = logging.getLogger(__name__)

MAX_MESSAGE = 400  # characters; a message may quote field names from the request, which can be of any length
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
STANDARD_MESSAGES = {
    404: "there is no route at this path; GET /openapi.json lists the routes",
    400: "the body cannot be read; send a JSON object that is not nested deeply, or for audio a valid form",
    405: "this route does not accept that method; GET /openapi.json lists the routes",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """The response to a failed request: its status, a message for people and a code for programs."""

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
        type = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": clean(str(self)), "type": type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def shutting_down(reason: str) -> ApiError:
    return ApiError(503, reason, code="shutting_down", headers={"retry-after": "5"})


def clean(text: str) -> str:
    """The text with a bounded length and without lone surrogates, which JSON allows and UTF-8 does not."""
    text = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " …"
    return text.encode("utf-8", "replace").decode()


def validation_error(error: RequestValidationError) -> ApiError:
    """The most specific violation, with its field."""
    first = most_specific(violations := error.errors())
    path = field_path(first)
    if first["type"] == "unknown_field":
        name, place = first["ctx"]["field"], f" of {path}" if path else ""
        path = f"{path}.{name}" if path else name
        message = f"unknown or unsupported parameter {name!r}{place}; {first['ctx']['remedy']}"
    elif first["type"] == "none_required":
        path = str(first["loc"][-1])
        message = f"the parameter {path!r} is not supported; omit it"
    elif first["type"] == "json_invalid":
        path, message = "", "the body is not valid JSON; send a JSON object"
    elif first["type"] == "value_error":  # raised by a validator of schema.py
        message = str(first["ctx"]["error"])
    elif not path:
        message = "the body cannot be read; send a JSON object, with Content-Type: application/json"
    else:
        message = message_of(first, violations)
    return ApiError(400, message, code="invalid_value", param=clean(path) or None)


def install_handlers(app: FastAPI) -> None:
    """Convert every exception to OpenAI's format."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        if error.status == 500:  # 503 is no failure of the request, and probes and clients repeat it
            log.error("%s: %s", request_id(request), error)
        return error.response()

    @app.exception_handler(EngineStopped)
    async def stopped(request: Request, error: EngineStopped) -> JSONResponse:
        return shutting_down(str(error)).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = STANDARD_MESSAGES.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        id = request_id(request)
        log.error("%s: %s", id, error)
        message = f"the server failed on this request ({id}); its log has the details"
        # This response passes no middleware, which have been left by the exception.
        return ApiError(500, message, code="internal", headers={HEADER: id}).response()
