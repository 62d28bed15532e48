"""Worlds to try, and a random player that does whatever a world allows."""

from __future__ import annotations

import random
from collections import Counter

from core.builders import make_layout, plain_layout
from core.harness import Errand
from core.world import Setup, World
from ostinato.cache.kinds import Chunked, Full, State, Window
from ostinato.hierarchy.tiers import StoreMode

EAGER, LAZY = StoreMode.EAGER, StoreMode.LAZY

EQUAL = plain_layout(Full(), Window(10), Window(10), unit=4)
SINKS = plain_layout(Full(), Window(6, 3), Chunked(8), unit=4)
STATES = plain_layout(Full(), State(), unit=4)
PAGED = make_layout((Full(), 4, 1, 4), (Window(10), 4, 3, 4), (Window(6, 5), 4, 4, 4))
MIXED = make_layout((Full(), 2, 4, 2), (Window(9), 4, 2, 4), (State(), 8, 1, 8))
ODD = make_layout((Full(), 6, 2, 6), (Chunked(9), 3, 4, 3), (Window(7, 2), 2, 3, 4))
FULL = make_layout((Full(), 4, 2, 4))

SETUPS: dict[str, Setup] = {
    "device only": Setup(EQUAL, 44),
    "eager host": Setup(EQUAL, 44, (("host", 20, EAGER),)),
    "lazy host, two ranks": Setup(EQUAL, 44, (("host", 30, LAZY),), ranks=2, commit_first=True),
    "sinks and chunks, two hosts": Setup(SINKS, 48, (("host", 12, EAGER), ("far", 40, LAZY))),
    "states and a disk": Setup(STATES, 44, (), ("disk",)),
    "windows, states and a host": Setup(
        plain_layout(Full(), Window(10), State(), State()), 60, (("host", 24, EAGER),), commit_first=True
    ),
    "states and two lazy hosts, two ranks": Setup(
        plain_layout(State(), Full(), State()), 50, (("host", 9, LAZY), ("far", 30, LAZY)), ranks=2
    ),
    "pages of several units": Setup(PAGED, 36, (("host", 14, EAGER),), ("disk",), commit_first=True),
    "different hash units": Setup(MIXED, 40, (("host", 25, LAZY),), ("disk",), ranks=2, greedy=False),
    "odd units": Setup(ODD, 40, (("host", 10, EAGER),), ("disk", "store")),
    "one group, coarse pages": Setup(FULL, 16, (("host", 6, EAGER),), step_tokens=7),
}

MAX_PROMPT = 56
MAX_DECODE = 10


def prompt(family: int, shared: int, length: int, tail: int) -> list[int]:
    """``shared`` tokens that all prompts of a family begin with, then a tail of its own."""
    base = [(family + position * position) % 5 for position in range(min(shared, length))]
    return base + [(tail * 31 + position) % 5 + 5 for position in range(length - len(base))]


class Player:
    """Random moves; the same seed plays the same game."""

    def __init__(self, world: World, seed: int, max_clients: int = 6) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.max_clients = max_clients
        self.played = Counter[str]()

    def play(self, moves: int, audit_every: int = 1) -> None:
        for number in range(moves):
            name = self.rng.choice(
                ("open", "open", "plan", "plan", "plan", "apply", "apply", "apply", "apply")
                + ("report",) * 8
                + ("fail", "fidget", "abort", "preempt", "wait", "forge", "mood", "reset", "duplicate", "twins")
            )
            self.played[name] += 1
            getattr(self, name)()
            if number % audit_every == 0:
                self.world.cache.audit()

    def open(self) -> None:
        rng, world = self.rng, self.world
        if len(world.clients) < self.max_clients:
            shared, length = rng.choice((0, 8, 17, 24, 40, 56)), rng.randint(1, MAX_PROMPT)
            tokens = prompt(rng.randrange(2), shared, length, rng.randrange(4))
            world.open(tokens, rng.choice((0, 0, 3, MAX_DECODE)), rng.choice(("", "", "", "salt")))

    def twins(self) -> None:
        """Two equal prompts right after the device was emptied: the second joins what the first loads."""
        if self.world.in_flight is None and len(self.world.clients) < self.max_clients:
            self.world.cache.core.drop_idle(device_only=True)
            tokens = prompt(self.rng.randrange(2), 56, self.rng.randint(20, MAX_PROMPT), 0)
            for _ in range(2):
                self.world.open(tokens)

    def plan(self) -> None:
        if self.world.in_flight is None:
            self.world.plan([self.rng.choice((1, 3, 4, 8, 100)) for _ in range(3)], self.rng.random() < 0.9)

    def apply(self) -> None:
        if self.world.in_flight is not None:
            count = len(self.world.worker.inbox)
            self.world.apply(self.rng.sample(range(count), count))

    def report(self) -> None:
        errand = self._errand()
        if errand is not None:
            self.world.worker.report(errand)

    def duplicate(self) -> None:
        errand = self._errand()
        if errand is not None:
            self.world.worker.report(errand, copies=2)

    def fail(self) -> None:
        errand = self._errand()
        if errand is not None:
            count = len(errand.order.moves)
            self.world.worker.report(errand, frozenset(self.rng.sample(range(count), self.rng.randint(1, count))))

    def fidget(self) -> None:
        """A mover that works, perhaps long after its deadline, and says nothing."""
        errand = self._errand()
        if errand is not None:
            self.world.worker.move(errand, frozenset({0}) if self.rng.random() < 0.3 else frozenset())

    def abort(self) -> None:
        if self.world.clients:
            self.world.close(self.rng.choice(list(self.world.clients.values())))

    def preempt(self) -> None:
        if self.world.in_flight is None and self.world.running:
            self.world.preempt(self.rng.choice(self.world.running))

    def wait(self) -> None:
        self.world.clock.now += self.rng.choice((0.5, 2.0, 11.0))

    def forge(self) -> None:
        self.world.forge(self.rng.randint(0, 40), self.rng.randint(-1, 2))

    def mood(self) -> None:
        for tier in self.world.asked:
            tier.mood = self.rng.choice(("honest", "honest", "silent", "liar"))
            if self.rng.random() < 0.2:
                tier.forget()

    def reset(self) -> None:
        if self.rng.random() < 0.4:
            self.world.cache.core.drop_idle(device_only=self.rng.random() < 0.9)

    def _errand(self) -> Errand | None:
        errands = self.world.worker.open_errands()
        return self.rng.choice(errands) if errands else None
