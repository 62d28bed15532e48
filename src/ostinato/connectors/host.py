"""Host memory as a tier: scheduler half.

Owns: the budget.  The tier is *owned*: slots, keys and eviction are the core's; this connector only copies, on threads
of its own (``host_mover``).  Specification: ``host:8GiB`` (``?store=eager``, the default, or ``lazy``).
"""

from __future__ import annotations

from collections.abc import Callable

from ostinato.connectors.api import Capabilities, Connector, DevicePages, Mover, Ownership
from ostinato.connectors.registry import TierSpec, parse_bytes
from ostinato.errors import CapacityError, ConfigError
from ostinato.ids import TierId
from ostinato.memory import check_memory


class HostConnector(Connector):
    """``budget`` bytes of host memory."""

    def __init__(self, budget: int, eager: bool = True) -> None:
        check_memory("the host tier", budget)
        self.capabilities = Capabilities(TierId("host"), Ownership.OWNED, eager)
        self._budget = budget
        self._slots = 0

    def slots(self, page_bytes: int) -> int:
        self._slots = self._budget // page_bytes
        if not self._slots:
            raise CapacityError(f"the host tier's budget of {self._budget} bytes is less than one page ({page_bytes})")
        return self._slots

    def make_mover(self, device: DevicePages, notify: Callable[[], None]) -> Mover:
        from ostinato.connectors.host_mover import HostMover

        return HostMover(device, self._slots, notify)


def make_connector(spec: TierSpec) -> HostConnector:
    if not spec.argument:
        raise ConfigError(f"tier {spec.text!r}: say how much memory, for example host:8GiB")
    unknown = set(spec.options) - {"store"}
    mode = spec.options.get("store", "eager")
    if unknown or mode not in ("eager", "lazy"):
        raise ConfigError(f"tier {spec.text!r}: the only option is store=eager or store=lazy")
    return HostConnector(parse_bytes(spec.argument), eager=mode == "eager")
