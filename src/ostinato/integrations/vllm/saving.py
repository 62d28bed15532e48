"""Which of vLLM's blocks are copied to host memory.

Owns: the choice, per request and step.  Does not own: slots, orders (``host_cache``).  Pure but for the request's own
cursor.

A block is saved in the step that fills it, after its forward pass: it lies in the request's table then, and nobody can
have written to it.  So vLLM's pool needs no pins, and a window's blocks are caught before they fall behind it.  Where
the last token of a block is not known yet (asynchronous scheduling), the block has no key, and a later step saves it.

A recurrent state is overwritten by the next step, so only the one at exactly the step's end is saved, and those that
vLLM hands over with their position.  Every position is read from the table as it is in this step; none is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.kinds import contains, keeps_checkpoints, keeps_interior
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.integrations.vllm.compat import NULL_BLOCK
from ostinato.integrations.vllm.host_cache import Unit
from ostinato.integrations.vllm.requests import Known

Rows = Sequence[Sequence[int]]


def has_news(layout: CacheLayout, known: Known, computed: int) -> bool:
    """Whether a block was filled since the last look: tables are read only then."""
    return any(computed // spec.hash_unit > done for spec, done in zip(layout.groups, known.saved, strict=True))


def choose(layout: CacheLayout, known: Known, rows: Rows, computed: int) -> list[Unit]:
    """Blocks that are full when the KV is computed up to ``computed``, and were not chosen before."""
    known.refresh()
    boundary = prompt_cut(layout, known)
    units: list[Unit] = []
    for spec, row in zip(layout.groups, rows, strict=True):
        full = computed // spec.hash_unit
        stop = min(full, known.known_units(spec))
        first = known.saved[spec.group]
        if keeps_checkpoints(spec.kind):
            first = stop - 1 if computed == stop * spec.hash_unit and stop > first else stop
        for ordinal in range(first, min(stop, len(row))):
            if row[ordinal] != NULL_BLOCK:
                units.append(_unit(spec, known, ordinal, row[ordinal], boundary))
        known.saved[spec.group] = max(known.saved[spec.group], stop)
    return units


def choose_states(layout: CacheLayout, known: Known, states: Sequence[tuple[int, int, int]]) -> list[Unit]:
    """Recurrent states that vLLM hands over, as ``(group, block, tokens)``."""
    units = []
    for group, block, tokens in states:
        spec = layout.groups[group]
        ordinal = tokens // spec.hash_unit - 1
        whole = tokens % spec.hash_unit == 0 and 0 <= ordinal < known.known_units(spec)
        if whole and block != NULL_BLOCK and keeps_checkpoints(spec.kind):
            units.append(Unit(known.key(spec, ordinal), ordinal, block, boundary=True))
    return units


def prompt_cut(layout: CacheLayout, known: Known) -> int:
    """Where the same prompt would resume."""
    return (known.request.num_prompt_tokens - 1) // layout.granularity * layout.granularity


def _unit(spec: GroupSpec, known: Known, ordinal: int, block: int, cut: int) -> Unit:
    boundary = (
        keeps_interior(spec.kind)
        or keeps_checkpoints(spec.kind)
        or contains(spec.kind.required(cut, spec.hash_unit), ordinal)
    )
    return Unit(known.key(spec, ordinal), ordinal, block, boundary)
