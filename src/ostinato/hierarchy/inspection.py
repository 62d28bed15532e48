"""What of a prompt is cached where.

Owns: reading it, without a trace: no use is noted, nothing is held.  Does not own: the search (``cache.presence``).
Asked tiers are asked about every unit, since all of them are shown.  Thread: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ostinato.cache.keys import BlockKey, KeyChain
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window, keeps_interior
from ostinato.cache.layout import GroupSpec
from ostinato.cache.presence import Presence, tokens_by_tier
from ostinato.hierarchy.tiers import Core
from ostinato.ids import TierId
from ostinato.observe.inspection import GroupPresence, Inspection, PinView, Span


class Inspector:
    """Looks at one prompt at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def look(
        self, chain: KeyChain, tokens: int, pins: tuple[PinView, ...] = (), patient: bool = True
    ) -> Inspection | None:
        """None while a tier has not answered, if ``patient``: then ask again."""
        core = self._core
        keys = [unit_keys(spec, chain) for spec in core.layout.groups]
        answers: dict[TierId, Mapping[BlockKey, bool]] = {}
        silent = []
        for tier, probe in core.asked.items():
            hidden = core.hidden.get(tier, ())
            asked = [key for some in keys for key in some if key not in hidden]
            reply = probe.probe(asked) if asked else ()
            if reply is None:
                silent.append(str(tier))
            else:
                answers[tier] = dict(zip(asked, reply, strict=True))
        if silent and patient:
            return None
        presence = Presence(core.directory, core.layout, chain, tuple(core.lower), answers)
        plan = presence.plan(tokens)
        held = {tier: {key for key, holds in some.items() if holds} for tier, some in answers.items()}
        groups = tuple(self._group(spec, some, held) for spec, some in zip(core.layout.groups, keys, strict=True))
        return Inspection(
            tokens,
            core.layout.granularity,
            plan.tokens,
            {str(tier): count for tier, count in tokens_by_tier(core.layout, plan, core.order).items()},
            self._resumable(presence, chain, tokens),
            groups,
            pins,
            tuple(silent),
        )

    def _group(self, spec: GroupSpec, keys: Sequence[BlockKey], held: Mapping[TierId, set[BlockKey]]) -> GroupPresence:
        core, cached = self._core, {}
        for tier in core.order:
            if tier in core.asked:
                flags = [key in held.get(tier, ()) for key in keys]
            else:
                places = (core.directory.place(key, tier) for key in keys)
                flags = [place is not None and place.ready for place in places]
            cached[str(tier)] = tuple((low * spec.hash_unit, high * spec.hash_unit) for low, high in _runs(flags))
        marks = () if keeps_interior(spec.kind) else tuple(map(core.directory.get, keys))
        boundaries = (index for index, entry in enumerate(marks) if entry is not None and entry.boundary)
        return GroupPresence(
            spec.group,
            kind_name(spec.kind),
            spec.hash_unit,
            cached,
            tuple((index + 1) * spec.hash_unit for index in boundaries),
        )

    def _resumable(self, presence: Presence, chain: KeyChain, tokens: int) -> tuple[Span, ...]:
        """All cuts at which every group has what it needs, found with running sums of what is there."""
        layout = self._core.layout
        sums = []
        for spec in layout.groups:
            count = len(chain.digests) * chain.unit // spec.hash_unit
            there = (int(presence.present(spec.group, ordinal)) for ordinal in range(count))
            sums.append([0, *accumulate(there)])

        def good(cut: int) -> bool:
            return all(
                high < len(some) and some[high] - some[low] == high - low
                for spec, some in zip(layout.groups, sums, strict=True)
                for low, high in spec.kind.required(cut, spec.hash_unit)
                if high > low
            )

        step = layout.granularity
        flags = [good((index + 1) * step) for index in range(tokens // step)]
        return tuple(((low + 1) * step, high * step) for low, high in _runs(flags))


def unit_keys(spec: GroupSpec, chain: KeyChain) -> list[BlockKey]:
    """The keys of all of the group's units that ``chain`` covers, first one first."""
    step = spec.hash_unit // chain.unit
    return [BlockKey(spec.group, digest) for digest in chain.digests[step - 1 :: step]]


def kind_name(kind: Kind) -> str:
    """``full``, ``window 512``, ``chunk 8192`` or ``state``."""
    match kind:
        case Full():
            return "full"
        case Window(window, _):
            return f"window {window}"
        case Chunked(chunk):
            return f"chunk {chunk}"
        case State():
            return "state"


def _runs(flags: Sequence[bool]) -> list[Span]:
    """Index ranges of consecutive truths."""
    runs: list[Span] = []
    for index, flag in enumerate(flags):
        if not flag:
            continue
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
