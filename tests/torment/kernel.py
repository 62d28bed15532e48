"""Threads and time that obey one random generator: the same seed gives the same run, switch by switch.

Owns: who runs, virtual time, stand-ins for ``threading``, ``time``, ``queue`` and thread pools, and putting them in
their place in the modules of connectors.  Does not own: what the threads do.

Each thread is a fiber (a greenlet).  Exactly one runs at a time, and it is left only where it waits: for a queue, a
lock, an event, another thread, or for time to pass; and now and then where it is about to take a lock.  The main
thread, the scheduler's, decides when the others get a turn.  Time passes only when it says so, or when it waits itself
and nobody else can go on.
"""

from __future__ import annotations

import math
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

EPOCH = 1_700_000_000.0
SWITCH_AT_LOCK = 0.1
"""How often a thread that takes a lock lets others go first."""


class Violation(BaseException):
    """Something that must never happen did.  Not an ``Exception``: nobody may catch it on the way."""


class Task:
    """One simulated thread."""

    def __init__(self, number: int, name: str, fiber: greenlet) -> None:
        self.number = number
        self.name = name
        self.fiber = fiber
        self.ready: Callable[[], bool] = _at_once
        self.deadline = math.inf


def _at_once() -> bool:
    return True


class Kernel:
    """``rng`` is the whole program's."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.switches = 0
        self.may_block = True
        """Whether the main thread opens or closes something just now."""
        self._main = getcurrent()
        self._numbers = 0

    def spawn(self, run: Callable[[], None], name: str) -> Task:
        self._numbers += 1
        task = Task(self._numbers, name, greenlet(run, self._main))
        self.tasks.append(task)
        return task

    def run(self, turns: int) -> None:
        """Up to ``turns`` turns for threads that can go on."""
        while turns > 0 and self._turn():
            turns -= 1

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let others run until ``ready()``, for ``timeout`` seconds of virtual time at most; the last answer of it."""
        deadline = math.inf if timeout is None else self.now + timeout
        if self.current is None:
            while not ready() and self.now < deadline:
                if not self._turn():
                    self._skip(deadline)
            return ready()
        if not ready():
            self._leave(ready, deadline)
        return ready()

    def wait_for_lock(self, free: Callable[[], bool]) -> None:
        """The scheduler's thread may meet a lock that is held for a moment, never one that is held over a wait."""
        while self.current is None and not self.may_block and not free():
            if not self._turn():
                raise Violation("the scheduler's thread waits for a lock whose owner waits for something else")
        self.wait(free)

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def give_way(self) -> None:
        if self.current is not None:
            self._leave(_at_once, math.inf)

    def kill(self) -> None:
        """The process ends: nobody goes on."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            self.current = task
            while not task.fiber.dead:
                task.fiber.throw(GreenletExit)
        self.current = None

    def _leave(self, ready: Callable[[], bool], deadline: float) -> None:
        task = self.current
        assert task is not None
        task.ready, task.deadline = ready, deadline
        self._main.switch()

    def _turn(self) -> bool:
        able = [task for task in self.tasks if task.ready() or task.deadline <= self.now]
        if not able:
            return False
        task = able[0] if len(able) == 1 else able[int(self.rng.random() * len(able))]
        self.switches += 1
        self.current = task
        task.ready, task.deadline = _at_once, math.inf
        try:
            task.fiber.switch()
        finally:
            self.current = None
            if task.fiber.dead and task in self.tasks:
                self.tasks.remove(task)
        return True

    def _skip(self, deadline: float) -> None:
        until = min([deadline, *(task.deadline for task in self.tasks)])
        if until == math.inf:
            raise Violation(f"the scheduler's thread waits for ever; alive: {[task.name for task in self.tasks]}")
        self.now = max(self.now, until)

    # Stand-ins.

    def modules(self) -> dict[int, Any]:
        """By the identity of what is replaced."""
        stand_in = SimpleNamespace(
            Thread=lambda **options: Thread(self, **options),
            Lock=lambda: Lock(self),
            RLock=lambda: Lock(self),
            Event=lambda: Event(self),
            local=lambda: Local(self),
            get_ident=self.ident,
        )
        clock = SimpleNamespace(
            monotonic=self.clock, perf_counter=self.clock, time=lambda: EPOCH + self.now, sleep=self.sleep
        )
        return {
            id(threading): stand_in,
            id(time): clock,
            id(queue.SimpleQueue): lambda: SimpleQueue(self),
            id(ThreadPoolExecutor): lambda _workers, name: Pool(self, name),
            id(time.monotonic): self.clock,
            id(time.time): clock.time,
        }

    def clock(self) -> float:
        return self.now

    def ident(self) -> int:
        return self.current.number if self.current is not None else 0


class Thread:
    def __init__(
        self,
        kernel: Kernel,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._kernel = kernel
        self._run = lambda: target(*args)
        self._task: Task | None = None
        self.name = name

    def start(self) -> None:
        self._task = self._kernel.spawn(self._run, self.name)

    def join(self, timeout: float | None = None) -> None:
        self._kernel.wait(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.fiber.dead


class Lock:
    """Reentrant; that nobody takes a plain lock twice is for the real ones to show."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._owner: Task | str | None = "nobody"
        self._depth = 0

    def __enter__(self) -> bool:
        kernel = self._kernel
        if kernel.current is not None and kernel.rng.random() < SWITCH_AT_LOCK:
            kernel.give_way()
        if self._owner is not kernel.current:
            kernel.wait_for_lock(lambda: self._owner == "nobody")
            self._owner = kernel.current
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = "nobody"


