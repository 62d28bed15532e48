"""kill -9 of the writer at any moment: the next process finds what was acknowledged, and nothing wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disk.support import CLEAR, close, folder_bytes, get, key, open_path, put

WRITER = Path(__file__).with_name("writer.py")
ROOMY, TIGHT = 64 << 20, 1 << 20
KILLS = 50
SEED = 77


def run_writer(path: Path, budget: int, seed: int, kill_at: int, seconds: float = 20.0) -> int:
    """Start the writer, see it die; how far it said that its records are durable."""
    command = [sys.executable, str(WRITER), str(path), str(budget), str(seed), str(kill_at)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL
    lines = output.splitlines(keepends=True)
    acknowledged = [int(line.split()[1]) for line in lines if line.endswith("\n")]  # the last may be torn
    return max(acknowledged, default=seed * 100_000)


def check_folder(path: Path, budget: int, seed: int, upto: int) -> None:
    first = seed * 100_000
    store = open_path(path, budget)
    assert folder_bytes(store.folder) <= budget
    numbers = list(range(first, upto + 100))
    claimed = [number for number in numbers if store.holds(CLEAR, CLEAR.name(key(number)))]
    found = get(store, numbers)
    assert len(found) == len(claimed), "the index says more than what is there"
    if budget == ROOMY:  # nothing was evicted
        missing = [number for number in range(first, upto) if number not in found]
        assert len(missing) <= 0.01 * (upto - first), f"{len(missing)} of {upto - first} are lost"
    assert put(store, range(10)) == 10
    assert get(store, list(range(10))) == set(range(10))
    close(store)


def kill_and_look(folder: Path, seed: int, budget: int) -> None:
    """Twice on the same folder, at points that a seed chooses."""
    rng = random.Random(SEED + seed)
    for life in range(2):
        number = 2 * seed + life + 1
        upto = run_writer(folder, budget, number, rng.choice((rng.randint(1, 30), rng.randint(30, 300))))
        check_folder(folder, budget, number, upto)


@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
@pytest.mark.parametrize("seed", range(KILLS // 4 + 1))
def test_kill(tmp_path: Path, seed: int, budget: int) -> None:
    kill_and_look(tmp_path / "kv", seed, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
@pytest.mark.parametrize("seed", range(100, 200))
def test_kill_at_length(tmp_path: Path, seed: int, budget: int) -> None:
    kill_and_look(tmp_path / "kv", seed, budget)


@pytest.mark.parametrize("seed", range(2))
def test_kill_from_outside(tmp_path: Path, seed: int) -> None:
    command_seconds = 0.8 + 0.3 * seed
    upto = run_writer(tmp_path / "kv", TIGHT, seed + 500, 0, command_seconds)
    check_folder(tmp_path / "kv", TIGHT, seed + 500, upto)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, str(WRITER), str(tmp_path / "kv"), str(ROOMY), "1", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(AssertionError, match="another writer"):
        open_path(tmp_path / "kv")
    child.kill()
    child.communicate()
    start = time.monotonic()
    close(open_path(tmp_path / "kv", ROOMY))
    assert time.monotonic() - start < 5
