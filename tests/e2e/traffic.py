"""Random requests for a small pool, and a loop that drives an engine with them and never waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from e2e.support import Oracle, greedy, same, tokens
from ostinato.engine.llm import LLM
from ostinato.engine.loop import Prompt
from ostinato.engine.outputs import RequestOutput

LONGEST_PROMPT = 144
LONGEST_ANSWER = 40


@dataclass(frozen=True)
class Arrival:
    """One request of the traffic."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int


def make_arrivals(count: int, seed: int) -> list[Arrival]:
    """Requests that share prefixes of three conversations, cut anywhere, with tails of their own."""
    source = random.Random(seed)
    arrivals = []
    for index in range(count):
        shared = tokens(source.randint(0, LONGEST_PROMPT - 20), seed=source.randrange(3))
        tail = tokens(source.randint(1, 20), seed=1000 * seed + index % 40)
        answer = source.choice((1, 2, 5, 17, LONGEST_ANSWER))
        arrivals.append(Arrival(f"r{index}", tuple(shared + tail), answer, source.randrange(3)))
    return arrivals


@dataclass
class Drive:
    """Feeds ``arrivals`` to the engine of ``llm`` while it steps; aborts some of them."""

    llm: LLM
    arrivals: list[Arrival]
    seed: int = 0
    abort_share: float = 0.1
    after_step: Callable[[int], None] = lambda step: None
    done: dict[str, RequestOutput] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def run(self, most_steps: int = 6000) -> None:
        engine, source = self.llm.built.engine, random.Random(self.seed)
        waiting = list(self.arrivals)
        source.shuffle(waiting)
        live: list[str] = []
        steps = 0
        while waiting or engine.has_work:
            while waiting and source.random() < 0.4:
                arrival = waiting.pop()
                sampling = greedy(arrival.max_tokens)
                engine.add(arrival.name, Prompt(None, arrival.prompt), sampling, arrival.priority)
                live.append(arrival.name)
            if live and source.random() < self.abort_share / 10:
                victim = source.choice(live)
                assert engine.abort(victim)
                assert not engine.abort(victim)
                self.aborted.add(victim)
                live.remove(victim)
            for output in engine.step():
                self.done[output.request_id] = output
                live.remove(output.request_id)
            steps += 1
            self.after_step(steps)
            assert steps < most_steps, f"no end after {steps} steps: {sorted(live)} of {len(waiting)} waiting"

    def check(self, cold: Oracle) -> None:
        """Every request has ended in one way, and each finished one equals cold."""
        names = {arrival.name for arrival in self.arrivals}
        assert self.done.keys() | self.aborted == names
        assert not self.done.keys() & self.aborted
        wrong = []
        for arrival in self.arrivals:
            output = self.done.get(arrival.name)
            if output is not None:
                assert len(output.outputs[0].token_ids) == arrival.max_tokens
                assert sum(output.cached_by_tier.values()) == output.cached_tokens
                if not same(output, cold(arrival.prompt, arrival.max_tokens)):
                    wrong.append(arrival.name)
        assert not wrong, wrong
