"""SIGTERM: finish the step, keep what was computed, then end.

Owns: the signal's handler while a command runs.  Does not own: what closing keeps (``LLM.close``).  A second signal
ends the process at once, as does SIGKILL: what was on its way into a tier is lost then, and nothing else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

from ostinato.errors import StoppedError

EXIT_CODE: Final = 128 + signal.SIGTERM


class Interruptible(Protocol):
    """Whoever ends soon when told to, by raising StoppedError where it is called."""

    def interrupt(self) -> None: ...


class Stopper:
    """What a signal does: it interrupts the engine that :meth:`watch` named, or else raises SystemExit where it is."""

    def __init__(self) -> None:
        self._engine: Interruptible | None = None

    def watch(self, engine: Interruptible) -> None:
        self._engine = engine

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        signal.signal(number, signal.SIG_DFL)
        if self._engine is None:
            raise SystemExit(EXIT_CODE)
        self._engine.interrupt()


@contextmanager
def stoppable() -> Iterator[Stopper]:
    """Within, SIGTERM stops the command in good order; SystemExit with the usual code follows.

    Without effect outside of the main thread, where no signal arrives.
    """
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():
        yield stopper
        return
    before = signal.signal(signal.SIGTERM, stopper.on_signal)
    try:
        yield stopper
    except StoppedError:
        raise SystemExit(EXIT_CODE) from None
    finally:
        signal.signal(signal.SIGTERM, before)
