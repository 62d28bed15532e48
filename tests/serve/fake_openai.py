"""A server with OpenAI's streaming API that has no model: it says what it is told to, as slowly as it is told to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PIECES = ("one ", "two ", "three ")


@dataclass
class Fake:
    """``reply``: of a path and a body, the status and the events, or a body as it is."""

    reply: Callable[[str, dict[str, Any]], tuple[int, Any]]
    pause_s: float = 0.0
    port: int = 0
    heard: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            path = head.decode().split()[1]
            headers = {}
            while (line := (await reader.readline()).decode().strip()) != "":
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            text = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(text) if text else {}
            self.heard.append((path, body, headers))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self._answer(writer, *self.reply(path, body))
            finally:
                self.at_once -= 1
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, status: int, events: Any) -> None:
        streamed = isinstance(events, list)
        kind = "text/event-stream" if streamed else "application/json"
        writer.write(f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\n".encode())
        if not streamed:
            text = events if isinstance(events, bytes) else json.dumps(events).encode()
            writer.write(f"content-length: {len(text)}\r\n\r\n".encode() + text)
            await writer.drain()
            return
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            chunk = f"data: {data}\n\n".encode()
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(self.pause_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def talk(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Three words, and a usage in which each word of the prompt is a token and half of them were cached."""
    if path.endswith("/models"):
        return 200, {"data": [{"id": "fake"}]}
    chat = path.endswith("/chat/completions")
    text = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
    count = len(text.split())
    events: list[Any] = [{"id": "r", "choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
    for piece in PIECES:
        events.append({"id": "r", "choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
    events.append({"id": "r", "choices": [{"text": "", "delta": {}, "finish_reason": "length"}]})
    half = count // 2
    details = {"cached_tokens": half, "cached_by_tier": {"device": half - half // 4, "disk": half // 4}}
    usage = {"prompt_tokens": count, "completion_tokens": len(PIECES), "prompt_tokens_details": details}
    return 200, [*events, {"id": "r", "choices": [], "usage": usage}, "[DONE]"]


@contextmanager
def fake_server(reply: Callable[[str, dict[str, Any]], tuple[int, Any]] = talk, pause_s: float = 0.0) -> Iterator[Fake]:
    """Runs on a thread of its own, on any free port of loopback."""
    fake = Fake(reply, pause_s)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0))
    fake.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    open_ones = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in open_ones:
        task.cancel()
    await asyncio.gather(*open_ones, return_exceptions=True)
