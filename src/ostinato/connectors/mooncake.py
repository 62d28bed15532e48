"""A Mooncake store as a shared tier: scheduler half.

Owns: the specification, and which way blocks take into the store.  Does not own: asking (``store``), the choice of
blocks (``mooncake_emission``), the client (``mooncake_client``), bytes (``mooncake_mover``).

``mooncake://127.0.0.1:50051``: the master's address, with ``segment=512MiB`` (memory lent to the store; ``0`` where
other processes lend enough) and ``host=127.0.0.1`` (this host's name for peers); or ``mooncake://127.0.0.1:50052
?mode=shm``: the address of a ``mooncake_client`` on this host, reached through shared memory.  ``store=emit``, the
default: the connector reads block tables through the scheduler context and emits its own orders; ``store=offer``: it
takes the blocks that it is offered.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from ostinato.cache.keys import BlockKey
from ostinato.connectors.api import Capabilities, DevicePages, Hook, Mover, Ownership, Site
from ostinato.connectors.context import KVConnectorSchedulerContext
from ostinato.connectors.mooncake_client import Library, MooncakeClient, MooncakeOptions
from ostinato.connectors.mooncake_emission import Emission
from ostinato.connectors.records import Directory, Records, StoreLink
from ostinato.connectors.registry import TierSpec, parse_bytes
from ostinato.connectors.store import MAX_BACKLOG, StoreConnector
from ostinato.errors import ConfigError, ConnectorError
from ostinato.ids import JobId, RequestId, TierId

log: Final = logging.getLogger(__name__)
SEGMENT: Final = "512MiB"
OPTIONS: Final = ("mode", "segment", "host", "store")
MAX_OWNERS: Final = 4096
"""Orders whose request is remembered; those that were taken back never reach the mover."""
EXPOSED: Final = (
    "Mooncake's client listens on all network interfaces, whatever it is told, and trusts whoever connects: run it in "
    "a network namespace, behind a firewall, or in a network of its own (docs/stores/mooncake.md)"
)


class MooncakeConnector(StoreConnector):
    """``emits``: orders of its own, through the scheduler context, rather than blocks that it is offered."""

    def __init__(self, options: MooncakeOptions, emits: bool = True, library: Library | None = None) -> None:
        hooks = frozenset({Hook.COMMIT, Hook.RELEASE} if emits else ())
        super().__init__(Capabilities(TierId("mooncake"), Ownership.SHARED, hooks=hooks))
        self.options = options
        self.emits = emits
        self._library = library
        self._client: MooncakeClient | None = None
        self._emission: Emission | None = None
        self._owners: OrderedDict[JobId, RequestId] = OrderedDict()

    def open(self, site: Site) -> None:
        from ostinato.connectors.mooncake_mover import staging_bytes

        super().open(site)
        if not self.options.shared_memory:
            log.warning("tier %s: %s", self.tier, EXPOSED)
        self._client = MooncakeClient(self.options, staging_bytes(site.layout), self._library)
        self._client.start()

    def open_directory(self, site: Site) -> Directory:  # noqa: ARG002
        return MooncakeDirectory(self._opened())

    def open_records(self, site: Site) -> Records:  # noqa: ARG002
        from ostinato.connectors.mooncake_mover import MooncakeRecords

        return MooncakeRecords(self._opened())

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.mooncake_mover import MooncakeMover

        assert self.site is not None, "open() comes first"
        site, self._notify = self.site, notify
        link = StoreLink(self.tier, site.identity, self.breakers, lambda: self.open_records(site), self._stored)
        mover = MooncakeMover(device, notify, link, self._opened(), self._take_owner)
        self._traffic = mover
        return mover

    def bind(self, context: KVConnectorSchedulerContext) -> None:
        if self.emits:
            assert self.site is not None, "open() comes first"
            self._emission = Emission(self.tier, self.site.layout, context, self._has_room, self._remember_owner)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        if self._emission is None:
            return super().offer(keys)
        self._emission.news(keys)
        return [False] * len(keys)

    def on_commit(self, request_id: RequestId, computed: int) -> None:
        assert self._emission is not None, "hooks are called after bind()"
        self._emission.commit(request_id, computed)

    def on_release(self, request_id: RequestId) -> None:
        assert self._emission is not None, "hooks are called after bind()"
        self._emission.release(request_id)

    def close(self) -> None:
        super().close()
        if self._client is not None:
            self._client.close()

    def _opened(self) -> MooncakeClient:
        assert self._client is not None, "open() comes first"
        return self._client

    def _has_room(self) -> bool:
        return (
            self._traffic is not None
            and not self.breakers.store.is_open
            and self._traffic.backlog_bytes < MAX_BACKLOG
        )  # fmt: skip

    def _remember_owner(self, job_id: JobId, request_id: RequestId) -> None:
        self._owners[job_id] = request_id
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def _take_owner(self, job_id: JobId) -> RequestId:
        return self._owners.pop(job_id, RequestId(""))


class MooncakeDirectory:
    """Implements ``Directory``."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        return self._client.contains(names)

    def close(self) -> None: ...


def make_connector(spec: TierSpec) -> MooncakeConnector:
    if unknown := set(spec.options) - set(OPTIONS):
        raise ConfigError(f"tier {spec.text!r}: unknown option {min(unknown)!r}; known: {', '.join(OPTIONS)}")
    mode, store = spec.options.get("mode", "direct"), spec.options.get("store", "emit")
    if mode not in ("direct", "shm") or store not in ("emit", "offer"):
        raise ConfigError(f"tier {spec.text!r}: mode is direct or shm, store is emit or offer")
    if mode == "shm" and {"segment", "host"} & set(spec.options):
        raise ConfigError(f"tier {spec.text!r}: with mode=shm the mooncake_client lends the memory; drop segment, host")
    address = re.fullmatch(r"//(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):([0-9]{1,5})/?", spec.argument)
    if address is None or not 0 < int(address[2]) < 65536:
        raise ConfigError(f"tier {spec.text!r}: expected mooncake://host:port, for example mooncake://127.0.0.1:50051")
    if importlib.util.find_spec("mooncake") is None:
        raise ConnectorError(f"tier {spec.text!r}: the Mooncake client is missing; install ostinato[mooncake]")
    segment = parse_bytes(spec.options.get("segment", SEGMENT)) if mode == "direct" else 0
    host = spec.options.get("host", "127.0.0.1")
    options = MooncakeOptions(f"{address[1]}:{address[2]}", mode == "shm", segment, host)
    return MooncakeConnector(options, emits=store == "emit")
