"""Checks of a tier that works: what it delivers, to whom, and that it is what was stored.

Each check is a function of a :class:`Subject`; its docstring is the contract that it proves, its name the check's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.cache.kinds import Full, Window
from ostinato.conformance.bench import Bench, Subject
from ostinato.conformance.model import HYBRID, LAYOUTS, PLAIN, UNIT, make_layout, make_prompt
from ostinato.conformance.verdict import Unsuitable, Violation
from ostinato.conformance.wiring import Setup
from ostinato.connectors.api import Ownership
from ostinato.ids import GroupId

TRIES: Final = 4
"""A tier need not take everything at once, and may believe for some seconds that it has not; then it should have it."""
LENGTH: Final = 13 * UNIT + 5


def is_asked(bench: Bench) -> bool:
    return any(each.capabilities.ownership is not Ownership.OWNED for each in bench.connectors)


def reuse(bench: Bench, prompt: Sequence[int], salt: str = "") -> int:
    """Tokens that come back from below once the device has forgotten ``prompt``, in the best of some tries."""
    best = 0
    for pause in range(TRIES):
        time.sleep(pause)
        bench.serve(prompt, salt=salt)
        bench.forget()
        best = max(best, bench.lower(bench.serve(prompt, 3, salt)))
        if best >= len(prompt) // UNIT * UNIT - UNIT:
            break
        bench.forget()
    return best


def starts_and_stops(subject: Subject) -> None:
    """A connector that was made but never opened can be closed; `capabilities` say what it is before it is opened."""
    for connector in subject.make():
        if not str(connector.tier) or connector.tier == "device":
            raise Violation(f"capabilities.tier is {connector.tier!r}: a name of its own, and not the device's")
        connector.close()


def delivers_what_was_stored(subject: Subject) -> None:
    """What the device forgot comes back: full attention, windows and recurrent state, pages of several units."""
    for layout in LAYOUTS:
        with Bench(subject, Setup(layout)) as bench:
            prompt = make_prompt(LENGTH, "deliver")
            best = reuse(bench, prompt)
            if not best:
                raise Violation(
                    f"nothing of a prompt that was computed {TRIES} times ever came back from below (groups: "
                    f"{', '.join(type(spec.kind).__name__ for spec in layout.groups)}); "
                    f"{_traffic(bench)}"
                )
            if best < LENGTH // UNIT * UNIT - UNIT:
                raise Violation(f"of {LENGTH} tokens only {best} ever came back from below; {_traffic(bench)}")
            bench.check_quiet()


def extends_a_prompt(subject: Subject) -> None:
    """A longer prompt reuses the whole units of its beginning, and adds the rest to the tier."""
    with Bench(subject, Setup(HYBRID)) as bench:
        turn = make_prompt(40, "turn")
        for number in range(6):
            output = bench.serve(turn, 7)
            turn = [*turn, *output.outputs[0].token_ids, *make_prompt(11, number)]
            bench.forget()
        if not bench.lower(bench.serve(turn)):
            raise Violation("a conversation of six turns never continued from what the tier had of it")
        bench.check_quiet()


def survives_much_traffic(subject: Subject) -> None:
    """Many requests at once, few device pages, preemptions: every byte that is read is right, and nothing is leaked."""
    source = random.Random(1)
    stems = [make_prompt(200, ("stem", number)) for number in range(4)]
    with Bench(subject, Setup(HYBRID, pages=60, max_running=6)) as bench:
        for _ in range(8):
            for _ in range(8):
                stem = source.choice(stems)[: source.randrange(20, 200)]
                bench.add([*stem, *make_prompt(source.randrange(1, 30), source.random())], 3)
            bench.run()
            if source.random() < 0.5:
                bench.forget()
        bench.check_quiet()


def shortens_hits_at_holes(subject: Subject) -> None:
    """What is there in part is used as far as every group has it, and never beyond."""
    source = random.Random(2)
    stem = make_prompt(300, "holes")
    layout = make_layout((Full(), 1), (Window(40), 1))
    with Bench(subject, Setup(layout, pages=50)) as bench:
        for number in range(12):
            cut = source.randrange(30, 300)
            bench.serve([*stem[:cut], *make_prompt(source.randrange(1, 40), number)], 2)
            bench.cache.core.drop_idle(device_only=True)
            _evict_some(bench, number)
            if subject.lose is not None:
                subject.lose()
        bench.check_quiet()


def evicts_when_full(subject: Subject) -> None:
    """More is stored than a small tier holds: what is gone is a miss, and what is left is right."""
    with Bench(subject, Setup(PLAIN, pages=30)) as bench:
        prompts = [make_prompt(10 * UNIT + 3, ("evict", number)) for number in range(24)]
        for prompt in [*prompts, *prompts[::3], *reversed(prompts)]:
            bench.serve(prompt, 2)
        bench.check_quiet()


def knows_only_its_keys(subject: Subject) -> None:
    """A key that was never stored is not held, and the answer comes within the time that the engine waits."""
    with Bench(subject, Setup(PLAIN)) as bench:
        if not is_asked(bench):
            raise Unsuitable("the tier is owned: the engine knows what it holds")
        bench.serve(make_prompt(LENGTH, "known"))
        keys = [BlockKey(GroupId(0), random.Random(number).randbytes(32)) for number in range(50)]
        for probe in bench.cache.core.asked.values():
            answer = None

            def ask() -> bool:
                nonlocal answer
                answer = probe.probe(keys)  # noqa: B023
                bench.workers.wait(0.001)
                return answer is not None

            bench.run(ask)
            if answer is not None and any(answer):
                raise Violation(f"tier {probe.tier} says that it holds keys that nobody has ever stored")


def keeps_namespaces_apart(subject: Subject) -> None:
    """Another model's engine never uses a record, nor does a request with another salt."""
    setup = Setup(HYBRID)
    prompt = make_prompt(LENGTH, "namespace")
    with Bench(subject, setup) as bench:
        reuse(bench, prompt)
        bench.forget()
        if hit := bench.serve(prompt, salt="another").cached_tokens:
            raise Violation(f"a request with another salt was given {hit} tokens of the first one")
    with Bench(subject, replace(setup, namespace=b"another model's")) as bench:
        if hit := bench.serve(prompt).cached_tokens:
            raise Violation(f"an engine of another model was given {hit} tokens of the first one's")


