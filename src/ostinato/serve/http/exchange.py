"""One HTTP request on its way through the engine: handed in, watched, answered or given up.

Owns: the service that all routes share, usage, server-sent events, what happens when a client leaves.  Does not own:
the shape of answers (``completions``, ``chat``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.calls import Batch, Call
from ostinato.engine.history import History
from ostinato.engine.live import Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.sampling_params import SamplingParams
from ostinato.serve.http.errors import ApiError, api_error, note
from ostinato.serve.http.metrics import Metrics
from ostinato.serve.http.prompts import Prompts

T = TypeVar("T")
CLIENT_LEFT: Final = 499
"""Nginx's status for the journal; nobody is there to read it."""


class ClientLeftError(Exception):
    """Whoever asked does not wait for the answer any more."""


@dataclass(frozen=True, slots=True)
class Service:
    """What all routes share.  ``names``: what the model is called; answers carry the name that was asked for."""

    llm: AsyncLLM
    prompts: Prompts
    names: tuple[str, ...]
    metrics: Metrics
    created: int
    history: History

    def name(self, wanted: str | None) -> str:
        """Raises ApiError when no model is called so."""
        if wanted in (None, ""):
            return self.names[0]
        if wanted not in self.names:
            raise ApiError(
                404,
                f"there is no model {wanted!r} here; this server has {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return wanted

    def room(self, prompt: Prompt) -> int:
        """The most tokens that can be generated after ``prompt``; 1 when it is too long, which the engine refuses."""
        return max(1, self.llm.longest - len(prompt.token_ids))


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


class Exchange:
    """The engine's side of one HTTP request: ``len(prompts)`` times ``n`` choices, in this order."""

    def __init__(self, request: Request, kind: str, model: str, batch: Batch) -> None:
        self.id = batch.calls[0].request_id.rpartition("-")[0]
        self.created = int(time.time())
        self.model = model
        self.batch = batch
        self._request = request
        self._kind = kind
        request.scope["state"]["exchange"] = self

    @classmethod
    async def begin(
        cls, request: Request, kind: str, model: str, calls: Sequence[tuple[Prompt, SamplingParams]], priority: int
    ) -> Exchange:
        """Hand in ``calls`` and wait until the engine has them.  Raises what refuses them."""
        service, state = service_of(request), request.scope["state"]
        name = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}"
        batch = service.llm.submit(
            [
                Call(f"{name}-{i}", prompt, sampling, priority, state["salt"], state["arrival"])
                for i, (prompt, sampling) in enumerate(calls)
            ]
        )
        try:
            await batch.accepted()
        except BaseException:
            batch.close()
            raise
        return cls(request, kind, model, batch)

    def head(self, chunk: bool = False) -> dict[str, Any]:
        """The fields with which every answer begins."""
        kind = f"{self._kind}.chunk" if chunk and self._kind.startswith("chat") else self._kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def outputs(self) -> list[RequestOutput]:
        """All outputs; ClientLeftError, and the requests are aborted, when the client goes first."""
        try:
            return await _unless_gone(self._request, self.batch.finish())
        finally:
            self.batch.close()

    def stream(self, chunks: AsyncIterator[dict[str, Any]], wants_usage: bool) -> Response:
        """``chunks`` as server-sent events."""
        return _EventStream(self._events(chunks, wants_usage), self.batch)

    async def _events(self, chunks: AsyncIterator[dict[str, Any]], wants_usage: bool) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield _event({**self.head(chunk=True), **chunk, **({"usage": None} if wants_usage else {})})
            if wants_usage:
                outputs = [output for output in self.batch.outputs if output is not None]
                yield _event({**self.head(chunk=True), "choices": [], "usage": usage(outputs)})
        except Exception as error:
            found = api_error(error)
            note(self._request, found.code)
            yield _event(found.body())
        yield b"data: [DONE]\n\n"


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in OpenAI's form; ``cached_by_tier`` says from where the cached ones came."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    by_tier: Counter[str] = Counter()
    for output in outputs:
        by_tier.update(output.cached_by_tier)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.cached_tokens for output in outputs),
            "cached_by_tier": dict(by_tier),
        },
    }


def answer(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class _EventStream(StreamingResponse):
    """Closes its batch however it ends: to the last chunk, or because the client left in the middle of one."""

    def __init__(self, events: AsyncIterator[bytes], batch: Batch) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._batch = batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._batch.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
