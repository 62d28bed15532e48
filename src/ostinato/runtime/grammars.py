"""Which tokens may come next, when an output has to have a form.

Owns: compiling schemas and grammars (llguidance does it), their bounds, one output's state, its mask.  Does not own:
the fields (``structured_outputs``), what else is done to logits (``penalties``).

Invariant: a state is a function of the grammar and of the tokens so far, so a request that was preempted goes on from
its tokens alone.  Threads: :class:`Grammars` any; a :class:`GrammarState` the worker's.

The table of a large vocabulary takes seconds, so it is made when somebody asks first.  What a grammar may cost is
bounded by the limits below: some tenths of a second to compile, some 20 ms for a mask.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ostinato.errors import SamplingError
from ostinato.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT: Final = 32
"""Compiled grammars that are kept for the next request that has the same."""
_MOST_STATES: Final = 50_000
_MOST_SYMBOLS: Final = 200_000
_BLANKS: Final = r"[ \t\n\r]{0,32}"
"""Between the tokens of JSON: room for indentation, and no way to fill the context with blanks."""
_MOST_MESSAGE: Final = 300


class GrammarError(Exception):
    """An output cannot go on: a bound was hit, or the vocabulary has no token that fits."""


class GrammarState:
    """How far one output has come."""

    def __init__(self, matcher: LLMatcher, output: Sequence[int]) -> None:
        self._matcher = matcher
        for token in output:
            self.push(token)

    def mask(self, size: int) -> torch.Tensor:
        """[size] bool: the tokens that may come next.  Raises GrammarError where there is none."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
        if self._matcher.is_error() or not bits.any():
            raise GrammarError(_short(self._matcher.get_error()) or "no token of this model fits")
        allowed = torch.from_numpy(bits).bool()
        return torch.nn.functional.pad(allowed, (0, size - allowed.numel()))

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)


class Grammars:
    """One model's grammars.  ``vocabulary``: its token ids are below; ``eos``: the tokens that end an output."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = sorted(token for token in eos if token < vocabulary)
        self._table: LLTokenizer | None = None
        self._making_table = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._looking = threading.Lock()

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile it; SamplingError says why that is not possible."""
        self._matcher(wanted)

    def start(self, wanted: StructuredOutputs, output: Sequence[int] = ()) -> GrammarState:
        """The state after ``output``."""
        return GrammarState(self._matcher(wanted), output)

    def _matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        with self._looking:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return found.deep_copy()
        made = self._compile(wanted)
        with self._looking:
            self._compiled[wanted] = made
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        table = self._known_table()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MOST_STATES, max_grammar_size=_MOST_SYMBOLS, verbose_errors=False)
        try:
            made = LLMatcher(table, _source(wanted), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"structured_outputs: {_short(str(error))}") from None
        if made.is_error():
            raise SamplingError(f"structured_outputs: {_short(made.get_error())}")
        return made

    def _known_table(self) -> LLTokenizer:
        with self._making_table:
            if self._table is None:
                self._table = self._make_table()
            return self._table

    def _make_table(self) -> LLTokenizer:
        if importlib.util.find_spec("llguidance") is None:
            raise SamplingError("structured_outputs need llguidance: pip install 'ostinato[structured]'")
        if not self._eos or not hasattr(self._tokenizer, "backend_tokenizer"):
            raise SamplingError("structured_outputs need a fast tokenizer, and a token that ends an output")
        import llguidance.hf

        return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos)


def _source(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar))
        except Exception as error:  # the converter raises just that
            raise ValueError(str(error)) from None
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in wanted.choice))
    schema = '{"type": "object"}' if wanted.json_object else wanted.text
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _BLANKS})


def _short(message: str) -> str:
    """The first lines of a compiler's message: it may quote all of a grammar."""
    shown = " ".join(message.replace("<non-verbose/>", "").split())
    return shown if len(shown) <= _MOST_MESSAGE else shown[: _MOST_MESSAGE - 3] + "..."