def outlives_a_restart(subject: Subject) -> None:
    """What a kept or shared tier took is there for the next engine on the same store; an owned tier starts empty."""
    setup = Setup(HYBRID)
    prompt = make_prompt(LENGTH, "restart")
    with Bench(subject, setup) as bench:
        asked = is_asked(bench)
        before = reuse(bench, prompt)
    with Bench(subject, setup) as bench:
        after = bench.lower(bench.serve(prompt, 3))
        if not asked and after:
            raise Violation(f"the tier is owned, but a new engine found {after} tokens in it")
        if asked and before and not after:
            raise Violation("a new connector on the same store found nothing of what the one before it had delivered")
        bench.check_quiet()


def serves_two_workers(subject: Subject) -> None:
    """With two worker ranks a transfer is done when both have reported; each rank gets the bytes of its own share."""
    with Bench(subject, Setup(HYBRID, ranks=2)) as bench:
        if not reuse(bench, make_prompt(LENGTH, "ranks")):
            raise Violation("with two ranks nothing ever came back: make_mover() is called once for each rank")
        for number in range(4):
            bench.serve(make_prompt(90 + 20 * number, ("rank", number)), 2)
            bench.forget()
            bench.serve(make_prompt(90 + 20 * number, ("rank", number)), 2)
        bench.check_quiet()


def _evict_some(bench: Bench, more: int) -> None:
    """As if others had filled the owned tiers."""
    for tier in bench.cache.core.lower.values():
        lease = tier.pool.take(min(tier.pool.available, tier.pool.capacity // 8 + more), "a check")
        if lease is not None:
            lease.release()


def _traffic(bench: Bench) -> str:
    return "; ".join(
        f"tier {watch.tier} reported {watch.stored} stored and {watch.loaded} loaded moves" for watch in bench.watches
    )


CHECKS: Final[tuple[Callable[[Subject], None], ...]] = (
    starts_and_stops,
    delivers_what_was_stored,
    extends_a_prompt,
    survives_much_traffic,
    shortens_hits_at_holes,
    evicts_when_full,
    knows_only_its_keys,
    keeps_namespaces_apart,
    outlives_a_restart,
    serves_two_workers,
)
