"""The disk tier: scheduler half.

Owns: opening the folder as its writer or as a reader of another's, answers to the core, the step from reader to writer
when the writer is gone.  Does not own: records (``store``, ``follower``), threads of transfers (``mover``).
Specification: ``disk:DIR:SIZE`` with options ``mode=auto|direct|buffered``, ``write_limit=RATE``,
``admit=all|second``, ``key_file=PATH``.

One process writes a folder, under a lock that ends with it; others that name the same folder read what it has.  The
budget is the folder's, whatever models use it.  Answers come from the index in memory: nothing here waits for the disk
but :meth:`DiskConnector.open` and :meth:`DiskConnector.close`.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Capabilities, Connector, DevicePages, Mover, Ownership, Site
from ostinato.connectors.disk.admission import Admission, Rate
from ostinato.connectors.disk.codec import Codec, Item, make_codec
from ostinato.connectors.disk.files import OsFolder
from ostinato.connectors.disk.follower import Follower
from ostinato.connectors.disk.format import LOCK_NAME, MAX_MODEL_BYTES, FutureVersionError
from ostinato.connectors.disk.options import DiskOptions, parse_options
from ostinato.connectors.disk.requests import serve
from ostinato.connectors.disk.space import check_budget
from ostinato.connectors.disk.store import DiskStore
from ostinato.connectors.registry import TierSpec
from ostinato.errors import ConnectorError
from ostinato.ids import TierId

log: Final = logging.getLogger(__name__)
DRAIN_S: Final = 10.0
"""How long closing goes on with stores that were begun."""
REFUTED_S: Final = 5.0
REFRESH_S: Final = 1.0
"""How old the knowledge of another process's folder may be."""
Store: TypeAlias = "DiskStore | Follower"


class DiskConnector(Connector):
    """A tier in files."""

    def __init__(self, options: DiskOptions) -> None:
        self.capabilities = Capabilities(TierId("disk"), Ownership.KEPT)
        self._options = options
        rate = Rate.parse(options.write_limit) if options.write_limit else None
        self._admission = Admission(rate, options.second_sight)
        self._store: Store | None = None
        self._codec: Codec | None = None
        self._folder: OsFolder | None = None
        self._sizes: tuple[int, ...] = ()
        self._model = ""
        self._refuted: dict[BlockKey, float] = {}
        self._following: _Following | None = None
        self._retired: Store | None = None

    @property
    def store(self) -> Store:
        assert self._store is not None, "open() comes first"
        return self._store

    @property
    def codec(self) -> Codec:
        assert self._codec is not None, "open() comes first"
        return self._codec

    def open(self, site: Site) -> None:
        options = self._options
        self._sizes = tuple(spec.unit_bytes for spec in site.layout.groups)
        self._model = "".join(c for c in site.model if c.isprintable())[:MAX_MODEL_BYTES]
        check_budget(options.budget, self._sizes, options.direct)
        self._codec = make_codec(site.identity, options.secret)
        try:
            self._folder = OsFolder(options.path)
            if self._folder.lock(LOCK_NAME):
                self._store = self._open_writer(self._folder)
            else:
                log.warning("%s is read only: another process writes it, or nobody may", options.path)
                self._store = Follower(self._folder, options.direct)
                self._following = _Following(self._follow)
        except FutureVersionError:
            self.close()
            raise ConnectorError(
                f"the cache in {options.path} was written by a newer version; name another folder, or remove this one"
            ) from None
        except OSError as error:
            self.close()
            raise ConnectorError(f"the disk tier cannot use {options.path}: {error.strerror or error}") from None

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.disk.mover import DiskMover

        if self._following is not None:
            self._following.notify = notify
        return DiskMover(device, notify, self, DRAIN_S)

    def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        held = self._held(keys)
        if self._following is not None and not all(held) and self._following.is_stale():
            return None
        return held

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        if self.store.stopped:
            return [False] * len(keys)
        new = [key for key, held in zip(keys, self._held(keys), strict=True) if not held]
        takes = self._admission.takes(new, [self._sizes[key.group] for key in new])
        wanted = {key for key, taken in zip(new, takes, strict=True) if taken}
        for key in wanted & self._refuted.keys():
            if not self.store.holds(self.codec, self.codec.name(key)):
                del self._refuted[key]  # a faulty record is gone: what replaces it is as good as any
        return [key in wanted for key in keys]

    def refuted(self, keys: Sequence[BlockKey]) -> None:
        """Faulty records are gone already; those that were only slow are not asked for at once again."""
        now = time.monotonic()
        self._refuted = {key: until for key, until in self._refuted.items() if until > now}
        self._refuted.update((key, now + REFUTED_S) for key in keys)

    def close(self) -> None:
        if self._following is not None:
            self._following.close()
        for part in (self._store, self._retired, self._folder):
            if part is not None:
                part.close()

    # What the mover calls.

    def write(self, items: Sequence[Item]) -> list[bool]:
        return self.store.write(self.codec, items)

    def read(self, items: Sequence[Item]) -> list[bool]:
        return self.store.read(self.codec, items)

    def _held(self, keys: Sequence[BlockKey]) -> list[bool]:
        store, codec = self.store, self.codec
        held = [store.holds(codec, codec.name(key)) for key in keys]
        if self._refuted:
            now = time.monotonic()
            held = [is_held and self._refuted.get(key, 0.0) <= now for key, is_held in zip(keys, held, strict=True)]
        return held

    def _open_writer(self, folder: OsFolder) -> DiskStore:
        store = DiskStore(folder, self._options.budget, self._options.direct)
        missing = self._options.budget - store.space.used() - shutil.disk_usage(self._options.path).free
        if missing > 0:
            log.warning("the disk tier may take %d MiB more than %s has", missing >> 20, self._options.path)
        store.model = self._model
        store.start(lambda: serve(store))
        return store

    def _follow(self) -> bool:
        """Take in what the writer did, or become the writer when it is gone; True when that is so."""
        assert self._folder is not None
        old = self.store
        assert isinstance(old, Follower)
        if not self._folder.lock(LOCK_NAME):
            old.refresh()
            return False
        self._store, self._retired = self._open_writer(self._folder), old  # loads may still use the old view
        log.info("the disk tier's writer is gone: this process writes %s now", self._options.path)
        return True


class _Following:
    """The thread that looks at another process's folder, when asked and at most once in ``REFRESH_S``."""

    def __init__(self, follow: Callable[[], bool]) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._follow = follow
        self._seen = time.monotonic()
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ostinato-disk-follow", daemon=True)
        self._thread.start()

    def is_stale(self) -> bool:
        """Whether a look is due; it begins now."""
        if self._ended or time.monotonic() - self._seen < REFRESH_S:
            return False
        self._wake.set()
        return True

    def close(self) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ended:
                return
            try:
                self._ended = self._follow()
            except Exception as error:
                log.warning("the disk tier cannot follow its writer (%s)", error)
            self._seen = time.monotonic()
            self.notify()


def make_connector(spec: TierSpec) -> DiskConnector:
    return DiskConnector(parse_options(spec))
