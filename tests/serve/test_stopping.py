"""SIGTERM stops a command in good order, and a second one at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ostinato.errors import StoppedError
from ostinato.serve.stopping import stoppable


class Engine:
    interrupted = False

    def interrupt(self) -> None:
        self.interrupted = True


def test_without_an_engine_the_command_ends_where_it_is() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_is_interrupted() -> None:
    engine = Engine()

    def command() -> None:
        with stoppable() as stopper:
            stopper.watch(engine)
            os.kill(os.getpid(), signal.SIGTERM)
            assert engine.interrupted
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second signal would not end the process"
            raise StoppedError("stopped")

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 143


def test_nothing_changes_without_a_signal_or_in_another_thread() -> None:
    with stoppable():
        pass
    seen = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stoppable():
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]
