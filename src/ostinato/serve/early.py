"""Mistakes that are told at once, before torch and transformers are imported, which takes seconds.

Owns: asking the light parts first.  Does not own: the checks; ``LLM`` makes all of them again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.connectors.registry import parse_bytes
from ostinato.connectors.tiers import make_tiers
from ostinato.errors import ConfigError
from ostinato.events.config import parse_events_config
from ostinato.memory import check_memory
from ostinato.runtime.models import Progress, resolve


def check_output(path: Path | None) -> None:
    """Raise when ``path`` cannot be written to because its folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: {path.parent} is not a folder")


def check_early(config: EngineConfig, progress: Progress) -> None:
    """Raise what is wrong with the budget, the tiers or the model's name.  A known model's first use converts it."""
    memory = config.kv_cache_memory
    check_memory("the device pool", parse_bytes(memory) if isinstance(memory, str) else memory)
    for connector in make_tiers(config):
        connector.close()
    if config.kv_events_config is not None:
        parse_events_config(config.kv_events_config)
    # Results alone go to stdout.
    resolve(config.model, lambda text: print(text, file=sys.stderr), progress)
