"""What a request may get instead of a reply, in the words of the API that it speaks.

Every refusal is an `ApiError`; errors of the layers below become one here and nowhere else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from colibri_mmap.errors import (
    ArgumentError,
    ColibriError,
    ContextLengthError,
    QueueFull,
    TemplateError,
)

_log = logging.getLogger(__name__)

RETRY_SECONDS = 5  # what Retry-After says: about a short reply

# pydantic's words for a body that is no object, or none at all.
_NO_OBJECT = ("missing", "model_attributes_type", "model_type")

_OPENAI_TYPES = {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is not answered: HTTP status, message, the field and the kind of mistake."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def as_openai(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def as_anthropic(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        where = f"{self.param}: " if self.param and self.param not in self.message else ""
        return {
            "type": "error",
            "error": {
                "type": _ANTHROPIC_TYPES.get(self.status, kind),
                "message": where + self.message,
            },
        }

    def response(self, path: str) -> Response:
        """As the API at `path` words it."""
        response = json_response(
            self.as_anthropic() if speaks_anthropic(path) else self.as_openai(), self.status
        )
        if self.status in (429, 503):
            response.headers["retry-after"] = str(RETRY_SECONDS)
        if self.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        if self.status == 413:
            response.headers["connection"] = "close"  # the rest of the body is not read
        return response


def refuse(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def speaks_anthropic(path: str) -> bool:
    """Whether the endpoint is one of Anthropic's API."""
    return path.startswith("/v1/messages")


def encode_json(document: Any) -> bytes:
    """One line of JSON; half a surrogate pair, which UTF-8 cannot say, stays escaped."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(document: Any, status: int = 200) -> Response:
    return Response(encode_json(document), status, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of the layers below."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case TemplateError():
            return ApiError(400, str(error), code="template_error", param="messages")
        case ArgumentError():
            return ApiError(400, str(error), code="invalid_value")
        case ColibriError():
            return ApiError(500, str(error), code=type(error).__name__)
        case _:
            _log.error("internal error", exc_info=error)
            return ApiError(500, "internal error: see the server's output", code="internal_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """The exception handler of all errors that are not validation's."""
    if isinstance(error, HTTPException):
        wording = {404: f"there is no {request.url.path}", 405: f"{request.method} is not allowed"}
        message = wording.get(error.status_code, str(error.detail))
        code = "body_too_large" if error.status_code == 413 else None
        response = ApiError(error.status_code, message, code=code).response(request.url.path)
        response.headers.update(error.headers or {})
        return response
    return as_api_error(error).response(request.url.path)


async def answer_invalid(request: Request, error: Exception) -> Response:
    """The exception handler of bodies that do not fit the schema: 400, naming the field."""
    assert isinstance(error, RequestValidationError)
    return _described(error.errors()).response(request.url.path)


def _described(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors as ours."""
    first = errors[0]
    kind, place = first["type"], [*first["loc"][1:], first.get("ctx", {}).get("field", "")]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    param = _field_name(place)
    if kind in _NO_OBJECT and not param:
        return ApiError(400, "send a JSON object, as application/json", code="invalid_json")
    if kind == "extra_forbidden":
        return refuse(param, "this server does not support the field", "unsupported_field")
    if kind == "missing":
        return refuse(param, "the field is missing", "missing_field")
    code = kind if kind == "unsupported_value" else "invalid_value"
    return refuse(param or "body", first["msg"][:1].lower() + first["msg"][1:], code)


def _field_name(place: Sequence[str | int]) -> str:
    """`messages[0].content` of ("messages", 0, "content")."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part:
            name += f".{part}" if name else part
    return name
