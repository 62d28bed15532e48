"""Asking: so many conversations at once, each one's next turn as soon as the answer is there.

Owns: who asks when, and when it ends.  Does not own: what is asked (``workload``), the protocol (``serve.client``).
A closed loop: a slow server is asked less, so its times say what so many users see, not what a fixed rate would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from ostinato.serve.bench.workload import Conversation, Workload
from ostinato.serve.client import Answer, Target, connect, stream

_AFTER_ERROR_S: Final = 0.1
"""A server that refuses at once is not asked in a tight loop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is asked: ``requests`` in all, or for ``seconds``; what runs then is heard to its end."""

    concurrency: int
    requests: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the turn of which conversation, when it began (seconds since the start), what came."""

    conversation: int
    turn: int
    began_s: float
    answer: Answer


class Load:
    """One run.  ``on_answer`` is called with each answer as it comes."""

    def __init__(
        self, target: Target, workload: Workload, limits: Limits, on_answer: Callable[[Asked], None] = lambda _: None
    ) -> None:
        self.asked: list[Asked] = []
        self.running = 0
        self.elapsed_s = 0.0
        self._start = 0.0
        self._target = target
        self._workload = workload
        self._limits = limits
        self._on_answer = on_answer
        self._next = 0
        self._sent = 0
        self._stopped = False

    def stop(self) -> None:
        """Ask nothing new."""
        self._stopped = True

    async def run(self) -> None:
        """Ask until the limits are reached and every answer is there."""
        self._start = time.perf_counter()
        async with connect(self._target, self._limits.concurrency) as client:
            await asyncio.gather(*(self._user(client) for _ in range(self._limits.concurrency)))
        self.elapsed_s = time.perf_counter() - self._start

    @property
    def since_start_s(self) -> float:
        return time.perf_counter() - self._start

    def _may_ask(self) -> bool:
        limits = self._limits
        if self._stopped or (limits.requests is not None and self._sent >= limits.requests):
            return False
        return limits.seconds is None or self.since_start_s < limits.seconds

    async def _user(self, client: httpx.AsyncClient) -> None:
        while self._may_ask():
            number, self._next = self._next, self._next + 1
            await self._converse(client, self._workload.conversation(number))

    async def _converse(self, client: httpx.AsyncClient, conversation: Conversation) -> None:
        """Ends where a turn fails: what would follow is another conversation."""
        said: list[str] = []
        for i, turn in enumerate(conversation.turns):
            if not self._may_ask():
                return
            self._sent += 1
            said.append(turn.text if i == 0 or self._target.chat else f"\n\n{turn.text}")
            began = self.since_start_s
            self.running += 1
            try:
                answer = await ask(client, self._target, said, turn.max_tokens)
            finally:
                self.running -= 1
            self.asked.append(Asked(conversation.number, i, began, answer))
            self._on_answer(self.asked[-1])
            if answer.error is not None:
                await asyncio.sleep(_AFTER_ERROR_S)
                return
            said.append(answer.text)


async def ask(client: httpx.AsyncClient, target: Target, said: Sequence[str], max_tokens: int) -> Answer:
    """One whole answer."""
    async for part in stream(client, target, said, max_tokens):
        if isinstance(part, Answer):
            return part
    raise AssertionError("a stream ends with its answer")
