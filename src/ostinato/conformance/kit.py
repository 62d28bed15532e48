"""All checks, and running them.

Owns: the list, how one check's end becomes a verdict, subjects from specifications.  Does not own: the checks.
"""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ostinato.conformance import delivering, failing, manners
from ostinato.conformance.bench import Subject
from ostinato.conformance.verdict import Outcome, Slow, Unsuitable, Verdict, Violation
from ostinato.connectors.api import Connector
from ostinato.connectors.multi import expand
from ostinato.connectors.registry import make_connector, parse_spec
from ostinato.errors import ConfigError

DEFAULTS: Final = MappingProxyType({"host": "host:64MiB", "disk": "disk:{folder}:64MiB"})
"""What a bare name stands for."""


@dataclass(frozen=True, slots=True)
class Check:
    """``name`` is the function's, ``contract`` its docstring."""

    run: Callable[[Subject], None]

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def contract(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


CHECKS: Final = tuple(Check(run) for run in (*delivering.CHECKS, *failing.CHECKS, *manners.CHECKS))


def run_check(check: Check, subject: Subject) -> Verdict:
    """Never raises, but for what ends the process, or a subject that cannot be made."""
    start, outcome, text = time.perf_counter(), Outcome.PASSED, ""
    try:
        with _listening() as notes:
            check.run(subject)
    except Unsuitable as reason:
        outcome, text = Outcome.SKIPPED, str(reason)
    except Slow as reason:
        outcome, text = Outcome.WARNED, str(reason)
    except Violation as reason:
        outcome, text = Outcome.FAILED, str(reason)
    except ConfigError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome.FAILED
        text = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno}, {where.name})"
    if outcome is Outcome.FAILED and notes.last:
        text += f" (last in the log: {notes.last})"
    return Verdict(check.name, check.contract, outcome, time.perf_counter() - start, text)


def run_all(subject: Subject, on_verdict: Callable[[Verdict], None] = lambda _: None) -> list[Verdict]:
    verdicts = []
    for check in CHECKS:
        verdicts.append(run_check(check, subject))
        on_verdict(verdicts[-1])
    return verdicts


@contextmanager
def subject_of(specs: Sequence[str]) -> Iterator[Subject]:
    """What ``specs`` name, as tiers of one engine, fastest first; a folder that a bare ``disk`` needs is temporary."""
    with tempfile.TemporaryDirectory(prefix="ostinato-conformance-") as folder:
        texts = [DEFAULTS.get(spec, spec).format(folder=folder) if spec in DEFAULTS else spec for spec in specs]

        def make() -> tuple[Connector, ...]:
            return expand(make_connector(text) for text in texts)

        yield Subject(" + ".join(parse_spec(text).text for text in texts), make)


class _Notes(logging.Handler):
    """The last thing that was logged, instead of a log full of faults that are meant to happen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


@contextmanager
def _listening() -> Iterator[_Notes]:
    log, notes = logging.getLogger("ostinato"), _Notes()
    before = log.propagate
    log.propagate = False
    log.addHandler(notes)
    try:
        yield notes
    finally:
        log.removeHandler(notes)
        log.propagate = before
