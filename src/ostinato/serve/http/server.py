"""Listening, signals, the end.

Owns: the socket, uvicorn, the order of stopping.  Does not own: routes (``app``), the engine (``AsyncLLM``).

SIGTERM or SIGINT: nothing new is taken in, what runs may finish for ``shutdown_s`` seconds, the rest is told so and
ended; then the tiers take what they were to have.  A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

import uvicorn

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.build import vocabulary_size
from ostinato.engine.history import History
from ostinato.engine.llm import LLM
from ostinato.errors import ConfigError
from ostinato.serve.http.app import create_app
from ostinato.serve.http.auth import ApiKeys
from ostinato.serve.http.exchange import Service
from ostinato.serve.http.metrics import Metrics
from ostinato.serve.http.prompts import Prompts

_STOPPING: Final = "the server is stopping"
_KEEP_ALIVE_S: Final = 65
"""More than the minute for which proxies and clients usually keep an idle connection."""
_LAST_WORDS_S: Final = 2
"""For writing the last events to clients after their requests were ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``names``: what the model is called.  ``template``: the text of a chat template, if not the model's own."""

    names: Sequence[str]
    keys: ApiKeys
    template: str | None = None
    max_queue: int = 256
    max_body: int = 16 << 20
    shutdown_s: float = 30.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that will listen there; ConfigError when that is not possible.  Port 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from None
    return sock


class HttpServer:
    """Serves ``llm``, which it takes over, on ``sock`` until it is told to stop."""

    def __init__(self, llm: LLM, options: ServerOptions, sock: socket.socket) -> None:
        self._options = options
        self._sock = sock
        metrics = Metrics(llm, options.names[0])
        history = History(llm.built.hierarchy, (metrics.ended,))
        observers = (metrics, history)
        self.llm = AsyncLLM(llm, options.max_queue, observers, self._on_death)
        prompts = Prompts(llm.runtime.tokenizer, vocabulary_size(llm.runtime), options.template)
        self.service = Service(self.llm, prompts, tuple(options.names), metrics, int(time.time()), history)
        config = uvicorn.Config(
            create_app(self.service, options.keys, options.max_body),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(options.shutdown_s) + _LAST_WORDS_S,
        )
        self._uvicorn = _Uvicorn(config, self.stop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dead = False
        """The engine failed."""

    def run(self, on_ready: Callable[[], None] = lambda: None) -> bool:
        """Serve to the end; False when the engine failed."""
        asyncio.run(self._run(on_ready))
        return not self.dead

    def stop(self) -> None:
        """Begin to stop; without effect before it runs and afterwards.  Any thread, or a signal handler."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: it has stopped
                self._loop.call_soon_threadsafe(self._begin_to_stop)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._uvicorn.on_ready = on_ready
        self.llm.start()
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        finally:
            await self.llm.close()
            self.service.prompts.close()

    def _begin_to_stop(self) -> None:
        assert self._loop is not None
        if not self._uvicorn.should_exit:
            self._uvicorn.should_exit = True
            self.llm.refuse(_STOPPING)
            self._loop.call_later(self._options.shutdown_s, self.llm.abort_all, _STOPPING)

    def _on_death(self) -> None:
        self.dead = True
        self._begin_to_stop()


class _Uvicorn(uvicorn.Server):
    """Uvicorn with our order of stopping; it would end the process by the signal before the tiers are closed."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop
        self.on_ready: Callable[[], None] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        signal.signal(sig, signal.SIG_DFL)
        self._stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()
