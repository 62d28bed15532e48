"""The form that an output must have: JSON, a regular expression, one of several texts, a grammar.

Owns: the fields, and what of them is not even looked at by a compiler.  Does not own: whether a schema or grammar makes
sense (``runtime.grammars``).  Plain values; any thread.  Names are vLLM's.
"""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ostinato.errors import SamplingError

MOST_TEXT: Final = 128 << 10
"""Characters of a schema, expression, grammar, or of all choices: what a compiler is given to read."""
_FORMS: Final = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of the fields; SamplingError on construction otherwise.

    ``json``: a JSON schema, as an object or as text (kept as text).  ``json_object``: any JSON object.  ``regex``: the
    whole output matches.  ``choice``: the output is one of these.  ``grammar``: Lark, or GBNF.
    """

    json: str | bool | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        given += ["json"] if self.json is False else []
        if len(given) != 1:
            named = f"not {' and '.join(given)}" if given else "and there is none"
            raise SamplingError(f"structured_outputs: give one of {', '.join(_FORMS)}, {named}")
        object.__setattr__(self, "json", _schema_text(self.json))
        object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))) or getattr(self, name) == "":
                raise SamplingError(f"structured_outputs: {name} is text, and not empty")
        if len(self.text) > MOST_TEXT:
            raise SamplingError(
                f"structured_outputs: {given[0]} has {len(self.text):,} characters, but {MOST_TEXT:,} is the most"
            )

    @property
    def text(self) -> str:
        """What there is to compile; empty for ``json_object``."""
        if self.choice is not None:
            return "".join(self.choice)
        assert self.json is None or isinstance(self.json, str)
        return self.json or self.regex or self.grammar or ""


def _schema_text(schema: object) -> str | None:
    if schema is None:
        return None
    try:
        # Read again also when it came as text: a compiler is never given what is no JSON.
        parsed = _json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, (Mapping, bool)):
            raise SamplingError("structured_outputs: json is a JSON schema, which is an object")
        return _json.dumps(parsed)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SamplingError):
            raise
        raise SamplingError(f"structured_outputs: json is no JSON schema: {error}") from None


def _choices(choice: object) -> tuple[str, ...] | None:
    if choice is None:
        return None
    if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(one, str) and one for one in choice):
        raise SamplingError("structured_outputs: choice is a list of texts, none of them empty")
    return tuple(choice)
