"""Log-probabilities in OpenAI's two forms.

Owns: the two forms.  A probability of 0 is -9999, since JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ostinato.engine.outputs import Logprob, PositionLogprobs

_LEAST: Final = -9999.0


class LegacyLogprobs:
    """``/v1/completions``: four lists side by side.  Goes on from one chunk to the next."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0

    def of(self, positions: Sequence[PositionLogprobs | None], first: str = "") -> dict[str, Any]:
        """``first``: the token at a position that has no probability, a prompt's first."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position in positions:
            entries = list(position.values()) if position is not None else []
            tokens.append(_spelled(entries[0]) if entries else first)
            chosen.append(_finite(entries[0].logprob) if entries else None)
            shown = [one for at, one in enumerate(entries) if at == 0 or one.rank <= self._count]
            # Two tokens may look alike: the more probable one is shown.
            ranked = sorted(shown, key=lambda one: -one.rank)
            top.append({_spelled(one): _finite(one.logprob) for one in ranked} if entries and self._count else None)
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
    """``/v1/chat/completions``: one object for each token."""
    content = []
    for position in positions:
        entries = list(position.values())
        top = sorted((one for one in entries if one.rank <= count), key=lambda one: one.rank)
        content.append({**_entry(entries[0]), "top_logprobs": [_entry(one) for one in top]})
    return {"content": content, "refusal": None}


def _entry(one: Logprob) -> dict[str, Any]:
    text = _spelled(one)
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _spelled(one: Logprob) -> str:
    return one.decoded_token or ""


def _finite(value: float) -> float:
    return max(value, _LEAST)
