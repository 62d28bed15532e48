"""A trace: requests with their times, lengths, and the identity of each block of their prompts.

Owns: the form that all readers produce, and blocks of another size.  Does not own: file formats (``readers``).

Blocks are nodes of a tree: equal numbers mean equal tokens *and* equal tokens before them, so a block's number serves
as its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``arrival``: seconds; ``blocks``: of the prompt's whole blocks."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; ``block_tokens`` = tokens of one block."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def blocks(self) -> int:
        """Different blocks in all prompts."""
        return len({block for request in self.requests for block in request.blocks})

    def regrouped(self, factor: int) -> Trace:
        """The same with blocks of ``factor`` times as many tokens."""
        if factor == 1:
            return self
        requests = tuple(
            replace(request, blocks=request.blocks[factor - 1 :: factor]) for request in self.requests
        )  # a node's number says what came before it, so the last one names them all
        return Trace(self.name, self.block_tokens * factor, requests)

    def first(self, count: int | None) -> Trace:
        """Its first ``count`` requests."""
        return self if count is None else replace(self, requests=self.requests[:count])


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as a file has it: ``ids`` name blocks, in the context of those before them."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    ids: Sequence[Hashable]


def build_trace(name: str, block_tokens: int, raw: Iterable[RawRequest]) -> Trace:
    """Order by arrival and number the nodes of the tree of prompts."""
    children: dict[tuple[int, Hashable], int] = {}
    requests = []
    for item in sorted(raw, key=lambda item: item.arrival):
        node, path = 0, []
        for block in item.ids[: item.prompt_tokens // block_tokens]:
            node = children.setdefault((node, block), len(children) + 1)
            path.append(node)
        requests.append(TraceRequest(item.arrival, item.prompt_tokens, item.output_tokens, tuple(path)))
    return Trace(name, block_tokens, tuple(requests))
