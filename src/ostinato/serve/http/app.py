"""The application: all routes, behind the door and the journal.

Owns: putting the routes together; ``/health``, ``/version``, ``/metrics``, ``/v1/models``; one log line per answer.
Does not own: listening (``server``).  Thread: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato import __version__
from ostinato.serve.http import chat, completions, errors, events
from ostinato.serve.http.auth import OPEN_PATHS, ApiKeys, Door
from ostinato.serve.http.errors import ApiError, api_error
from ostinato.serve.http.exchange import CLIENT_LEFT, ClientLeftError, Exchange, Service, service_of
from ostinato.serve.http.metrics import CONTENT_TYPE, Metrics

log: Final = logging.getLogger(__name__)
router: Final = APIRouter()
_LOAD_PATIENCE_S: Final = 2.0
_QUIET: Final = frozenset({*OPEN_PATHS, "/metrics"})
"""Asked every few seconds by machines: not worth a line each."""


def create_app(service: Service, keys: ApiKeys, max_body: int) -> ASGIApp:
    """The server's ASGI application.  ``max_body``: bytes that a request's body may have."""
    app = FastAPI(title="Ostinato", version=__version__, docs_url="/docs", redoc_url=None)
    app.state.service = service
    for part in (router, completions.router, chat.router, events.router):
        app.include_router(part)
    errors.install(app)
    app.add_exception_handler(ClientLeftError, _client_left)
    app.add_exception_handler(Exception, _failed)
    return Journal(Door(app, keys, max_body), service.metrics)


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken in."""
    why = service_of(request).llm.refusing
    return JSONResponse({"status": why or "ok"}, 503 if why else 200)


@router.get("/version", response_model=None)
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service = service_of(request)
    load = None
    if not service.llm.refusing:
        try:
            load = await asyncio.wait_for(service.llm.load(), _LOAD_PATIENCE_S)
        except asyncio.TimeoutError:
            log.debug("a step takes long: the gauges keep their last values")
    return Response(service.metrics.page(load), media_type=CONTENT_TYPE)


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    service = service_of(request)
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, request: Request) -> Response:
    service = service_of(request)
    return JSONResponse(_model(service, service.name(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ostinato",
        "root": service.llm.llm.runtime.name,
        "parent": None,
        "max_model_len": service.llm.longest,
    }


async def _client_left(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    found = api_error(error)
    errors.note(request, found.code)
    return found.response()


class Journal:
    """ASGI: writes down how each request was answered, and nothing of what it asked."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["arrival"] = time.perf_counter()
        status: list[int] = []

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            # Starlette raises again what it has answered; an error of its own is answered here.
            if not status:
                found: ApiError = api_error(error)
                await found.response()(scope, receive, watched)
        finally:
            self._note(scope, status[0] if status else CLIENT_LEFT)

    def _note(self, scope: Scope, status: int) -> None:
        path = getattr(scope.get("route"), "path", "(none)")
        state, seconds = scope["state"], time.perf_counter() - scope["state"]["arrival"]
        exchange: Exchange | None = state.get("exchange")
        code = state.get("code")
        if exchange is not None and code is None and not all(exchange.batch.outputs):
            status = CLIENT_LEFT
        self._metrics.answered(path, status)
        if path in _QUIET and status == 200:
            return
        more = f" {code}" if code else " client left" if status == CLIENT_LEFT else ""
        log.info("%s %s %d%s, %.3f s%s", scope["method"], path, status, more, seconds, _tokens(exchange))


def _tokens(exchange: Exchange | None) -> str:
    if exchange is None:
        return ""
    outputs = [output for output in exchange.batch.outputs if output is not None]
    prompt = sum(len(call.prompt.token_ids) for call in exchange.batch.calls)
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    ends = ",".join(sorted({one.finish_reason or "" for output in outputs for one in output.outputs})) or "unfinished"
    reused = sum(output.cached_tokens for output in outputs)
    first = f", first token after {min(o.metrics.ttft_s for o in outputs) * 1e3:.0f} ms" if outputs else ""
    return f": {exchange.id} {prompt} prompt tokens, {reused} reused, {generated} generated, {ends}{first}"
