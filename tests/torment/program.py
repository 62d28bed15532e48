"""A random program: requests, aborts, pressure, faults of every tier, late reports, restarts; all from one seed.

Owns: the choice of everything, the watchdog, the log that tells two runs apart.  Does not own: the engine (``life``).
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable

from ostinato.cache.layout import CacheLayout
from ostinato.connectors.api import Connector
from ostinato.connectors.multi import MultiConnector, expand
from torment.content import Truth
from torment.kernel import Kernel, Violation, installed
from torment.life import Counts, Life, Setup
from torment.shapes import LAYOUTS
from torment.tiers import KINDS, in_place
from torment.worker import Trouble

MAX_ALIVE = 7
FAMILIES = 3
MOST_UNITS = 12
PATIENCE_S = 400.0
PATIENCE_STEPS = 100
"""So long, in virtual seconds and in steps, everything may stand still before it counts as a hang."""


class Program:
    """``run`` raises when anything goes wrong; the same seed and number of steps do the same again."""

    def __init__(self, seed: int, steps: int, trace: Callable[[str], None] = lambda _: None) -> None:
        self.seed = seed
        self._trace = trace
        self.steps = steps
        self.counts = Counts()
        self.rng = random.Random(f"torment {seed}")
        self.kernel = Kernel(self.rng)
        self._log = hashlib.sha256()
        rng = self.rng
        names = [name for name in KINDS if rng.random() < 0.4][:4]
        unit = 16 if "lmcache" in names else 4
        layout = rng.choice(LAYOUTS[unit])
        ranks = 2 if names in ([], ["host"]) and rng.random() < 0.5 else 1
        self.setup = self._setup(layout, ranks)
        self.truth = Truth(layout, ranks > 1)
        self.tiers = [KINDS[name](self.kernel, self.truth) for name in names]
        self._write = rng.choice(("all", "first"))
        self._multi = len(names) > 1 and rng.random() < 0.4
        self._names = 0
        self._progress = (0, 0.0, 0)

    def _setup(self, layout: CacheLayout, ranks: int) -> Setup:
        rng = self.rng
        step_tokens = rng.choice((1, 2, 4)) * layout.granularity + rng.randrange(3)
        longest = MOST_UNITS * layout.base_unit + 12
        peak = layout.peak_pages(longest, step_tokens)
        pages = peak + rng.randint(2, 2 * peak)
        return Setup(layout, pages, ranks, step_tokens, rng.choice((2, 5, 8)), rng.choice((0.5, 0.5, 0.2)))

    @property
    def digest(self) -> str:
        """Of everything that happened."""
        return self._log.hexdigest()

    def describe(self) -> str:
        kinds = ", ".join(type(spec.kind).__name__.lower() for spec in self.setup.layout.groups)
        tiers = " + ".join(type(tier).__name__.removesuffix("Tier").lower() for tier in self.tiers) or "device only"
        return f"{tiers}{' as multi' if self._multi else ''}; {kinds}; {self.setup.device_pages} pages"

    def run(self) -> Counts:
        logger = logging.getLogger("ostinato")
        level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        try:
            with in_place(self.tiers), installed(self.kernel):
                self._live()
        finally:
            logger.setLevel(level)
        return self.counts

    # Lives.

    def _live(self) -> None:
        life = self._start()
        while self.counts.steps < self.steps:
            if self.rng.random() < 0.004:
                life = self._restart(life)
            self._turn(life)
        self._calm_down(life)
        life.calm()
        life.check_quiet()
        life.account()
        life.close()
        self.truth.complain()

    def _start(self) -> Life:
        self.kernel.may_block = True
        made: list[Connector] = [tier.make() for tier in self.tiers]
        if self._multi:
            made = [MultiConnector(made, self._write)]
        life = Life(self.setup, self.truth, expand(made), self.kernel, self.counts)
        self._progress = (0, self.kernel.now, self.counts.steps)
        return life

    def _restart(self, life: Life) -> Life:
        """Closed in peace, killed, or the power is lost."""
        self.counts.restarts += 1
        self._note("restart")
        life.account()
        for tier in self.tiers:
            tier.calm()
        peaceful = self.rng.random() < 0.3
        power_loss = not peaceful and self.rng.random() < 0.5
        if peaceful:
            life.close()
        for tier in self.tiers:
            tier.end_process(power_loss)
        self.kernel.kill()
        return self._start()

    def _calm_down(self, life: Life) -> None:
        for tier in self.tiers:
            tier.calm()
        life.release()

    # One turn: things happen, then a step.

    def _turn(self, life: Life) -> None:
        rng, random = self.rng, self.rng.random
        if len(life.clients) < MAX_ALIVE and random() < 0.25:
            self._add(life)
        if random() < 0.02:
            self._abort(life)
        if random() < 0.03:
            self._change_weather(life)
        if random() < 0.03:
            self._press(life)
        if random() < 0.01:
            life.cache.core.drop_idle(device_only=random() < 0.8)
        self.kernel.now += rng.choice((0.001, 0.01, 0.01, 0.1)) if random() < 0.97 else rng.choice((0.6, 3.0, 11.0))
        self.kernel.run(rng.randrange(12))
        before = life.workers.computed
        life.step(lambda: self._meanwhile(life))
        alive = " ".join(
            f"{name}:{each.request.phase.value}:{each.request.computed}" for name, each in life.clients.items()
        )
        self._note(f"step {self.counts.steps} at {self.kernel.now:.3f} s: {len(life.cache.core.book)} jobs; {alive}")
        life.check_starved()
        self._watch(life, life.workers.computed > before or not life.clients)

    def _meanwhile(self, life: Life) -> None:
        """While a step is under way."""
        if self.rng.random() < 0.01:
            self._abort(life)
            if self.rng.random() < 0.5:
                self._press(life)

    def _add(self, life: Life) -> None:
        rng, unit = self.rng, self.setup.layout.base_unit
        family = rng.randrange(FAMILIES)
        length = rng.randint(1, MOST_UNITS * unit)
        shared = min(length, rng.choice((0, unit, 3 * unit, 5 * unit + 1, 8 * unit, MOST_UNITS * unit)))
        tail = rng.randrange(4)
        tokens = [(family + at * at) % 5 for at in range(shared)]
        tokens += [(tail * 31 + at) % 5 + 5 for at in range(length - shared)]
        self._names += 1
        goal = length + rng.choice((1, 1, 3, 10))
        life.add(f"r{self._names}", tokens, goal, rng.choice(("", "", "", "salt")), rng.random() < 0.03)

    def _abort(self, life: Life) -> None:
        if life.clients:
            life.abort(self.rng.choice(list(life.clients)))

    def _change_weather(self, life: Life) -> None:
        rng = self.rng
        trouble = Trouble()
        match rng.randrange(5):
            case 0:
                trouble = Trouble(late=0.5, latest=rng.choice((0.5, 30.0)))
            case 1:
                trouble = Trouble(never=0.05)
            case 2:
                trouble = Trouble(late=0.2, latest=12.0, twice=0.3, forged=0.3)
        life.post.trouble = trouble
        for tier in self.tiers:
            if rng.random() < 0.4:
                tier.mood.change()
            if rng.random() < 0.15:
                tier.lose()

    def _press(self, life: Life) -> None:
        """Take blocks away for a while: requests are preempted, or find no room."""
        if life.pressure:
            life.release()
            return
        life.press(self.rng.randint(0, life.cache.core.device.pool.available))

    def _watch(self, life: Life, advanced: bool) -> None:
        now, steps = self.kernel.now, self.counts.steps
        if advanced or life.pressure:
            self._progress = (0, now, steps)
        _, since, step = self._progress
        if now - since > PATIENCE_S and steps - step > PATIENCE_STEPS:
            raise Violation(f"nothing was computed for {now - since:.0f} s and {steps - step} steps")

    def _note(self, event: str) -> None:
        self._log.update(event.encode())
        self._trace(event)
