"""Configuration of an engine, read and checked at the edge; inner objects get plain arguments.

Owns: names, defaults, validation.  Names are vLLM's where both have the option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ostinato.errors import ConfigError

DTYPES: Final = ("auto", "bfloat16", "float32")
POLICIES: Final = ("fcfs", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user can set.

    ``model``: ``gemma3-270m``, a folder, or a hub id.  ``dtype``: ``auto`` is bfloat16 where the processor computes in
    it, else float32 (which is then faster).  ``kv_cache_memory``: bytes of the device pool, as a number or
    text such as ``2GiB``; ``num_gpu_blocks_override`` gives it in pages instead.  ``kv``: lower tiers from fast to
    slow, such as ``("host:8GiB",)``; a transfer that takes longer than its deadline is given up.
    ``kv_transfer_config``: more tiers behind them, in vLLM's JSON.  ``kv_events_config``: publish KV events, likewise.
    ``check_invariants``: audit after every step and poison memory (slow; for tests).
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory: int | str = "1GiB"
    num_gpu_blocks_override: int | None = None
    kv: Sequence[str] = field(default=(), repr=False)
    kv_transfer_config: str | None = field(default=None, repr=False)
    kv_events_config: str | None = None
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    scheduling_policy: str = "fcfs"
    load_deadline_s: float = 30.0
    store_deadline_s: float = 60.0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        for name in ("max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "max_model_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("load_deadline_s", "store_deadline_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")
        for name in ("enable_prefix_caching", "check_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.kv, (list, tuple)) or not all(isinstance(tier, str) for tier in self.kv):
            # Not shown: a tier may carry a password.
            raise ConfigError(f'kv is a list of tiers such as ["host:8GiB"], not a {type(self.kv).__name__}')
        if self.kv_transfer_config is not None and not isinstance(self.kv_transfer_config, str):
            raise ConfigError(f"kv_transfer_config is JSON text, not a {type(self.kv_transfer_config).__name__}")
        if self.kv_events_config is not None and not isinstance(self.kv_events_config, str):
            raise ConfigError(f"kv_events_config is JSON text, not a {type(self.kv_events_config).__name__}")
        if (self.kv or self.kv_transfer_config) and not self.enable_prefix_caching:
            raise ConfigError("kv tiers do nothing without enable_prefix_caching")


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
