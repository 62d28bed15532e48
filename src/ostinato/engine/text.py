"""From token ids to text, one token at a time, and the decision that a request's output has ended.

Owns: incremental detokenisation, stop strings, stop tokens, EOS and the token limit.  Does not own: the tokenizer, the
parameters, or what becomes of the text.  One :class:`OutputText` belongs to one request and one thread.

Invariants: text once given out is never taken back; what is given out does not depend on how the text was cut into
tokens; half a UTF-8 character is never given out (a character still unfinished at the end of the output is dropped);
the work per token does not grow with the output.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ostinato.errors import SamplingError
from ostinato.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_BROKEN: Final = "\ufffd"
_CONTEXT_TOKENS: Final = 5
"""Tokens of the prompt's end that are decoded along, so that the first new token keeps its leading space."""
_MOST_PENDING: Final = 16
"""Far more tokens than one character needs: beyond this the bytes are not UTF-8, and are given out as such."""


class AddedToken(Protocol):
    """What is looked at of a tokenizer's added token."""

    @property
    def special(self) -> bool: ...


class FastTokenizer(Protocol):
    """What is used of a transformers fast tokenizer.  ``Any`` is a str: transformers types it with the batch case."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Any: ...


class Vocabulary:
    """A tokenizer seen as needed here: which ids are special or single bytes.  Make one per tokenizer and share it."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of ``word`` at the beginning of a text and after a space, as far as only the first one differs."""
        word = word.lstrip()
        plain, spaced = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
        if not word or not plain:
            raise SamplingError("bad_words must be words: this tokenizer makes no token of one of them")
        # As in vLLM: with another number of tokens, the word in the middle of a text is not this word after a space.
        return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]

    def byte(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token; None for any other token."""
        spelled = self._tokenizer.convert_ids_to_tokens(token_id)
        if not spelled or not (match := _BYTE_TOKEN.fullmatch(spelled)):
            return None
        # A vocabulary without byte fallback may have this very spelling as text.
        return None if self.decode([token_id]) == spelled else bytes.fromhex(match[1])


class Detokenizer:
    """Token ids to text by the prefix-offset method.

    The newest tokens are decoded twice, without and with what is pending; the difference is the new text.  It waits
    while it ends in U+FFFD, which stands for an unfinished character::

        ids:   ... | context (given out) | pending |
                     \\____ decode ____/             -> n characters
                     \\_________ decode __________/  -> new text from n on

    Byte-fallback tokens go through a UTF-8 decoder instead: their decoder in the tokenizer turns a whole run of bytes
    into U+FFFD when one is wrong, which could change text already given out.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skipped: Collection[int] = vocabulary.special if skip_special_tokens else ()
        self._context = [
            i for i in prompt_ids[-_CONTEXT_TOKENS:] if i not in self._skipped and vocabulary.byte(i) is None
        ]
        # A character that the prompt leaves unfinished belongs to the output that finishes it.
        shown = vocabulary.decode(self._context) if self._context else ""
        self._context_length = len(shown.removesuffix(_BROKEN))
        self._pending: list[int] = []
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; often one word, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        if (byte := self._vocabulary.byte(token_id)) is not None:
            return self._flush_pending() + self._bytes.decode(byte)
        # Bytes left unfinished by a token that is none: they are no character.
        broken = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        self._pending.append(token_id)
        text = self._vocabulary.decode(self._context + self._pending)
        if text.endswith(_BROKEN) and len(self._pending) < _MOST_PENDING:
            return broken
        return broken + self._settle(text)

    def finish(self) -> str:
        """What was waiting at the output's end, less the unfinished character it ends in.

        A U+FFFD that the model meant as such cannot be told from one, and is dropped too if it is the very last.
        """
        return self._flush_pending().removesuffix(_BROKEN)

    def _flush_pending(self) -> str:
        if not self._pending:
            return ""
        return self._settle(self._vocabulary.decode(self._context + self._pending))

    def _settle(self, text: str) -> str:
        new = text[self._context_length :]
        # Tokens without text stay in the context: they may carry the state of a leading space.
        kept = self._pending if new else (self._context + self._pending)[-_CONTEXT_TOKENS:]
        shown = self._vocabulary.decode(kept) if kept else ""
        if text.endswith(_BROKEN) or shown.endswith(_BROKEN):
            # Part of a character: the next token must neither complete what was given out nor be measured against it.
            kept, shown = [], ""
        self._context, self._context_length, self._pending = kept, len(shown), []
        return new


class _StopString:
    """Knuth-Morris-Pratt over one stop string: how much of it the text seen so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def push(self, character: str) -> bool:
        """Take one more character; True when the whole string has just been seen."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)

    def pass_by(self) -> None:
        """If the whole string has just been seen, go on as if it did not count."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]


class StopStrings:
    """Passes text through up to the stop string that is completed first, holding back what may become part of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        # Longest first: of two completed by the same character, the one that began earlier counts.
        self._stops = [_StopString(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """The part of the text so far that is now certain; after a stop was ``found``, push no more.

        Not ``armed``: a stop string that ``text`` completes is ordinary text, one that it begins may still count.
        """
        assert self.found is None
        if not self._stops:
            return text
        before = len(self._held)
        self._held += text
        for i, character in enumerate(text, before + 1):
            done = [stop.text for stop in self._stops if stop.push(character)]
            if done and not armed:
                for stop in self._stops:
                    stop.pass_by()
            elif done:
                self.found = done[0]
                return self._take(i if self._include else i - len(done[0]))
        # An included stop string is given out anyway, so nothing need wait for it.
        waiting = 0 if self._include else max(stop.matched for stop in self._stops)
        return self._take(len(self._held) - waiting)

    def flush(self) -> str:
        """What was held back, when the output ends without a stop string."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one token added.  ``stop_reason`` is the stop string or stop token id that ended the output, as in vLLM."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputText:
    """One request's output as text, and when it ends."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        prompt_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> None:
        """``max_tokens`` replaces the request's own limit, for one that the context's end makes smaller."""
        skip = params.skip_special_tokens
        self._detokenizer = Detokenizer(vocabulary, skip, prompt_ids) if params.detokenize else None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_ids)
        self._include_stop = params.include_stop_str_in_output
        self._room = params.max_tokens if max_tokens is None else max_tokens
        self._unarmed = params.min_tokens
        self._parts: list[str] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All the text given out so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def push(self, token_id: int) -> TextStep:
        """Take the next token.  Not to be called once the output is finished."""
        assert self.finish_reason is None, self.finish_reason
        self._room -= 1
        step = self._step(token_id, armed=self._unarmed == 0)
        self._unarmed = max(0, self._unarmed - 1)
        self.finish_reason = step.finish_reason
        if step.text:
            self._parts.append(step.text)
        return step

    def _step(self, token_id: int, armed: bool) -> TextStep:
        """``armed``: ``min_tokens`` were generated before this one."""
        ends = armed and (token_id in self._eos or token_id in self._stop_ids)
        last = ends or self._room <= 0
        new = ""
        if self._detokenizer is not None:
            # The text of a token that ends the output is not part of it, unless asked for.
            new = "" if ends and not self._include_stop else self._detokenizer.push(token_id)
            new += self._detokenizer.finish() if last else ""
        text = self._stops.push(new, armed)
        if self._stops.found is not None:
            return TextStep(text, "stop", self._stops.found)
        if not last:
            return TextStep(text)
        text += self._stops.flush()
        if ends:
            return TextStep(text, "stop", None if token_id in self._eos else token_id)
        return TextStep(text, "length")
