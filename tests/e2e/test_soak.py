"""A soak: random engines under random traffic and faults, compared with cold, for as long as is asked.

Each episode draws a configuration (pool, host tier down to one slot, budget down to one token per step, policy, faults)
and traffic for it from one seed, so that a failure is repeated by its seed alone::

    OSTINATO_SOAK_SECONDS=600 OSTINATO_SOAK_SEED=7000 pytest -m soak -o faulthandler_timeout=7200
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.faults import Faults, FaultyMover
from e2e.support import UNIT, Oracle, assert_at_rest, greedy, make_llm, same, tokens
from e2e.traffic import LONGEST_ANSWER, LONGEST_PROMPT
from ostinato.connectors.host import HostConnector
from ostinato.engine.llm import LLM
from ostinato.engine.loop import Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.ids import TierId
from ostinato.runtime.load import Runtime

SECONDS = float(os.environ.get("OSTINATO_SOAK_SECONDS", "60"))
FIRST_SEED = int(os.environ.get("OSTINATO_SOAK_SEED", "0"))
HOST = TierId("host")
QUIET_STEPS = 400
"""Steps in a row without any token that count as a hang; each waits for a mover when there is nothing to compute."""


@dataclass(frozen=True)
class Asked:
    """One request of an episode."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    salt: str


class Episode:
    """One engine from start to close."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = self._draw(runtime)
        self.faults = self._draw_faults()
        self.asked: dict[str, Asked] = {}
        self.done: dict[str, RequestOutput] = {}
        self.live: list[str] = []
        self.seed = seed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostConnector, "make_mover", self._make_mover)
            self.llm: LLM = make_llm(runtime, **self.settings)

    def run(self) -> None:
        """Traffic until all requests have ended."""
        engine, source = self.llm.built.engine, self.random
        left, quiet = source.randint(5, 40), 0
        burst, aborts, resets = source.choice((0.02, 0.3, 1.0)), source.choice((0, 0.02)), source.choice((0, 0.02, 0.2))
        while left or engine.has_work:
            while left and source.random() < burst:
                left -= 1
                self._add(f"r{left}")
            if self.live and source.random() < aborts:
                self._abort(source.choice(self.live))
            if source.random() < resets:
                self.llm.reset_prefix_cache(device_only=source.random() < 0.9)
            before = self._progress()
            for output in engine.step():
                self.done[output.request_id] = output
                self.live.remove(output.request_id)
                if self.live and source.random() < aborts:
                    self._abort(source.choice(self.live))
            quiet = quiet + 1 if self._progress() == before and self.live else 0
            assert quiet < QUIET_STEPS, f"no progress in {quiet} steps: {self.live}"

    def check(self, cold: Oracle) -> None:
        wrong = []
        for name, output in self.done.items():
            asked = self.asked[name]
            assert len(output.outputs[0].token_ids) == asked.max_tokens
            assert sum(output.cached_by_tier.values()) == output.cached_tokens
            if not same(output, cold(asked.prompt, asked.max_tokens)):
                wrong.append(name)
        assert not wrong, wrong

    def end(self) -> None:
        """Every mover has its last word; then nothing may be held."""
        mover = self.llm.built.worker._movers[HOST]
        assert isinstance(mover, FaultyMover)
        engine, book = self.llm.built.engine, self.llm.built.hierarchy.core.book
        for _ in range(QUIET_STEPS):
            mover.confess()
            engine.step()
            if not len(book):
                break
            time.sleep(0.001)
        assert_at_rest(self.llm)
        assert self.llm.built.worker._runner.num_sequences == 0

    @property
    def _make_mover(self) -> Any:
        def make_mover(connector: HostConnector, device: Any, notify: Any) -> FaultyMover:
            return FaultyMover(device, connector._slots, notify, self.faults, self.seed)

        return make_mover

    def _add(self, name: str) -> None:
        source = self.random
        length = source.choice((1, UNIT - 1, UNIT, UNIT + 1, 4 * UNIT, source.randint(1, LONGEST_PROMPT - 20)))
        prompt = tokens(length, seed=source.randrange(3))
        if source.random() < 0.6:
            prompt = prompt + tokens(source.randint(1, 20), seed=source.randrange(10**6))
        answer = source.choice((1, 2, UNIT, UNIT + 1, LONGEST_ANSWER))
        asked = Asked(tuple(prompt), answer, source.randrange(3), source.choice(("", "", "", "other")))
        self.asked[name] = asked
        sampling = greedy(answer)
        self.llm.built.engine.add(name, Prompt(None, asked.prompt), sampling, asked.priority, asked.salt)
        self.live.append(name)

    def _abort(self, name: str) -> None:
        assert self.llm.built.engine.abort(name)
        self.live.remove(name)
        del self.asked[name]

    def _progress(self) -> Sequence[Any]:
        scheduler = self.llm.built.engine.scheduler
        return [(name, len(request.tokens), request.computed) for name, request in scheduler.requests.items()]

    def _draw(self, runtime: Runtime) -> dict[str, Any]:
        source, page = self.random, runtime.layout.page_bytes
        step_tokens = source.choice((1, 5, UNIT, 64, 64, 64, 200))
        need = runtime.layout.peak_pages(LONGEST_PROMPT + LONGEST_ANSWER, step_tokens)
        host, mode = source.choice((1, 2, 3, 20, 150, 800)), source.choice(("eager", "lazy"))
        return {
            "pages": int(need * source.choice((1.0, 1.3, 2.0, 6.0))),
            "kv": [f"host:{host * page}?store={mode}"],
            "max_num_batched_tokens": step_tokens,
            "max_num_seqs": source.choice((1, 2, 5, 64)),
            "scheduling_policy": source.choice(("fcfs", "priority")),
            "load_deadline_s": source.choice((0.02, 0.2, 30.0)),
            "store_deadline_s": source.choice((0.02, 0.2, 60.0)),
        }

    def _draw_faults(self) -> Faults:
        source = self.random
        # What is withheld must become late, and a late store's blocks must leave room for the longest request.
        late = self.settings["load_deadline_s"] < 1.0 and self.settings["store_deadline_s"] < 1.0
        return Faults(
            fail=source.choice((0.0, 0.0, 0.3, 0.9, 1.0)),
            delay=source.choice((0.0, 0.5)),
            withhold=source.choice((0.0, 0.2)) if late else 0.0,
            repeat=source.choice((0.0, 0.3)),
            longest_delay=source.choice((1, 8, 30)),
        )


@pytest.mark.soak
def test_soak(tiny: Runtime, cold: Oracle) -> None:
    """Episodes for half of the time asked for (the other half goes to the other dtype)."""
    end, seed, answers, cached = time.monotonic() + SECONDS / 2, FIRST_SEED, 0, 0
    while time.monotonic() < end:
        episode = Episode(tiny, seed)
        with episode.llm:
            try:
                episode.run()
                episode.check(cold)
                episode.end()
            except Exception as error:
                raise AssertionError(f"OSTINATO_SOAK_SEED={seed}: {episode.settings} {episode.faults}") from error
        answers += len(episode.done)
        cached += sum(output.cached_by_tier.get("host", 0) > 0 for output in episode.done.values())
        seed += 1
    print(f"\n{seed - FIRST_SEED} episodes, {answers} answers equal to cold, {cached} of them from host memory")
