"""Who goes first, and who is preempted.

Owns: the order.  A policy is a sort key; the victim is whoever comes last in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ostinato.scheduler.request import Request


class Policy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"

    def key(self, request: Request) -> tuple[int, int]:
        """Sort key: smaller goes first.  Arrival breaks ties, so a preempted request keeps its place."""
        return (request.priority if self is Policy.PRIORITY else 0, request.arrival)

    def victim(self, requests: Iterable[Request]) -> Request:
        """The one that can best be spared."""
        return max(requests, key=self.key)
