"""The window through which connectors see the scheduler's blocks: what a borrow shows, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connectors.observer import LAYOUT, NAMES, Observer, observed, session
from field.rig import fake_rig
from field.scripted import LOAD, ScriptedTier
from ostinato.connectors.api import Hook
from ostinato.connectors.context import BlockView, KVConnectorSchedulerContext
from ostinato.errors import StaleViewError
from ostinato.ids import HOLE, RequestId


class TestBorrowInEveryState:
    def test_running_and_waiting(self) -> None:
        tier, rig = observed(max_running=1)
        rig.add(session(1, 40), 3)
        rig.add(session(2, 40), 3)
        rig.step()
        hook, subject, rows = tier.seen[-2]
        assert (hook, subject) == ("commit", (NAMES[0], 40))
        assert tier.calls[-1] == ("step_end", 1), "a step has ended when what it computed is committed"
        assert rows[NAMES[0]] == [list(row) for row in rig.cache.table(NAMES[0]).rows]
        assert rows[NAMES[1]] is None

    def test_a_step_that_fills_a_block_and_allocates_none(self) -> None:
        """The block that is worth saving is the one that a step without new blocks filled."""
        tier, rig = observed()
        rig.add(session(1, 40), 12)
        rig.step()
        before = {name: list(rows[0]) for name, rows in (tier.seen[-1][2]).items() if rows is not None}
        for _ in range(8):
            rig.step()
        hook, _, rows = next(item for item in tier.seen if item[1] == (NAMES[0], 48))
        assert hook == "commit"
        assert rows[NAMES[0]] is not None
        assert rows[NAMES[0]][0] == before[NAMES[0]]
        assert len(rows[NAMES[0]][0]) == 3

    def test_loading(self) -> None:
        tier, rig = observed()
        rig.serve(session(1, 128))
        rig.evict_device()
        tier.mover.shut(LOAD)
        name = RequestId(rig.add([*session(1, 128), 5]))
        rig.step(2)
        assert rig.phase(name) == "parked"
        hook, _, rows = tier.seen[-1]
        assert hook == "step_end"
        assert rows[name] is not None
        full, window = rows[name]
        assert HOLE not in full
        assert window[:6] == [HOLE] * 6
        assert HOLE not in window[6:]
        assert {move.device_slot for move in tier.mover.waiting(LOAD)[0].moves} == set(full) | set(window[6:])

    def test_finishing_in_this_step(self) -> None:
        tier, rig = observed()
        rig.add(session(1, 40))
        rig.run()
        (rows,) = [rows for hook, subject, rows in tier.seen if hook == "release" and subject == NAMES[0]]
        assert rows[NAMES[0]] is not None
        assert len(rows[NAMES[0]][0]) == 3
        rig.step()
        assert tier.seen[-1][2][NAMES[0]] is None

    @pytest.mark.parametrize("loading", [False, True])
    def test_aborted(self, loading: bool) -> None:
        tier, rig = observed()
        rig.serve(session(1, 128))
        rig.evict_device()
        if loading:
            tier.mover.shut(LOAD)
        name = RequestId(rig.add(session(1, 128), 20))
        rig.step(3)
        rig.engine.abort(name)
        assert tier.calls[-1] == ("release", name)
        assert tier.seen[-1][2][name] is not None
        rig.step()
        assert tier.seen[-1][2][name] is None

    def test_preempted(self) -> None:
        tier, rig = observed()
        name = RequestId(rig.add(session(1, 40), 6))
        rig.step(2)
        scheduler = rig.engine.scheduler
        scheduler._preempt(scheduler.requests[name])
        assert tier.calls[-1] == ("release", name)
        assert tier.seen[-1][2][name] is not None
        rig.cache.settle(rig.cache.step, ())
        assert tier.seen[-1][2][name] is None
        rig.run()

    def test_unknown_and_never_admitted(self) -> None:
        tier, rig = observed()
        rig.add(session(1, 40))
        assert tier.context is not None
        assert tier.context.blocks(RequestId("nobody")) is None
        assert tier.context.blocks(RequestId("nobody"), 0, 0, 4) is None
        assert tier.context.blocks(NAMES[0]) is None

    def test_an_abort_in_the_queue_calls_no_hook(self) -> None:
        tier, rig = observed()
        rig.engine.abort(rig.add(session(1, 40)))
        assert tier.calls == []

    def test_what_is_behind_the_window_is_still_there_at_commit(self) -> None:
        """Blocks are trimmed after the hook, so that a connector may save what the step filled."""
        tier, rig = observed(step_tokens=64)
        rig.add(session(1, 64), 1)
        rig.step()
        (rows,) = [rows for hook, subject, rows in tier.seen if subject == (NAMES[0], 64)]
        assert rows[NAMES[0]] is not None
        assert HOLE not in rows[NAMES[0]][1]


class TestViews:
    def borrow(self, inside: Callable[[KVConnectorSchedulerContext], Any], length: int = 100) -> Any:
        tier, rig = observed(step_tokens=32)
        kept: list[Any] = []
        tier.act = lambda hook, subject: kept.append(inside(tier.context)) if hook == "commit" else None
        rig.add(session(1, length), 4)
        rig.run()
        return kept

    @pytest.mark.parametrize(
        "use",
        [
            lambda view: view[0],
            lambda view: len(view),
            lambda view: list(view),
            lambda view: view[1:],
            lambda view: list(reversed(view)),
            lambda view: 3 in view,
            lambda view: view.index(0),
            lambda view: next(iter(view)),
        ],
    )
    def test_a_stale_view_raises(self, use: Callable[[BlockView], Any]) -> None:
        for view in self.borrow(lambda context: context.blocks(NAMES[0])[0]):
            with pytest.raises(StaleViewError, match="borrow again"):
                use(view)

    def test_an_iterator_and_a_slice_go_stale_too(self) -> None:
        def inside(context: KVConnectorSchedulerContext) -> Any:
            view = context.blocks(NAMES[0], 0)
            assert view is not None
            iterator = iter(view)
            next(iterator)
            return iterator, view[1:]

        for iterator, part in self.borrow(inside):
            with pytest.raises(StaleViewError):
                next(iterator)
            with pytest.raises(StaleViewError):
                part[0]

    def test_a_view_cannot_be_written(self) -> None:
        (view, *_) = self.borrow(lambda context: context.blocks(NAMES[0], 0))
        with pytest.raises(TypeError):
            view[0] = 1
        assert not hasattr(view, "append")

    def test_slices_are_those_of_the_row(self) -> None:
        def inside(context: KVConnectorSchedulerContext) -> None:
            views = context.blocks(NAMES[0])
            assert views is not None
            for group, view in enumerate(views):
                row = list(view)
                for start, stop in ((0, None), (1, 3), (2, 2), (3, 99), (50, 60), (0, 0), (-2, None)):
                    part = context.blocks(NAMES[0], group, start, stop)
                    assert part is not None
                    assert list(part) == row[start:stop]
                    assert len(part) == len(row[start:stop])
                    assert list(part[1:]) == row[start:stop][1:]
                    assert list(part[::-1]) == row[start:stop][::-1]
                assert view[-1] == row[-1]
                with pytest.raises(IndexError):
                    view[len(row)]

        assert self.borrow(inside)

    def test_holes_keep_their_positions(self) -> None:
        rows = self.borrow(lambda context: [list(view) for view in context.blocks(NAMES[0])])
        full, window = rows[-1]
        assert len(full) == len(window)
        assert HOLE not in full
        assert window.count(HOLE) == 4
        assert window[:4] == [HOLE] * 4

    def test_each_connector_has_its_own_borrow(self) -> None:
        """One connector's view does not live on in the next one's hook."""
        kept: list[BlockView] = []
        first, second = Observer(), ScriptedTierWithHook(kept)
        rig = fake_rig(LAYOUT, 100, [first, second])
        first.act = lambda hook, subject: (
            kept.extend(first.context.blocks(NAMES[0]) or ()) if hook == "commit" else None
        )
        rig.add(session(1, 40), 2)
        rig.run()
        assert second.refused > 0


class ScriptedTierWithHook(ScriptedTier):
    """Reads views that another connector borrowed."""

    def __init__(self, views: list[BlockView]) -> None:
        super().__init__("second", hooks=[Hook.COMMIT])
        self.views = views
        self.refused = 0

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        for view in self.views:
            with pytest.raises(StaleViewError):
                view[0]
            self.refused += 1
