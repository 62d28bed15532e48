"""What one request asks of sampling and of its output's end.

Owns: the fields, their defaults and their validation.  Does not own: sampling itself (``runtime.sampler``), ids beyond
a model's vocabulary (``engine.intake``) or the detection of stops (``engine.text``).  Imports no torch, so that a
client can build requests without it.  Plain values; any thread.

Names and meanings are vLLM's where both have a field; ``bad_words_ids`` is transformers', ``logits_digest`` is
Ostinato's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from ostinato.errors import SamplingError
from ostinato.structured_outputs import StructuredOutputs

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

MOST_BIAS: Final = 100.0
_SEED_BITS: Final = 63
_FLAGS: Final = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "logits_digest")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters; :class:`SamplingError` on construction when a field is out of range.

    Lists are kept as tuples and ``logit_bias`` as sorted pairs, whatever they were given as.  What is done to a row of
    logits, in this order: ``structured_outputs``, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``,
    penalties; then the most probable token is taken (greedy), or one is drawn by ``temperature``, ``min_p``, ``top_k``,
    ``top_p``.

    ``n``: completions of the prompt; number i has the seed ``seed + i``.  ``seed=None`` asks for fresh random seeds.
    ``top_k`` of 0 or -1, ``top_p`` of 1 and ``min_p`` of 0 are off.
    ``min_tokens``: before these, no token that would end the output is sampled, and stop strings do not end it.
    ``repetition_penalty`` looks at prompt and output, ``presence_penalty`` and ``frequency_penalty`` at the output.
    ``bad_words``: texts that are not generated; ``bad_words_ids``: the same as token ids.
    ``logprobs``: log-probabilities of each sampled token and of this many most probable ones (-1: all), of the model's
    own logits, before anything above is done to them; ``prompt_logprobs``: the same of the prompt's tokens, which are
    then all computed, reusing nothing.  ``detokenize=False``: outputs have no text, and stop strings are not possible.
    ``structured_outputs``: the form that the output has; it ends the output itself, so not with ``ignore_eos``.
    ``logits_digest``: the SHA-256 over the logits of every generated position.
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
    n: int = 1
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        # The one way to set a field of a frozen dataclass; tuples keep the value hashable and unshared.
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words_ids", _id_lists(self.bad_words_ids))
        if self.stop and not self.detokenize:
            raise SamplingError("stop needs the output as text: leave detokenize=True, or use stop_token_ids")
        if self.structured_outputs is not None:
            self._check_structured()

    def _check_numbers(self) -> None:
        for name in ("max_tokens", "n"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "a finite number of at least 0")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "a number above 0 and at most 1")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "a number from 0 to 1")
        if not _is_whole(self.top_k) or self.top_k < -1:
            _refuse("top_k", self.top_k, "a whole number: at least 1, or 0 or -1 for off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                _refuse(name, value, "a number from -2 to 2")
        if not _is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < math.inf:
            _refuse("repetition_penalty", self.repetition_penalty, "a finite number above 0 (1 is off)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < -1):
                _refuse(name, value, "None or a whole number: at least 0, or -1 for the whole vocabulary")
        if self.seed is not None and (
            not _is_whole(self.seed) or not -(1 << _SEED_BITS) <= self.seed < 1 << _SEED_BITS
        ):
            _refuse("seed", self.seed, "None or a whole number of 64 bits")

    def _check_structured(self) -> None:
        wanted: object = self.structured_outputs
        if not isinstance(wanted, StructuredOutputs):
            _refuse("structured_outputs", wanted, "None or StructuredOutputs")
        if self.ignore_eos or self.allowed_token_ids is not None:
            other = "ignore_eos" if self.ignore_eos else "allowed_token_ids"
            raise SamplingError(f"structured_outputs say which tokens come, and when they end: leave out {other}")

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

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs in ascending order of ids."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def penalised(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def uses_past(self) -> bool:
        """Whether a token depends on which tokens came before, other than by the model."""
        return self.penalised or bool(self.bad_words_ids) or self.structured_outputs is not None

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen (``min_tokens`` does so for a while)."""
        return bool(self.uses_past or self.biases or self.allowed_token_ids is not None or self.min_tokens)

    def completion(self, index: int) -> SamplingParams:
        """The parameters of completion ``index`` of ``n``, as a request of its own.

        Only the first one tells of the prompt.
        """
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None:
            seed = (seed + index + (1 << _SEED_BITS)) % (2 << _SEED_BITS) - (1 << _SEED_BITS)
        return replace(self, n=1, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    raise SamplingError(f"{name} must be {allowed}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(name, value, f"a whole number of at least {least}")


def _texts(name: str, value: object) -> tuple[str, ...]:
    allowed = "None, a string or a list of strings, none of them empty"
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        _refuse(name, value, allowed)
    for item in items:
        if not isinstance(item, str) or not item:
            _refuse(name, value, allowed)
    return items


def _ids(name: str, value: object) -> tuple[int, ...]:
    allowed = "None or a list of whole numbers of at least 0"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        _refuse(name, value, allowed)
    for item in value:
        if not _is_whole(item) or item < 0:
            _refuse(name, value, allowed)
    return tuple(value)


def _allowed(value: object) -> tuple[int, ...]:
    ids = _ids("allowed_token_ids", value)
    if not ids:
        _refuse("allowed_token_ids", value, "None or a list of at least one token id")
    return tuple(sorted(set(ids)))


def _id_lists(value: object) -> tuple[tuple[int, ...], ...]:
    name, allowed = "bad_words_ids", "None or a list of lists of token ids, none of them empty"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        _refuse(name, value, allowed)
    for item in value:
        if not isinstance(item, (list, tuple)) or not item or not all(_is_whole(i) and i >= 0 for i in item):
            _refuse(name, value, allowed)
    return tuple(tuple(item) for item in value)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    name, allowed = "logit_bias", f"None or a map of token ids to numbers from -{MOST_BIAS:g} to {MOST_BIAS:g}"
    if value is None:
        return ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple)) and len(item) == 2 for item in value):
        pairs = [(item[0], item[1]) for item in value]
    else:
        _refuse(name, value, allowed)
    for token, bias in pairs:
        if not _is_whole(token) or token < 0 or not _is_number(bias) or not -MOST_BIAS <= bias <= MOST_BIAS:
            _refuse(name, value, allowed)
    chosen = {int(token): float(bias) for token, bias in pairs}
    if len(chosen) != len(pairs):
        _refuse(name, value, "a map that has each token id once")
    return tuple(sorted(chosen.items()))
