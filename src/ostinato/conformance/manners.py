"""Checks of a tier's manners: what it keeps, how long it takes, how it ends.

Each check is a function of a :class:`Subject`; its docstring is the contract that it proves.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ostinato.conformance.bench import Bench, Subject
from ostinato.conformance.delivering import LENGTH
from ostinato.conformance.kept import weigh
from ostinato.conformance.model import HYBRID, UNIT, make_prompt
from ostinato.conformance.verdict import Slow, Unsuitable, Violation
from ostinato.conformance.watch import Watch
from ostinato.conformance.wiring import Setup

TYPICAL_S: Final = 0.002
WORST_S: Final = 0.020
CLOSE_S: Final = 10.0
"""How long closing may take with a store that answers."""
TRIES: Final = 3
REQUESTS: Final = 300
GROWTH: Final = 1.1
SLACK_BYTES: Final = 64 << 10


def keeps_no_blocks(subject: Subject) -> None:
    """After a hook or a question the connector keeps no view of blocks and no block's id, but in a pin or an order."""
    with Bench(subject, Setup(HYBRID, looks=True)) as bench:
        for number in range(3):
            prompt = make_prompt(80 + 30 * number, ("kept", number))
            bench.serve(prompt, 3)
            bench.forget()
            bench.serve(prompt, 3)
        for watch in bench.watches:
            if watch.kept:
                raise Violation(f"tier {watch.tier}, {watch.kept[0]}")
        bench.check_quiet()


def never_blocks(subject: Subject) -> None:
    """A call on the scheduler's or the worker's thread returns at once: 99 of 100 within 2 ms, all within 20 ms."""
    for left in reversed(range(TRIES)):
        try:
            _time_calls(subject)
        except Violation:
            # Another process may have had the processor all the time: what waits by itself does so again.
            if not left:
                raise
        else:
            return


def _time_calls(subject: Subject) -> None:
    source = random.Random(11)
    stems = [make_prompt(180, ("block", number)) for number in range(4)]
    with Bench(subject, Setup(HYBRID)) as bench:
        for _ in range(30):
            stem = source.choice(stems)
            bench.add([*stem[: source.randrange(40, 180)], *make_prompt(5, source.random())], 2)
            if source.random() < 0.2:
                bench.run()
                bench.forget()
        bench.run()
        bench.settle()
    slow = [_judge(watch, name) for watch in bench.watches for name in watch.seconds]
    if any(slow):
        raise Slow("; ".join(filter(None, slow)) + "; this machine is too busy to tell more")


def keeps_bounded_memory(subject: Subject) -> None:
    """After 300 requests for the same few prompts the connector keeps no more than after 60."""
    prompts = [make_prompt(5 * UNIT + 7 * number, ("memory", number)) for number in range(6)]
    with Bench(subject, Setup(HYBRID, pages=80)) as bench:
        weights, threads = [], []
        for number in range(REQUESTS):
            bench.add(prompts[number % len(prompts)], 1)
            bench.run()
            if number % 30 == 29:
                bench.forget()
            if number + 1 in (REQUESTS // 5, REQUESTS):
                bench.settle()
                weights.append(sum(weigh(parts) for parts in bench.parts))
                threads.append(threading.active_count())
        if weights[1] > GROWTH * weights[0] + SLACK_BYTES:
            raise Violation(
                f"what can be reached from the connector grew from {weights[0]:,} to {weights[1]:,} bytes over "
                f"{REQUESTS * 4 // 5} requests for prompts that it knew: something is kept for each request"
            )
        if threads[1] > threads[0] + 2:
            raise Violation(f"the threads of this process grew from {threads[0]} to {threads[1]}")
        bench.check_quiet()


def closes_in_time(subject: Subject) -> None:
    """Closing takes seconds, also while transfers are under way; then no thread is left, and no page changes."""
    threads = set(threading.enumerate())
    with Bench(subject, Setup(HYBRID)) as bench:
        prompt = make_prompt(LENGTH, "close")
        bench.serve(prompt)
        bench.forget()
        bench.add(prompt, 2)
        bench.add(make_prompt(LENGTH, "other"), 2)
        for _ in range(4):
            bench.step()
        took = bench.close()
        if took > CLOSE_S:
            raise Violation(f"close() took {took:.1f} s, more than {CLOSE_S:.0f}")
        for rank in bench.workers.ranks:
            rank.end()
        until = time.monotonic() + 2.0
        while (left := _new(threads)) and time.monotonic() < until:
            time.sleep(0.02)
        if left:
            raise Violation(f"threads go on after close(): {', '.join(sorted(left))}")
        for rank in bench.workers.ranks:
            rank.look()


def closes_without_work(subject: Subject) -> None:
    """An engine that served nobody closes at once."""
    with Bench(subject, Setup(HYBRID)) as bench:
        took = bench.close()
    if took > CLOSE_S / 2:
        raise Violation(f"close() took {took:.1f} s although nothing was ever asked for")


def gets_hooks_only_if_declared(subject: Subject) -> None:
    """A connector's hooks are called while it has declared them, and raise nothing."""
    with Bench(subject, Setup(HYBRID)) as bench:
        declared = [hook for each in bench.connectors for hook in each.capabilities.hooks]
        if not declared:
            raise Unsuitable("the connector declares no hooks, and costs nothing per step")
        for number in range(3):
            bench.serve(make_prompt(60 + 40 * number, ("hooks", number)), 3)
        for watch, connector in zip(bench.watches, bench.connectors, strict=True):
            for hook in connector.capabilities.hooks:
                if not watch.seconds.get(f"on_{hook.value}"):
                    raise Violation(f"tier {watch.tier} declares the hook {hook.value}, which never comes")
        bench.check_quiet()


def _judge(watch: Watch, name: str) -> str:
    """Raises if calls of ``name`` wait for something; text if they were slow, but not more than the machine is."""
    seconds, control = sorted(watch.seconds[name]), sorted(watch.control)
    typical, worst = seconds[len(seconds) * 99 // 100], seconds[-1]
    if typical <= TYPICAL_S and worst <= WORST_S:
        return ""
    calls = f"{len(seconds)} calls of {name}() of tier {watch.tier}"
    text = f"{calls} took up to {worst * 1e3:.1f} ms, {typical * 1e3:.1f} ms in 99 of 100"
    waits = _share(seconds, TYPICAL_S) > 0.5 + _share(control, TYPICAL_S)
    stalls = _share(seconds, WORST_S) > max(3 / len(seconds), 0.03) + 4 * _share(control, WORST_S)
    if waits or stalls:
        raise Violation(f"{text}: leave what waits to a thread of your own")
    return text


def _share(seconds: Sequence[float], limit: float) -> float:
    return sum(each > limit for each in seconds) / len(seconds)


def _new(before: Iterable[threading.Thread]) -> set[str]:
    known = set(before)
    return {thread.name for thread in threading.enumerate() if thread not in known and thread.is_alive()}


CHECKS: Final[tuple[Callable[[Subject], None], ...]] = (
    gets_hooks_only_if_declared,
    keeps_no_blocks,
    never_blocks,
    keeps_bounded_memory,
    closes_in_time,
    closes_without_work,
)
