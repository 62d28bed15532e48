"""Errors in OpenAI's form.

Owns: which status, type and code an error has, and its JSON.  Does not own: wording of what the engine refuses.
Nothing of a prompt is put into an error that is logged: the journal takes status and code alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ostinato.engine.calls import OverloadedError
from ostinato.errors import OstinatoError, PromptTooLongError, RequestError, SamplingError, StoppedError

log: Final = logging.getLogger(__name__)
_FIELD: Final = re.compile(r"^([a-z_]+)\b")
_CODES: Final = MappingProxyType({404: "not_found", 405: "method_not_allowed", 413: "body_too_large"})
_RETRY_WHEN_STOPPED_S: Final = 10


class ApiError(Exception):
    """What a client is told.  ``param``: the field that is wrong; ``code``: for programs to look at."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        match self.status:
            case 401:
                return "authentication_error"
            case 429:
                return "rate_limit_error"
            case status if status >= 500:
                return "server_error"
        return "invalid_request_error"

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong, and would be so again."""
    return ApiError(400, message, param, code)


def api_error(error: Exception) -> ApiError:
    """Any error as what the client is told of it."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            return ApiError(429, str(error), None, "overloaded", {"Retry-After": str(error.retry_after_s)})
        case PromptTooLongError():
            return bad_request(str(error), "prompt", "context_length_exceeded")
        case SamplingError():
            named = _FIELD.match(str(error))
            return bad_request(str(error), named[1] if named else None, "invalid_value")
        case RequestError():
            return bad_request(str(error))
        case StoppedError():
            return ApiError(503, str(error), None, "stopping", {"Retry-After": str(_RETRY_WHEN_STOPPED_S)})
        case OstinatoError():
            return ApiError(500, str(error), None, "engine_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says more", None, "internal_error")


def install(app: FastAPI) -> None:
    """Have all errors of ``app`` answered in this form."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (ApiError, OstinatoError):
        app.add_exception_handler(kind, _other)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    note(request, "invalid_type")
    return _first(error).response()


def _first(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong.  Of a union, pydantic tells what each of its types would have wanted."""
    details = error.errors()
    first = details[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", None, "invalid_json")
    if first["type"] == "not_text":
        return bad_request(first["msg"], None, "invalid_text")
    if list(first["loc"]) == ["body"]:
        return bad_request("the body is not a JSON object sent as application/json", None, "invalid_body")
    path = [part for part in first["loc"] if part != "body"]
    param = str(path[0]) + "".join(f"[{part}]" for part in path[1:] if isinstance(part, int))
    wanted = dict.fromkeys(one["msg"] for one in details if one["loc"][1:2] == tuple(path[:1]))
    return bad_request(f"{param}: {'; or: '.join(wanted)}", param, "invalid_type")


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code)
    found = ApiError(error.status_code, str(error.detail), None, code, error.headers)
    if error.status_code == 404:
        found = ApiError(404, f"there is no {request.method} {request.url.path}", None, code)
    note(request, found.code)
    return found.response()


async def _other(request: Request, error: Exception) -> JSONResponse:
    found = api_error(error)
    note(request, found.code)
    return found.response()


def note(request: Request, code: str | None) -> None:
    """Have the journal show ``code``."""
    request.scope.setdefault("state", {})["code"] = code
