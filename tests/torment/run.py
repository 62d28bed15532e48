"""Run the simulator for as long as one likes: ``make simulate``, or ``python tests/torment/run.py --help``.

Owns: the command line, processes, the report.  Every program has a seed of its own; one that fails is printed with the
command that replays it, switch by switch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torment.program import Program

REPORT_S = 10.0


def main() -> int:
    options = _options()
    if options.replay is not None:
        return _replay(options)
    return _work(options) if options.processes == 1 else _share_out(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Random programs over the cache and all connectors, every byte checked."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1 << 62, help="stop after so many scheduler steps in all")
    parser.add_argument("--first", type=int, default=int(time.time()) * 1000, help="first seed (default: a new one)")
    parser.add_argument("--stride", type=int, default=1, help="distance of seeds")
    parser.add_argument("--length", type=int, default=400, help="steps of one program (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=int, help="only this seed, with every event printed")
    return parser.parse_args()


def _replay(options: argparse.Namespace) -> int:
    program = Program(options.replay, options.length, print)
    print(program.describe())
    program.run()
    print(f"{program.counts}\nno fault; digest {program.digest}")
    return 0


def _work(options: argparse.Namespace) -> int:
    """One process: seeds one after the other; the state so far as a line of JSON now and then."""
    begin = reported = time.monotonic()
    totals, seed, programs = Counter[str](), options.first, 0
    while time.monotonic() - begin < options.seconds and totals["steps"] < options.steps:
        program = Program(seed, options.length)
        try:
            counts = program.run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                break
            traceback.print_exc()
            print(f"FAILED: {program.describe()}, step {program.counts.steps}: {type(error).__name__}: {error}")
            print(f"replay: python tests/torment/run.py --replay {seed} --length {options.length}", flush=True)
            return 1
        totals.update({name: value for name, value in dataclasses.asdict(counts).items() if isinstance(value, int)})
        totals.update({f"hit tokens {tier}": tokens for tier, tokens in counts.by_tier.items()})
        totals["switches"] += program.kernel.switches
        programs, seed = programs + 1, seed + options.stride
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            _report(totals, programs, options.first, reported - begin)
    _report(totals, programs, options.first, time.monotonic() - begin)
    return 0


def _report(totals: Counter[str], programs: int, first: int, seconds: float) -> None:
    line = {"first_seed": first, "programs": programs, "seconds": round(seconds, 1)}
    line["steps_per_second"] = round(totals["steps"] / max(seconds, 1e-9))
    print(json.dumps(line | dict(totals)), flush=True)


def _share_out(options: argparse.Namespace) -> int:
    """Several processes, each with seeds of its own; the first that fails ends all."""
    processes = []
    for number in range(options.processes):
        command = [sys.executable, __file__, "--seconds", str(options.seconds), "--length", str(options.length)]
        command += ["--steps", str(options.steps // options.processes), "--stride", str(options.processes)]
        processes.append(subprocess.Popen([*command, "--first", str(options.first + number)]))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            process.terminate()
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
