"""What one request asks of sampling and of its output's end.

Owns: the fields, their defaults and their validation.  Does not own: sampling itself (``runtime.sampler``) or the
detection of stops (``engine.text``).  Imports no torch, so that a client can build requests without it.

Names and meanings are vLLM's where both have a field; ``logits_digest`` is Ostinato's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from ostinato.errors import SamplingError

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters; :class:`SamplingError` on construction when a field is out of range.

    ``stop`` and ``stop_token_ids`` are kept as tuples, whatever they were given as.  ``top_k`` of 0 or -1 and
    ``top_p`` of 1 are off.  ``seed=None`` asks for a fresh random seed.  ``logits_digest`` asks for the SHA-256 over
    the logits of every generated position.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logits_digest: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        # The one way to set a field of a frozen dataclass; tuples keep the value hashable and unshared.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "logits_digest"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")

    def _check_numbers(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "a finite number of at least 0")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "a number above 0 and at most 1")
        if not _is_whole(self.top_k) or self.top_k < -1:
            _refuse("top_k", self.top_k, "a whole number: at least 1, or 0 or -1 for off")
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "a whole number of at least 1")
        if self.seed is not None and (
            not _is_whole(self.seed) or not -(1 << _SEED_BITS) <= self.seed < 1 << _SEED_BITS
        ):
            _refuse("seed", self.seed, "None or a whole number of 64 bits")

    @property
    def greedy(self) -> bool:
        """Whether every token is simply the most probable one."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    raise SamplingError(f"{name} must be {allowed}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = "None, a string or a list of strings, none of them empty"
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        _refuse("stop", value, allowed)
    for item in items:
        if not isinstance(item, str) or not item:
            _refuse("stop", value, allowed)
    return items


def _stop_ids(value: object) -> tuple[int, ...]:
    allowed = "None or a list of whole numbers of at least 0"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        _refuse("stop_token_ids", value, allowed)
    for item in value:
        if not _is_whole(item) or item < 0:
            _refuse("stop_token_ids", value, allowed)
    return tuple(value)
