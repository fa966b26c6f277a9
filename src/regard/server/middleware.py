"""ASGI middleware around all routes, outermost first (before these: request_id.py and tracing.py):

- `ResponseCounter`  counts responses per route and status, for the metrics;
- `AccessLog`        logs one line per request, if it is asked for;
- `SecurityHeaders`  the page may load from and connect to this server only, and no other page may frame it;
- `HostCheck`        against DNS rebinding (a foreign name that resolves to 127.0.0.1) and cross-site posts;
- `CORSMiddleware`   Starlette's, only if pages of other origins are allowed;
- `KeyCheck`         compares the bearer token in constant time, on every path that is not public;
- `BodyLimit`        rejects a body that is too long, JSON with too many arrays and objects, a form with too many parts,
                     and a URL-encoded one, before it is parsed.
"""

import hmac
import logging
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.server.errors import ApiError
from regard.server.request_id import on_start

access_log = logging.getLogger("regard.access")

PUBLIC_PATHS = ("/", "/health", "/ready")
PUBLIC_FOLDER = "/web/"
MAX_LOGGED_PATH = 200
MAX_CONTAINERS = 1 << 14  # arrays and objects; parsing a million of them takes a second
MAX_BOUNDARIES = 64  # of a form; each takes 20 microseconds, also one that ends no part

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class ResponseCounter:
    """Paths without a route are counted as `other`, so that requests cannot grow the table without limit."""

    def __init__(self, app: ASGIApp, counts: Counter):
        self.app, self.counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def count(start: Message) -> None:
            self.counts[getattr(scope.get("route"), "path", "other"), start["status"]] += 1

        await self.app(scope, receive, on_start(send, count))


class AccessLog:
    """Method, path, status, milliseconds until the last byte, the tokens of prompt and output, and the request's id."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, state = time.monotonic(), scope.setdefault("state", {})
        try:
            await self.app(scope, receive, send)
        finally:
            path = scope.get("raw_path", b"")[:MAX_LOGGED_PATH].decode("ascii", "backslashreplace")  # still encoded
            usage, ms = state.get("usage") or {}, 1000 * (time.monotonic() - start)
            line = scope["method"], path, state.get("status", 0), ms
            tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            access_log.info("%s %s %d %.1f ms, %d + %d tokens, %s", *line, *tokens, state.get("request_id", "-"))


class SecurityHeaders:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def add_headers(start: Message) -> None:
            headers = MutableHeaders(scope=start)
            headers.update(SECURITY_HEADERS)
            headers.setdefault("cache-control", "no-cache")

        await self.app(scope, receive, on_start(send, add_headers))


class HostCheck:
    """The Host header must be one of `hosts` (any, if empty); an Origin header, if present, must equal the Host or be
    one of `origins` ("*": any)."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], origins: tuple[str, ...] = ()):
        self.app, self.hosts, self.origins = app, hosts, origins

    def refusal(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts and hostname(host) not in self.hosts:
            return f"the Host header {host!r} is not a name of this server; use one of {', '.join(self.hosts)}"
        allowed = origin is None or origin in self.origins or "*" in self.origins
        if not allowed and origin.partition("://")[2] != host:
            return f"a page from {origin!r} may not call this server; open the server's own page"
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (message := self.refusal(Headers(scope=scope))):
            return await ApiError(403, message, code="forbidden_origin").response()(scope, receive, send)
        await self.app(scope, receive, send)


def tenant_of(request: Request) -> str:
    """The tenant of a request, if the server has several keys."""
    return getattr(request.state, "tenant", "")


def hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # an unbalanced bracket
        return None


class KeyCheck:
    """No keys: every request is admitted. Several: the state of a request names the tenant whose key it has."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app, self.keys = app, [key.encode() for key in keys]

    def admits(self, scope: Scope) -> bool:
        path = scope["path"]
        if not self.keys or path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER):
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = token.strip().encode("latin-1")  # the bytes of the header
        matches = [hmac.compare_digest(sent, key) for key in self.keys]  # all: the time does not tell which one matches
        if not any(matches) or scheme.lower() != "bearer":
            return False
        if len(self.keys) > 1:
            scope.setdefault("state", {})["tenant"] = f"key {matches.index(True) + 1}"
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.admits(scope):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    def __init__(self, app: ASGIApp, max_body: int):
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        too_long = ApiError(413, f"the body is longer than {self.max_body} bytes; shorten it", code="body_too_large")
        if not declared.isdecimal() or int(declared[:20]) > self.max_body:
            return await too_long.response()(scope, receive, send)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client disconnected
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body:
                return await too_long.response()(scope, receive, send)
        refusal = find_costly_syntax(Headers(scope=scope).get("content-type", ""), body)
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        unread: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}
        del body  # not kept until the response ends

        async def receive_body() -> Message:
            nonlocal unread
            message, unread = unread, None
            return await receive() if message is None else message

        await self.app(scope, receive_body, send)


def find_costly_syntax(content_type: str, body: bytes | bytearray) -> ApiError | None:
    """The refusal of a body whose parsing could block the event loop; None if it cannot."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/x-www-form-urlencoded" and body:  # parsed byte by byte; curl -d sends it by default
        rule = "send JSON with Content-Type: application/json, or for audio a multipart/form-data form"
        return ApiError(400, f"a body of type {kind.decode()} is not supported; {rule}", code="unsupported_body")
    if kind != b"multipart/form-data":
        count = count_containers(body)
        rule = f"the body has {count} arrays and objects; send at most {MAX_CONTAINERS}"
        return ApiError(400, rule, code="body_too_large") if count > MAX_CONTAINERS else None
    if b"charset" in options:
        rule = "a form with a charset is not supported; send it in UTF-8, without a charset"
        return ApiError(400, rule, code="unsupported_body")
    if body.count(b"--" + options.get(b"boundary", b"")) > MAX_BOUNDARIES:
        rule = f"the boundary of the form occurs more than {MAX_BOUNDARIES} times in it; send fewer fields"
        return ApiError(400, rule, code="body_too_large")
    return None


def count_containers(body: bytes | bytearray) -> int:
    """The number of arrays and objects in JSON, without those inside strings if the count could be too large."""
    count = body.count(b"[") + body.count(b"{")
    if count <= MAX_CONTAINERS:
        return count
    outside_strings = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside_strings.count(b"[") + outside_strings.count(b"{")
