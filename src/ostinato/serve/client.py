"""A client of any server with OpenAI's API: one streamed answer at a time, with its times and its usage.

Owns: addresses, requests, server-sent events, clocks.  Does not own: what is asked, or in which order (``bench``,
``chat``).  Thread: one event loop's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from ostinato.errors import ConfigError, RequestError

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_SHOWN: Final = 200
"""Characters of an error's text: some servers answer with a page."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how.  ``chat``: with messages; else the texts of all turns are one prompt."""

    base_url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    chat: bool = False
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every request, such as ``temperature``."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of an answer, as it came."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request.  Times are seconds; ``ttft_s`` is None where no text came."""

    text: str
    ttft_s: float | None
    gaps_s: tuple[float, ...]
    """Between one piece of text and the next."""
    total_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    request_id: str | None = None
    error: str | None = None


class ServerError(RequestError):
    """The server refused, or its answer broke off."""


def api_root(base_url: str) -> str:
    """``http://host:port`` with or without ``/v1``, as the address that paths are added to.  Raises ConfigError."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{base_url!r} is not an address such as http://127.0.0.1:8000")
    root = base_url.rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def connect(target: Target, concurrency: int = 1) -> httpx.AsyncClient:
    """A client for ``target``; close it.  A proxy of the environment is not for this machine's own addresses."""
    root = api_root(target.base_url)
    return httpx.AsyncClient(
        base_url=root,
        headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
        timeout=httpx.Timeout(target.timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
        trust_env=urlsplit(root).hostname not in _LOOPBACK,
        verify=root.startswith("https:"),  # without need, reading certificates takes longer than a request
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the server's first model.  Raises ServerError."""
    try:
        answer = await client.get("/models")
        if answer.status_code != httpx.codes.OK:
            raise ServerError(_refusal(answer.status_code, answer.text))
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ServerError(f"cannot reach {client.base_url}: {_reason(error)}") from None
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{client.base_url} does not list a model: name it with --model") from None


async def stream(
    client: httpx.AsyncClient, target: Target, turns: Sequence[str], max_tokens: int
) -> AsyncIterator[Text | Answer]:
    """Ask once: pieces of text, then the :class:`Answer`, which carries the error where there was one.

    ``turns``: what user and model have said in turn, the user first and last.
    """
    body = {**_question(target, turns), "max_tokens": max_tokens, **target.extra}
    path = "/chat/completions" if target.chat else "/completions"
    heard = _Heard(time.perf_counter())
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                yield heard.answer(_refusal(answer.status_code, answer.text))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data:") and (text := heard.take(line[5:].strip())):
                    yield Text(text)
    except httpx.HTTPError as error:
        heard.error = _reason(error)
    except ServerError as error:
        heard.error = str(error)
    yield heard.answer(heard.error)


class _Heard:
    """One answer while it comes."""

    def __init__(self, began: float) -> None:
        self.error: str | None = None
        self._began = began
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = _NOTHING
        self._finish: str | None = None
        self._id: str | None = None
        self._done = False

    def take(self, data: str) -> str:
        """The text of one event.  Raises ServerError."""
        if data == "[DONE]":
            self._done = True
            return ""
        try:
            event = json.loads(data)
            if error := event.get("error"):
                raise ServerError(str(error.get("message", error))[:_SHOWN])
            self._id = event.get("id") or self._id
            self._usage = event.get("usage") or self._usage
            choice = (event.get("choices") or [_NOTHING])[0]
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or _NOTHING
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        except ServerError:
            raise
        except (ValueError, AttributeError, LookupError, TypeError):
            raise ServerError("the server streamed what is not OpenAI's form") from None
        if text:
            self._arrivals.append(time.perf_counter())
            self._texts.append(text)
        return str(text)

    def answer(self, error: str | None) -> Answer:
        if error is None and not (self._done or self._finish):
            error = "the stream ended before the answer"
        details = self._usage.get("prompt_tokens_details") or _NOTHING
        times = self._arrivals
        return Answer(
            text="".join(self._texts),
            ttft_s=times[0] - self._began if times else None,
            gaps_s=tuple(late - early for early, late in pairwise(times)),
            total_s=time.perf_counter() - self._began,
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            completion_tokens=int(self._usage.get("completion_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            cached_by_tier={str(tier): int(n) for tier, n in (details.get("cached_by_tier") or _NOTHING).items()},
            finish_reason=self._finish,
            request_id=self._id,
            error=error,
        )


def _question(target: Target, turns: Sequence[str]) -> dict[str, Any]:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "model": target.model}
    if not target.chat:
        return {**asked, "prompt": "".join(turns)}
    roles = ("user", "assistant")
    return {**asked, "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def _refusal(status: int, text: str) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"{status}: {' '.join(text.split())[:_SHOWN]}"


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
