"""What it costs a connector to look at the scheduler's blocks, and what it costs everybody else that it may.

* ``context.blocks(request_id)`` at 1,024 and at 131,072 tokens, six groups, against copying the tables: at most 1/50 of
  the copy at the long context, and no more than at the short one.
* a step of the engine over a fake worker, with a connector that has no hooks and without any: the difference in
  processor time and in calls (a connector that ignores the context must add none of the latter).

``python benchmarks/borrow.py [--check]``; ``--check`` exits 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from field.rig import Rig, fake_rig, layout_of
from field.scripted import ScriptedTier
from ostinato.cache.kinds import Full, Window
from ostinato.cache.table import BlockTable
from ostinato.connectors.api import Ownership
from ostinato.connectors.context import KVConnectorSchedulerContext, Source
from ostinato.ids import HOLE, RequestId, SlotId

LAYOUT = layout_of(*[Window(512)] * 5, Full())
REQUEST = RequestId("r")
LONG, SHORT = 131_072, 1_024
SHARE = 50
"""A borrow may cost one of so many parts of a copy."""
GROWTH = 1.5
"""Times the short context's cost, to tell a cost that grows (128 times) from noise."""
ROUNDS, CALLS = 15, 2_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    short, long, holes = borrow(SHORT), borrow(LONG), borrow(LONG, holes=True)
    print(f"borrow of 6 groups: {short[0] * 1e6:.2f} us at {SHORT:,} tokens, {long[0] * 1e6:.2f} us at {LONG:,}")
    print(f"copy of the tables: {short[1] * 1e6:.2f} us at {SHORT:,} tokens, {long[1] * 1e6:.2f} us at {LONG:,}")
    print(f"with holes behind five windows of 512: borrow {holes[0] * 1e6:.2f} us, copy {holes[1] * 1e6:.2f} us")
    without, ignoring, calls = steps()
    print(f"a step: {without * 1e6:.0f} us without a connector, {ignoring * 1e6:.0f} us with one that ignores")
    print(f"calls of a step that a connector without hooks adds to the scheduler's thread: {calls}")
    results = {
        f"a borrow costs at most 1/{SHARE} of a copy, six full tables": long[0] * SHARE <= long[1],
        f"a borrow costs at most 1/{SHARE} of a copy, holes behind windows": holes[0] * SHARE <= holes[1],
        "a borrow does not grow with the context": long[0] <= GROWTH * short[0],
        "a connector that ignores the context adds no work to a step": calls == 0,
    }
    for name, passed in results.items():
        print(f"{'pass' if passed else 'MISS'}  {name}")
    print(f"a copy costs {long[1] / long[0]:,.0f} borrows at {LONG:,} tokens, {holes[1] / holes[0]:,.0f} with holes")
    return 1 if check and not all(results.values()) else 0


def borrow(tokens: int, holes: bool = False) -> tuple[float, float]:
    """Processor seconds of one borrow of all groups, and of one copy of the tables.

    ``holes``: the windows' rows as they are in a running request, which is cheaper to copy.
    """
    rig = fake_rig(LAYOUT, 10)
    core = rig.cache.core
    lease = core.device.pool.take(1, "table")
    assert lease is not None
    table = BlockTable(REQUEST, LAYOUT.groups, lease)
    pages = tokens // 16
    # Numbers of their own, as they come from a pool that has been in use.
    slots = random.Random(1).sample(range(1 << 20), pages * len(table.rows))
    for index, row in enumerate(table.rows):
        row.extend(SlotId(slot) for slot in slots[index * pages : (index + 1) * pages])
        if holes and index < len(table.rows) - 1:
            row[: pages - 32] = [HOLE] * (pages - 32)
    context = KVConnectorSchedulerContext(
        Source({REQUEST: table}.get), core.device.pool, core.device.retention, core.directory
    )
    copies = max(20, CALLS * SHORT // tokens)
    return per_call(lambda: context.blocks(REQUEST), CALLS), per_call(lambda: [list(row) for row in table.rows], copies)


def per_call(call: Callable[[], object], count: int) -> float:
    """The least of several rounds: what else the machine does only adds."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(count):
            call()
        best = min(best, (time.thread_time() - start) / count)
    return best


def steps() -> tuple[float, float, int]:
    """Processor seconds of a decoding step without and with an ignoring connector, and the calls that it adds."""
    rigs = [decoding([]), decoding([ScriptedTier("ignores", Ownership.KEPT)])]
    for rig in rigs:
        rig.step(20)
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for rig, found in zip(rigs, times, strict=True):
            start = time.thread_time()
            rig.step(30)
            found.append((time.thread_time() - start) / 30)
    counts = [calls_of(rig) for rig in rigs]
    return statistics.median(times[0]), statistics.median(times[1]), counts[1] - counts[0]


def decoding(tiers: Sequence[ScriptedTier]) -> Rig:
    """One request in the middle of its answer."""
    rig = fake_rig(LAYOUT, 1_000, tiers, audited=False)
    rig.add(list(range(100)), 5_000)
    return rig


def calls_of(rig: Rig) -> int:
    """Python calls inside one step that fills no block, but for the fake worker's own."""
    while rig.engine.scheduler.requests and next(iter(rig.engine.scheduler.requests.values())).computed % 16 != 8:
        rig.step()
    count = 0
    execute = rig.engine.executor.execute

    def watch(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def unwatched(plan: object) -> object:
        sys.setprofile(None)
        result = execute(plan)  # type: ignore[arg-type]
        sys.setprofile(watch)
        return result

    rig.engine.executor.execute = unwatched  # type: ignore[method-assign]
    sys.setprofile(watch)
    rig.step()
    sys.setprofile(None)
    return count


if __name__ == "__main__":
    sys.exit(main())
