"""What a connector keeps: a walk over all objects that can be reached from it.

Owns: which references are followed, and what may not be found at their end.  Pure reading.

A view of blocks dies with its hook, and a block's id says nothing once the hook is over: the block may be another
request's by then.  To be recognised, the ids of a watched pool are of a type of their own (:class:`LiveSlot`).  Orders
and pins may keep them: they hold the blocks too.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

from ostinato.conformance.worker import FakeWorkers, RankMemory
from ostinato.connectors.context import BlockView, KVConnectorSchedulerContext, Pin
from ostinato.runtime.bare_pages import BarePages
from ostinato.transfer.job import Move, TransferOrder, TransferReport

MOST_OBJECTS: Final = 500_000
_PYTHON: Final = (type, ModuleType, CodeType, FrameType, BuiltinFunctionType, threading.Thread, MappingProxyType)
_VALUES: Final = (str, bytes, int, float, complex, type(None))
_ENGINE: Final = (KVConnectorSchedulerContext, Pin, TransferOrder, TransferReport, Move)
_BENCH: Final = (FakeWorkers, RankMemory, BarePages)
_NOT_ENTERED: Final = (*_PYTHON, *_VALUES, *_ENGINE, *_BENCH)


class LiveSlot(int):
    """The id of a device block, as a watched pool hands it out."""


def reachable(roots: Sequence[object]) -> Iterator[object]:
    """All objects below ``roots``, each once; modules, types and what belongs to the engine is not entered."""
    seen, waiting = {id(root) for root in roots}, list(roots)
    while waiting and len(seen) < MOST_OBJECTS:
        item = waiting.pop()
        yield item
        for child in _children(item):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def find_kept(roots: Sequence[object]) -> list[str]:
    """What is kept and must not be, in words."""
    found: dict[str, None] = {}
    for item in reachable(roots):
        if isinstance(item, BlockView):
            found["a BlockView is kept; borrow again in the next hook"] = None
        elif isinstance(item, LiveSlot):
            found["ids of device blocks are kept outside of a pin or an order"] = None
    return list(found)


def weigh(roots: Sequence[object]) -> int:
    """Bytes of all objects that are reachable."""
    return sum(sys.getsizeof(item, 0) for item in reachable(roots))


def _children(item: Any) -> list[Any]:
    if isinstance(item, _NOT_ENTERED):
        return []
    if isinstance(item, FunctionType):
        # Not its globals: they are the module's.
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    return gc.get_referents(item)