class Event:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._kernel.wait(self.is_set, timeout)


class Local:
    """Attributes of each thread."""

    def __init__(self, kernel: Kernel) -> None:
        self.__dict__.update(kernel=kernel, values={})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[self.kernel.ident(), name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[self.kernel.ident(), name] = value


class SimpleQueue:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self._kernel.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Future:
    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None


class Pool:
    """A thread pool: each piece of work is a thread."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._open: list[Future] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> SimpleNamespace:
        future = Future()

        def run() -> None:
            try:
                future.value = work(*args)
            except Exception as error:
                future.error = error
            future.done = True

        def settled() -> Future:
            self._kernel.wait(lambda: future.done)
            return future

        def result() -> Any:
            if settled().error is not None:
                raise future.error  # type: ignore[misc]
            return future.value

        self._open.append(future)
        self._kernel.spawn(run, self._name)
        return SimpleNamespace(result=result, exception=lambda: settled().error)

    def shutdown(self) -> None:
        self._kernel.wait(lambda: all(future.done for future in self._open))


@cache
def _places(package: str) -> tuple[tuple[dict[str, Any], str], ...]:
    """Where the package's modules name something that is replaced; modules that are imported later are not seen."""
    wanted = {id(item) for item in (threading, time, queue.SimpleQueue, ThreadPoolExecutor)}
    return tuple(
        (vars(module), name)
        for module in _modules(package)
        for name, value in list(vars(module).items())
        if id(value) in wanted
    )


@cache
def _defaults(package: str) -> tuple[tuple[FunctionType, tuple[Any, ...]], ...]:
    """Functions of the package's classes with a clock among their defaults."""
    clocks = {id(time.monotonic), id(time.time)}
    found = {
        function: function.__defaults__
        for module in _modules(package)
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__.startswith(package)
        for function in vars(cls).values()
        if isinstance(function, FunctionType) and any(id(item) in clocks for item in function.__defaults__ or ())
    }
    return tuple(found.items())  # type: ignore[arg-type]


def _modules(package: str) -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(package)]


@contextmanager
def installed(kernel: Kernel, package: str = "ostinato.connectors") -> Iterator[None]:
    """The package's threads and clocks are the kernel's."""
    replaced = kernel.modules()
    before = [(names, name, names[name]) for names, name in _places(package)]
    for names, name, value in before:
        names[name] = replaced[id(value)]
    for function, defaults in _defaults(package):
        function.__defaults__ = tuple(replaced.get(id(item), item) for item in defaults)
    try:
        yield
    finally:
        kernel.kill()
        for names, name, value in before:
            names[name] = value
        for function, defaults in _defaults(package):
            function.__defaults__ = defaults
