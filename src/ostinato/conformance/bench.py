"""A connector in a whole engine, but for the model: the real loop, scheduler and hierarchy over workers of bytes.

Owns: driving it in real time, the comparison of every answer with the right one.  Does not own: its wiring, faults,
what a check asks for.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from ostinato.cache.pool import SlotState
from ostinato.conformance.model import UNIT, make_prompt, right_answer
from ostinato.conformance.verdict import Violation
from ostinato.conformance.watch import Watch, WatchedConnector
from ostinato.conformance.wiring import Setup, describe, wire
from ostinato.connectors.api import Connector
from ostinato.connectors.faulty import FaultyConnector
from ostinato.engine.loop import Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.hierarchy.tiers import StoreMode
from ostinato.ids import SlotId
from ostinato.sampling_params import SamplingParams
from ostinato.transfer.job import JobState

PATIENCE_S: Final = 60.0
"""How long a request or a transfer may take before it counts as lost."""
IDLE_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested.  ``make`` builds the tiers anew, on the same backing store; called several times.

    ``spoil`` changes some bytes of every record in the store, ``lose`` removes some records; None = not known how.
    """

    name: str
    make: Callable[[], Sequence[Connector]]
    spoil: Callable[[], None] | None = None
    lose: Callable[[], None] | None = None


class Bench:
    """One engine.  A context manager; leaving it closes the connectors."""

    def __init__(self, subject: Subject, setup: Setup) -> None:
        self.setup = setup
        self.closed = False
        self._names = itertools.count()
        self._right: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        watched = [WatchedConnector(connector, setup.looks) for connector in subject.make()]
        self.watches: tuple[Watch, ...] = tuple(connector.watch for connector in watched)
        self.connectors: tuple[Connector, ...] = tuple(
            connector if setup.faults is None else FaultyConnector(connector, setup.faults) for connector in watched
        )
        self.inner: tuple[Connector, ...] = tuple(connector.inner for connector in watched)
        self.parts: tuple[list[object], ...] = tuple(connector.parts for connector in watched)
        wired = wire(self.connectors, setup)
        self.workers, self.cache, self.engine = wired.workers, wired.cache, wired.engine

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(Exception):  # what went wrong first is what counts
                self.close()
            if (noted := [fault for watch in self.watches for fault in watch.faults]) and isinstance(error, Exception):
                raise Violation(f"{noted[0]}\n(and so: {error})") from error
            return
        self.close()
        self.complain()

    # Requests.

    def add(self, prompt: Sequence[int], count: int = 1, salt: str = "") -> str:
        name = f"request-{next(self._names)}"
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.engine.add(name, Prompt(None, list(prompt)), sampling, 0, salt)
        self._right[name] = right_answer(prompt, count, salt)
        return name

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = output
            right, given = self._right.pop(output.request_id), output.outputs[0].token_ids
            if given != right:
                raise Violation(f"{output.request_id} was answered with {given} instead of {right}")

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until ``until``, by default until every request is answered."""
        end = time.monotonic() + PATIENCE_S
        while not (until() if until is not None else not self.engine.has_work):
            self.step()
            if time.monotonic() > end:
                what = f"no end after {PATIENCE_S:.0f} s: a mover owes a report, or a probe an answer"
                raise Violation(f"{what}\n{describe(self.engine)}")

    def serve(self, prompt: Sequence[int], count: int = 1, salt: str = "") -> RequestOutput:
        """One request, and every transfer that it caused."""
        name = self.add(prompt, count, salt)
        self.run()
        self.settle()
        return self.outputs.pop(name)

    def settle(self, in_doubt: bool = False) -> None:
        """Let transfers end.  ``in_doubt``: but not wait for those that missed their deadline."""
        end = time.monotonic() + PATIENCE_S
        while any(not in_doubt or job.state is not JobState.IN_DOUBT for job in self.cache.core.book):
            self.step()
            self.workers.wait(IDLE_S)
            if time.monotonic() > end:
                raise Violation(
                    f"orders are not reported after {PATIENCE_S:.0f} s: one report per order\n{describe(self.engine)}"
                )

    def forget(self) -> None:
        """Empty the device, once the tiers below have what they take."""
        if any(tier.mode is StoreMode.LAZY for tier in self.cache.core.lower.values()):
            self._press()
        self.step()
        self.settle(in_doubt=True)
        self.cache.core.drop_idle(device_only=True)

    def lower(self, output: RequestOutput) -> int:
        """Tokens that were reused because of a tier below, once the device had forgotten everything."""
        return output.cached_tokens if output.bytes_loaded else 0

    # The end.

    def check_quiet(self) -> None:
        """Nothing is held or on its way."""
        self.settle()
        self.cache.audit()
        for tier in (self.cache.core.device, *self.cache.core.lower.values()):
            owners = sorted({lease.owner for lease in tier.pool.leases})
            if owners:
                raise Violation(f"no request is alive, but slots of {tier.tier} are still held: {', '.join(owners)}")
            states = {tier.pool.state(SlotId(slot)) for slot in range(tier.pool.capacity)}
            assert states <= {SlotState.FREE, SlotState.IDLE}, states

    def close(self) -> float:
        """Stop everything; seconds that it took."""
        if self.closed:
            return 0.0
        self.closed = True
        start = time.monotonic()
        self.engine.close()
        for connector in self.connectors:
            connector.close()
        took = time.monotonic() - start
        for rank in self.workers.ranks:
            rank.look()
        return took

    def complain(self) -> None:
        """Raise what was noted on the way."""
        for watch in self.watches:
            watch.complain()
            if watch.reports and not self.workers.notified:
                raise Violation(f"tier {watch.tier}: notify() was never called: call it when a report is ready")

    def _press(self) -> None:
        """Other prompts, until the device has evicted as much as it holds: only then a lazy tier gets anything."""
        retention = self.cache.core.device.retention
        end = retention.evictions + self.setup.pages
        for _ in range(self.setup.pages):
            self.add(make_prompt(8 * UNIT, secrets.token_hex()))
            self.run()
            if retention.evictions >= end:
                return
