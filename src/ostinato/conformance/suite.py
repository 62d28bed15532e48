"""The kit as tests for pytest: a class to derive from.  It needs no plug-in and no configuration.

Owns: the translation of verdicts into what pytest says.  Does not own: the checks (``kit``).

::

    from ostinato.conformance.suite import ConnectorConformance

    class TestMyStore(ConnectorConformance):
        spec = "mystore://127.0.0.1:7000"

Each check is one test, ``TestMyStore::test_contract[delivers_what_was_stored]``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import pytest

from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import CHECKS, Check, run_check, subject_of
from ostinato.conformance.verdict import Outcome

_BY_NAME: Final = tuple(pytest.param(check, id=check.name) for check in CHECKS)


class ConnectorConformance:
    """All checks of one tier, or of several behind one another.

    Set ``spec``; or override the fixture ``specs``, which may use others, for an address that is only known then; or
    ``subject``, for a :class:`~ostinato.conformance.bench.Subject` that also says how to harm its store.
    """

    spec: ClassVar[str | Sequence[str]] = ()
    skip: ClassVar[Sequence[str]] = ()
    """Names of checks that do not apply; say why where you set it."""

    @pytest.fixture
    def specs(self) -> Sequence[str]:
        return (self.spec,) if isinstance(self.spec, str) else self.spec

    @pytest.fixture
    def subject(self, specs: Sequence[str]) -> Iterator[Subject]:
        if not specs:
            pytest.fail(f"{type(self).__name__}: set `spec`, or override the fixture `specs` or `subject`")
        with subject_of(specs) as subject:
            yield subject

    @pytest.mark.parametrize("check", _BY_NAME)
    def test_contract(self, check: Check, subject: Subject) -> None:
        if check.name in self.skip:
            pytest.skip("left out by the test class")
        verdict = run_check(check, subject)
        match verdict.outcome:
            case Outcome.FAILED:
                pytest.fail(f"{verdict.contract}\n\n{verdict.text}", pytrace=False)
            case Outcome.SKIPPED:
                pytest.skip(verdict.text)
            case Outcome.WARNED:
                warnings.warn(f"{verdict.check}: {verdict.text}", stacklevel=1)
            case Outcome.PASSED:
                pass
