"""The tiers of a program: real connectors over backing stores in this process that outlive an engine.

Owns: making them anew after a restart, what a loss of power leaves of a folder, holding up and failing their work.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ostinato.connectors.disk.connector as disk_connector
import ostinato.connectors.disk.mover
import ostinato.connectors.host_mover
import ostinato.connectors.lmcache
import ostinato.connectors.mooncake_mover as mooncake_mover
import ostinato.connectors.redis_wire as redis_wire
import ostinato.connectors.store_mover  # noqa: F401 (all modules with threads are there before these are replaced)
from disk.simulated import SimulatedFolder
from ostinato.connectors.api import Connector, DevicePages, Mover
from ostinato.connectors.disk.codec import Item
from ostinato.connectors.disk.connector import DiskConnector
from ostinato.connectors.disk.options import DiskOptions
from ostinato.connectors.host import HostConnector
from ostinato.connectors.host_mover import HostMover
from ostinato.connectors.lmcache import LMCacheConnector
from ostinato.connectors.lmcache_lookups import Address
from ostinato.connectors.mooncake import MooncakeConnector
from ostinato.connectors.mooncake_client import MooncakeOptions
from ostinato.connectors.redis import RedisConnector
from ostinato.connectors.redis_wire import RedisAddress
from ostinato.transfer.job import TransferOrder
from torment.content import Truth
from torment.kernel import Kernel
from torment.mood import Mood
from torment.servers import LMCacheServer, MooncakeStore, RedisServer, modules

STAGING_BYTES = 1 << 14


class Tier:
    """One tier's backing store.  ``mood`` is that of its calls."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.mood = Mood(kernel)

    def make(self) -> Connector:
        raise NotImplementedError

    def patches(self) -> Sequence[Any]:
        """What stands in for the outside world while the program runs."""
        return ()

    def calm(self) -> None:
        self.mood.calm()

    def lose(self) -> None:
        """The store forgets on its own."""

    def end_process(self, power_loss: bool) -> None:
        """The engine's process is gone, in whatever it was doing."""


class HostTier(Tier):
    def __init__(self, kernel: Kernel, truth: Truth) -> None:
        super().__init__(kernel)
        self._budget = kernel.rng.randint(4, 40) * truth.layout.page_bytes
        self._eager = kernel.rng.random() < 0.6

    def make(self) -> Connector:
        connector = HostConnector(self._budget, self._eager)
        make_mover = connector.make_mover

        def make(device: DevicePages, notify: Callable[[], None]) -> Mover:
            mover = make_mover(device, notify)
            assert isinstance(mover, HostMover)
            self._hold_up(mover, mover._copy)
            return mover

        connector.make_mover = make  # type: ignore[method-assign]
        return connector

    def _hold_up(self, mover: HostMover, copy: Callable[[TransferOrder], None]) -> None:
        """Copies take their time and may fail half done."""

        def slowly(order: TransferOrder) -> None:
            half = len(order.moves) // 2
            for moves in (order.moves[:half], order.moves[half:]):
                self.mood.enter()
                copy(replace(order, moves=moves))

        mover._copy = slowly  # type: ignore[method-assign]


class DiskTier(Tier):
    def __init__(self, kernel: Kernel, truth: Truth) -> None:
        super().__init__(kernel)
        self._truth = truth
        self._budget = kernel.rng.choice((135_000, 160_000, 1 << 18))
        self._second = kernel.rng.random() < 0.2
        self.folder = SimulatedFolder()

    def make(self) -> Connector:
        self.folder.on_operation = self._on_operation
        connector = DiskConnector(DiskOptions("/simulated", self._budget, second_sight=self._second))
        write = connector.write

        def checked(items: Sequence[Item]) -> list[bool]:
            for item in items:
                self._truth.check(item.key, item.payload, "a record for the disk")
            return write(items)

        connector.write = checked  # type: ignore[method-assign]
        return connector

    def patches(self) -> Sequence[Any]:
        usage = SimpleNamespace(disk_usage=lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
        return (
            patch.object(disk_connector, "OsFolder", lambda path: self.folder),
            patch.object(disk_connector, "shutil", usage),
        )

    def lose(self) -> None:
        """A byte of some slab turns."""
        rng = self.kernel.rng
        slabs = [name for name in self.folder._names if name.startswith("slab")]
        data = self.folder.bytes_of(rng.choice(slabs)) if slabs else b""
        if isinstance(data, bytearray) and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def end_process(self, power_loss: bool) -> None:
        self.folder = self.folder.after_crash(self.kernel.rng) if power_loss else self.folder.copy()

    def _on_operation(self, what: str) -> None:
        try:
            self.mood.enter()
        except ConnectionError:
            number = errno.ENOSPC if what in ("allocate", "write") and self.kernel.rng.random() < 0.5 else errno.EIO
            raise OSError(number, os.strerror(number)) from None


class RedisTier(Tier):
    def __init__(self, kernel: Kernel, truth: Truth) -> None:
        super().__init__(kernel)
        self.server = RedisServer(truth, self.mood)

    def make(self) -> Connector:
        return RedisConnector(RedisAddress())

    def patches(self) -> Sequence[Any]:
        return (patch.object(redis_wire, "_connect", self.server.connect),)

    def lose(self) -> None:
        self.server.content.lose(self.mood)


class MooncakeTier(Tier):
    def __init__(self, kernel: Kernel, truth: Truth) -> None:
        super().__init__(kernel)
        self.store = MooncakeStore(truth, self.mood)
        self._emits = kernel.rng.random() < 0.7

    def make(self) -> Connector:
        options = MooncakeOptions("127.0.0.1:1")
        return MooncakeConnector(options, self._emits, self.store.library())

    def patches(self) -> Sequence[Any]:
        return (patch.object(mooncake_mover, "STAGING_BYTES", STAGING_BYTES),)

    def lose(self) -> None:
        self.store.objects.lose(self.mood)


class LMCacheTier(Tier):
    def __init__(self, kernel: Kernel, truth: Truth) -> None:
        super().__init__(kernel)
        self.server = LMCacheServer(truth, self.mood)

    def make(self) -> Connector:
        return LMCacheConnector(Address("tcp://127.0.0.1:1"))

    def patches(self) -> Sequence[Any]:
        return (patch.dict(sys.modules, modules(self.server)),)

    def lose(self) -> None:
        self.server.content.lose(self.mood)
        if self.kernel.rng.random() < 0.3:
            self.server.forgets = not self.server.forgets

    def calm(self) -> None:
        super().calm()
        self.server.forgets = False


KINDS = {"host": HostTier, "disk": DiskTier, "redis": RedisTier, "mooncake": MooncakeTier, "lmcache": LMCacheTier}


@contextmanager
def in_place(tiers: Sequence[Tier]) -> Iterator[None]:
    with ExitStack() as stack:
        for tier in tiers:
            for change in tier.patches():
                stack.enter_context(change)
        yield
