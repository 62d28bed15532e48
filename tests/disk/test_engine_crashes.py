"""A whole engine over a disk tier that is killed, or whose power fails, at any moment.

The next engine gives the answers of a cold one, hits what was acknowledged, and keeps to the budget.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disk.chats import ask, check, model, start, tokens, whole
from disk.simulated import SimulatedFolder
from e2e.support import greedy, make_llm, same, settle
from ostinato.connectors.disk import connector
from ostinato.connectors.disk.store import DiskStore
from ostinato.engine.llm import LLM

FAMILIES = ("gemma3", "bamba")
LENGTHS = (113, 200, 65, 300, 130, 90)
BUDGET = 64 << 20


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kill_at(folder: Path, seed: int) -> None:
    """kill -9 before a random call of the operating system, twice on one folder."""
    rng = random.Random(seed)
    name = FAMILIES[seed % len(FAMILIES)]
    questions = [[name, tokens(length, seed + number), 3] for number, length in enumerate(LENGTHS)]
    for _ in range(2):
        child = start(folder, f"doomed:{rng.randint(1, 60)}", questions, seed)
        output, _ = child.communicate(timeout=240)
        assert child.returncode == -signal.SIGKILL
        answers = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
        for answer in answers:
            check(name, answer)
        durable = [answer["prompt"] for answer in answers if answer["durable"]]
        for answer in ask(folder, questions):
            check(name, answer)
            if answer["prompt"] in durable:
                assert answer["cached"] == whole(len(answer["prompt"]) - 1)
        used = sum(file.stat().st_blocks * 512 for file in (folder / name).iterdir())
        assert used <= BUDGET


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_an_engine_is_killed(tmp_path: Path, seed: int) -> None:
    kill_at(tmp_path, seed)


class Powered:
    """Engines over simulated folders; ``image`` is what a loss of power before one operation would have left."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.path = path
        self.runtime, self.oracle = model(name)
        self.monkeypatch = monkeypatch
        self.image: SimulatedFolder | None = None
        self.acknowledged: set[bytes] = set()
        path.mkdir()

    def open(self, folder: SimulatedFolder) -> LLM:
        folder.locked = False
        self.monkeypatch.setattr(connector, "OsFolder", lambda path: folder)
        return make_llm(self.runtime, kv=[f"disk:{self.path}:2MiB?mode=buffered"], max_num_batched_tokens=64)

    def cut(self, folder: SimulatedFolder, llm: LLM, at: int, rng: random.Random) -> Callable[[str], None]:
        def watch(what: str) -> None:
            if folder.operations >= at and self.image is None:
                entries = list(store_of(llm).catalog.index)
                self.acknowledged = {entry.name for entry in entries if entry.durable}
                self.image = folder.after_crash(rng)

        return watch

    def ask(self, llm: LLM, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            output = llm.generate(prompt, greedy(3))[0]
            assert same(output, self.oracle(prompt, 3)), output.cached_by_tier
            settle(llm)


def store_of(llm: LLM) -> DiskStore:
    tier: Any = llm.built.connectors[0]
    store = tier.store
    assert isinstance(store, DiskStore)
    return store


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_loses_power(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At ten points, over two lives each: some of what was not synced is there, some not, some torn."""
    rng = random.Random(seed)
    world = Powered(tmp_path / "kv", monkeypatch, name)
    folder = SimulatedFolder(2 << 20)
    prompts = [tokens(length, number) for number, length in enumerate(LENGTHS)]
    for _ in range(2):
        world.image, at = None, folder.operations + rng.randint(3, 80)
        with world.open(folder) as llm:
            folder.on_operation = world.cut(folder, llm, at, rng)
            world.ask(llm, rng.sample(prompts, 4))
            store_of(llm).flush()
            world.ask(llm, rng.sample(prompts, 2))
        folder = world.image or folder.after_crash(rng)
        with world.open(folder) as llm:
            there = {entry.name for entry in store_of(llm).catalog.index}
            lost = world.acknowledged - there if world.image is not None else set()
            assert len(lost) <= 0.01 * len(world.acknowledged), f"{len(lost)} of {len(world.acknowledged)} lost"
            world.ask(llm, prompts)
        assert folder.peak <= 2 << 20
