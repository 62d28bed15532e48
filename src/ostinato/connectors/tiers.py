"""All tiers below the device that a configuration names, in order.

Owns: the order: ``kv`` first, then ``kv_transfer_config``.  Does not own: either syntax.
"""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.connectors.api import Connector
from ostinato.connectors.multi import expand
from ostinato.connectors.registry import make_connector
from ostinato.connectors.transfer_config import connector_from_json


def make_tiers(config: EngineConfig) -> tuple[Connector, ...]:
    """The connectors, those of a MultiConnector one by one.  Raises ConfigError; what was made until then is closed."""
    made: list[Connector] = []
    try:
        made.extend(make_connector(text) for text in config.kv)
        if config.kv_transfer_config is not None:
            made.append(connector_from_json(config.kv_transfer_config))
    except BaseException:
        for connector in made:
            connector.close()
        raise
    return expand(made)
