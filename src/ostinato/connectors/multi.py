"""Several connectors as one.

Owns: the children's order and the write policy.  Does not own: merging hits: the core takes the children apart
(:func:`expand`) and merges block by block over all tiers, so that a prompt's head may come from one child and its
middle from another.  The scheduler context goes to each child unchanged; a child that fails is counted as holding
nothing, and the others never notice.

Write policies: ``all`` (each child takes what it wants) and ``first`` (a block goes to the first asked child that wants
it; owned children, such as host memory, follow their own mode either way).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Capabilities, Connector, Ownership
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.connectors.forwarding import ForwardingConnector
from ostinato.errors import ConfigError
from ostinato.ids import TierId

POLICIES: Final = ("all", "first")


class MultiConnector(Connector):
    """``children``, fastest first.  They are the tiers; the whole has no mover and no key of its own."""

    def __init__(self, children: Sequence[Connector], write: str = "all") -> None:
        if not children:
            raise ConfigError("a MultiConnector needs at least one connector in `connectors`")
        if write not in POLICIES:
            raise ConfigError(f"a MultiConnector's write policy is one of {', '.join(POLICIES)}, not {write!r}")
        self.capabilities = Capabilities(TierId("multi"), Ownership.SHARED)
        self.children = tuple(children) if write == "all" else _take_turns(children)

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        for child in self.children:
            child.bind(context)

    def close(self) -> None:
        for child in self.children:
            child.close()


def expand(connectors: Iterable[Connector]) -> tuple[Connector, ...]:
    """``connectors`` with each MultiConnector replaced by its children, in place."""
    found: list[Connector] = []
    for connector in connectors:
        found.extend(expand(connector.children) if isinstance(connector, MultiConnector) else (connector,))
    return tuple(found)


def _take_turns(children: Sequence[Connector]) -> tuple[Connector, ...]:
    """Asked children behind one another: each is offered what the ones before it did not want."""
    turns: list[Connector] = []
    before: list[_Turn] = []
    for child in children:
        if child.capabilities.ownership is Ownership.OWNED:
            turns.append(child)
        else:
            before = [*before, _Turn(child, tuple(before))]
            turns.append(before[-1])
    return tuple(turns)


class _Turn(ForwardingConnector):
    """A child that is offered what the children before it left; everything else goes straight to it.

    The core offers one batch of keys to the children in order, so what was wanted last is what matters.
    """

    def __init__(self, child: Connector, before: tuple[_Turn, ...]) -> None:
        super().__init__(child)
        self.wanted: frozenset[BlockKey] = frozenset()
        self._before = before

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        taken = frozenset[BlockKey]().union(*(turn.wanted for turn in self._before))
        left = [key for key in keys if key not in taken]
        wants = dict(zip(left, self.inner.offer(left), strict=True)) if left else {}
        self.wanted = frozenset(key for key, wanted in wants.items() if wanted)
        return [wants.get(key, False) for key in keys]
