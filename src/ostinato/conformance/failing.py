"""Checks of a tier that fails: whatever goes wrong is a miss, and no answer is wrong.

The faults come from ``connectors.faulty``, around the connector: what its movers report and what it answers is bent on
the way to the engine.  Each check is a function of a :class:`Subject`; its docstring is the contract that it proves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from ostinato.conformance.bench import Bench, Subject
from ostinato.conformance.delivering import LENGTH, is_asked, reuse
from ostinato.conformance.model import HYBRID, make_prompt
from ostinato.conformance.verdict import Unsuitable, Violation
from ostinato.conformance.wiring import Setup
from ostinato.connectors.api import Connector
from ostinato.connectors.faults import Faults
from ostinato.connectors.faulty import FaultyConnector, innermost
from ostinato.connectors.store import StoreConnector
from ostinato.ids import JobId
from ostinato.transfer.job import JobKind


def takes_lies_for_misses(subject: Subject) -> None:
    """What a probe promised and is gone by the load is computed again; what it denied is not missed."""
    for lie in (1.0, 0.3):
        with Bench(subject, Setup(HYBRID, faults=Faults(3, lie=lie))) as bench:
            if not is_asked(bench):
                raise Unsuitable("the tier is owned: it is not asked")
            _revisit(bench, 5)
            bench.check_quiet()


def takes_failed_moves_for_misses(subject: Subject) -> None:
    """Loads and stores of which a part fails: the part is computed again, and rubbish in its place is never read."""
    with Bench(subject, Setup(HYBRID, faults=Faults(4, fail=0.4))) as bench:
        _revisit(bench, 6)
        bench.check_quiet()


def finds_changed_bytes(subject: Subject) -> None:
    """A record of which a single bit was changed on its way is a miss: the connector compares trailers."""
    if not all(isinstance(innermost(connector), StoreConnector) for connector in _made(subject)):
        raise Unsuitable("no tier on StoreConnector, whose records can be changed on their way")
    with Bench(subject, Setup(HYBRID, faults=Faults(5, corrupt=0.5))) as bench:
        _revisit(bench, 5)
        spoilt = sum(each.counts["corrupt"] for each in bench.connectors if isinstance(each, FaultyConnector))
        found = sum(sum(each.faults.values()) for each in bench.inner if isinstance(each, StoreConnector))
        if found < spoilt:
            raise Violation(f"{spoilt} records were changed on their way, and {found} counted as faulty")
        bench.check_quiet()


def finds_changed_records(subject: Subject) -> None:
    """Records that were changed in the store itself are misses, and can be replaced by good ones."""
    if subject.spoil is None:
        raise Unsuitable("it is not known how to change what the store holds (give the kit a `spoil` function)")
    setup = Setup(HYBRID)
    prompt = make_prompt(LENGTH, "spoil")
    with Bench(subject, setup) as bench:
        reuse(bench, prompt)
    subject.spoil()
    with Bench(subject, setup) as bench:
        bench.serve(prompt, 3)
        bench.forget()
        bench.serve(prompt, 3)
        bench.check_quiet()


def bears_late_reports(subject: Subject) -> None:
    """A transfer that missed its deadline keeps its pages until its report comes, and then gives them back."""
    with Bench(subject, Setup(HYBRID, pages=120, faults=Faults(6, delay=0.6), deadline_s=0.15)) as bench:
        _revisit(bench, 3)
        if not bench.cache.core.book.stats.in_doubt:
            raise Violation("no transfer missed its deadline although all reports were late: nothing was moved at all")
        bench.check_quiet()


def bears_lost_reports(subject: Subject) -> None:
    """A report that never comes costs the pages of its order and nothing else: requests go on without them."""
    with Bench(subject, Setup(HYBRID, pages=300, faults=Faults(7, drop=0.15), deadline_s=0.2)) as bench:
        _revisit(bench, 4)
        bench.cache.audit()


def bears_disorder(subject: Subject) -> None:
    """Reports that are late, out of order, double, and some of failures: all at once, and every answer is right."""
    faults = Faults(8, delay=0.05, reorder=0.4, duplicate=0.4, fail=0.2, lie=0.1)
    with Bench(subject, Setup(HYBRID, pages=80, faults=faults)) as bench:
        source = random.Random(8)
        stems = [make_prompt(160, ("disorder", number)) for number in range(3)]
        for _ in range(3):
            for _ in range(5):
                bench.add([*source.choice(stems)[: source.randrange(30, 160)], *make_prompt(9, source.random())], 2)
            bench.run()
            bench.forget()
        bench.check_quiet()


def joins_ranks_that_differ(subject: Subject) -> None:
    """With two workers, what failed on one of them has failed."""
    with Bench(subject, Setup(HYBRID, ranks=2, faults=Faults(9, fail=0.3))) as bench:
        _revisit(bench, 4)
        bench.check_quiet()


def reports_what_is_cancelled(subject: Subject) -> None:
    """A cancelled order is reported once, done or failed; to cancel what is over or never was does nothing."""
    with Bench(subject, Setup(HYBRID)) as bench:
        prompt = make_prompt(LENGTH, "cancel")
        reuse(bench, prompt)
        bench.forget()
        bench.add(prompt, 2)
        for _ in range(3):
            bench.step()
            _cancel_all(bench, JobKind.LOAD)
        bench.run()
        bench.add([*prompt, *make_prompt(90, "more")], 2)
        while bench.engine.has_work:
            bench.step()
            _cancel_all(bench, JobKind.STORE)
        bench.check_quiet()
        bench.serve(prompt)


def bears_aborts(subject: Subject) -> None:
    """Requests that end while they wait for a load, or while their blocks are being stored, leave nothing behind."""
    source = random.Random(10)
    prompts = [make_prompt(LENGTH, ("abort", number)) for number in range(3)]
    with Bench(subject, Setup(HYBRID, pages=80)) as bench:
        for prompt in prompts:
            bench.serve(prompt)
        for _ in range(12):
            bench.forget()
            name = bench.add(source.choice(prompts), 4)
            for _ in range(source.randrange(4)):
                bench.step()
            bench.engine.abort(name)
        bench.run()
        bench.check_quiet()


def _made(subject: Subject) -> Sequence[Connector]:
    """Connectors of this subject, closed again."""
    made = subject.make()
    for connector in made:
        connector.close()
    return made


def _revisit(bench: Bench, prompts: int) -> None:
    """Some prompts, again and again; each time the device has forgotten them."""
    asked = [make_prompt(LENGTH - 17 * number, ("revisit", number)) for number in range(prompts)]
    for _ in range(3):
        for prompt in asked:
            bench.add(prompt, 2)
            bench.run()
        bench.forget()
        time.sleep(0.01)


def _cancel_all(bench: Bench, kind: JobKind) -> None:
    for rank in bench.workers.ranks:
        for tier, mover in rank.movers.items():
            mover.cancel(JobId(1 << 30))
            for job in list(bench.cache.core.book):
                if job.order.kind is kind and job.order.tier == tier and job.state.value == "started":
                    mover.cancel(job.job_id)


CHECKS: Final[tuple[Callable[[Subject], None], ...]] = (
    takes_lies_for_misses,
    takes_failed_moves_for_misses,
    finds_changed_bytes,
    finds_changed_records,
    bears_late_reports,
    bears_lost_reports,
    bears_disorder,
    joins_ranks_that_differ,
    reports_what_is_cancelled,
    bears_aborts,
)
