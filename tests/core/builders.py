"""Small layouts, pools and cores for the tests of the cache core."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ostinato.cache.directory import Directory
from ostinato.cache.kinds import Chunked, Full, Kind, State, Window
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.cache.pool import SlotPool
from ostinato.cache.ports import Probe
from ostinato.cache.retention import Retention
from ostinato.hierarchy.tiers import Core, CoreConfig, OwnedTier, StoreMode
from ostinato.ids import DEVICE, GroupId, TierId
from ostinato.transfer.book import Book

PAGE_BYTES = 64 * 12

Shape = tuple[Kind, int, int, int]
"""Kind, hash unit, hash units per page, hit granularity."""


def make_group(index: int, shape: Shape) -> GroupSpec:
    kind, unit, page_units, granularity = shape
    stride = PAGE_BYTES // page_units
    return GroupSpec(GroupId(index), kind, (index,), unit, page_units, granularity, stride - 1, stride)


def make_layout(*shapes: Shape) -> CacheLayout:
    return CacheLayout(tuple(make_group(index, shape) for index, shape in enumerate(shapes)), PAGE_BYTES)


def plain_layout(*kinds: Kind, unit: int = 4) -> CacheLayout:
    return make_layout(*((kind, unit, 1, unit) for kind in kinds))


def random_kind(rng: random.Random) -> Kind:
    match rng.randrange(4):
        case 0:
            return Full()
        case 1:
            return Window(rng.randint(1, 20), rng.choice((0, 0, 1, 3, 5)))
        case 2:
            return Chunked(rng.randint(1, 16))
        case _:
            return State()


def random_shape(rng: random.Random) -> Shape:
    unit, kind = rng.choice((1, 2, 3, 4, 6)), random_kind(rng)
    page_units = 1 if kind == State() else rng.choice((1, 1, 2, 3, 4))
    return kind, unit, page_units, unit * rng.choice((1, 1, 2, 3))


def make_pool(capacity: int, tier: TierId = DEVICE) -> tuple[SlotPool, Retention, Directory]:
    directory = Directory()
    retention = Retention(tier, directory)
    return SlotPool(tier, capacity, retention), retention, directory


def make_core(
    layout: CacheLayout,
    device_slots: int,
    lower: Sequence[tuple[str, int, StoreMode]] = (),
    asked: Mapping[TierId, Probe] | None = None,
    config: CoreConfig | None = None,
    world_size: int = 1,
) -> Core:
    directory = Directory()
    tiers = {TierId(name): OwnedTier(TierId(name), slots, directory, mode) for name, slots, mode in lower}
    asked = dict(asked or {})
    return Core(
        layout=layout,
        config=config or CoreConfig(),
        directory=directory,
        device=OwnedTier(DEVICE, device_slots, directory),
        lower=tiers,
        asked=asked,
        book=Book(world_size),
        order=(DEVICE, *tiers, *asked),
    )
