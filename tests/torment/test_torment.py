"""A short run of the simulator, its replay, seeds that once failed, and proof that it finds what is broken."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ostinato.connectors.disk.codec as codec
import ostinato.connectors.store_mover as store_mover
import ostinato.hierarchy.settlement as settlement
from ostinato.cache.pool import Lease
from ostinato.ids import Step
from ostinato.transfer.job import TransferJob
from torment.program import Program

KEPT: tuple[tuple[int, int], ...] = ()
"""Seeds and lengths of programs that failed once.  They stay ordinary examples when the simulator changes."""
FOUND_WITHIN_S = 60.0


def test_short_programs() -> None:
    hits = 0
    for seed in range(10):
        hits += Program(seed, 80).run().hit_tokens
    assert hits > 200, "programs without hits prove little"


def test_a_seed_replays_exactly() -> None:
    one, other = Program(5, 80), Program(5, 80)
    assert one.run() == other.run()
    assert one.digest == other.digest
    assert one.kernel.switches == other.kernel.switches > 0
    different = Program(6, 80)
    different.run()
    assert different.digest != one.digest


@pytest.mark.parametrize(("seed", "length"), KEPT)
def test_kept_seeds(seed: int, length: int) -> None:
    Program(seed, length).run()


@pytest.mark.slow
def test_replay_does_not_depend_on_the_process() -> None:
    script = "from torment.program import Program; p = Program(2, 200); p.run(); print(p.digest)"
    path = [str(Path(__file__).parents[1]), *sys.path]
    digests = set()
    for number in ("1", "2"):
        environment = {"PYTHONHASHSEED": number, "PYTHONPATH": ":".join(path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.slow
def test_many_programs() -> None:
    for seed in range(10_000, 10_150):
        Program(seed, 400).run()


# Each known way to break the engine is found soon.

Patch = pytest.MonkeyPatch


def forget_fences(patch: Patch) -> None:
    """Blocks that the step in flight still reads or writes come free at once."""
    release = Lease.release

    def careless(self: Lease, fence: Step | None = None) -> None:
        release(self)

    patch.setattr(Lease, "release", careless)


def release_twice(patch: Patch) -> None:
    """The end of a transfer gives up one of its blocks twice, when that does not show at once."""
    release = settlement.release

    def twice(job: TransferJob) -> None:
        release(job)
        pool = job.device_lease._pool
        for slot in {move.device_slot for move in job.order.moves}:
            if pool.references(slot):
                pool.unref(slot, None)
                return

    patch.setattr(settlement, "release", twice)


def believe_every_record(patch: Patch) -> None:
    """Trailers are not compared with anything."""
    patch.setattr(store_mover, "check", lambda *_: None)
    patch.setattr(codec, "check", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [forget_fences, release_twice, believe_every_record], ids=lambda it: it.__name__)
def test_what_is_broken_is_found(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    begin = time.process_time()
    for seed in range(1_000_000):
        program = Program(seed, 400)
        try:
            program.run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            took = time.process_time() - begin
            print(f"seed {seed}, step {program.counts.steps}, {took:.1f} s: {type(error).__name__}: {error}")
            return
        assert time.process_time() - begin < FOUND_WITHIN_S, f"{seed + 1} programs, and nobody noticed"
