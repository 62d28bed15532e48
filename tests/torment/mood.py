"""How a tier's backing store behaves just now.

Owns: delays, hangs and errors of its calls.  Does not own: what is lost or corrupted (``tiers``, ``servers``).
"""

from __future__ import annotations

from torment.kernel import Kernel


class Mood:
    """Probabilities for each call: ``slow`` waits up to ``slowest`` seconds, ``broken`` raises, ``corrupt`` spoils."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.slow = self.slowest = self.broken = self.corrupt = 0.0

    def calm(self) -> None:
        self.slow = self.slowest = self.broken = self.corrupt = 0.0

    def change(self) -> None:
        """Fine at most times."""
        rng = self.kernel.rng
        self.calm()
        match rng.randrange(8):
            case 0:
                self.slow, self.slowest = 0.5, rng.choice((0.05, 1.0))
            case 1:
                self.slow, self.slowest = 0.2, rng.choice((15.0, 60.0))
            case 2:
                self.broken = rng.choice((0.05, 0.3, 1.0))
            case 3:
                self.corrupt = rng.choice((0.02, 0.2, 1.0))
            case 4:
                self.slow, self.slowest, self.broken, self.corrupt = 0.2, 12.0, 0.1, 0.1

    def enter(self) -> None:
        """At the begin of a call, and wherever else a thread may be held up."""
        kernel = self.kernel
        if kernel.current is None:
            return
        random = kernel.rng.random
        if self.slow and random() < self.slow:
            kernel.sleep(random() * self.slowest)
        elif random() < 0.2:
            kernel.give_way()
        if self.broken and random() < self.broken:
            raise ConnectionError("broken for once")

    def spoils(self) -> bool:
        return self.corrupt > 0 and self.kernel.rng.random() < self.corrupt
