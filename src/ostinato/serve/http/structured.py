"""``response_format`` and vLLM's fields for structured outputs.

Owns: which of them a request gives, and errors under the name that it used.  Does not own: what a form means
(``structured_outputs``, ``runtime.grammars``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from ostinato.errors import SamplingError
from ostinato.serve.http.errors import ApiError, bad_request
from ostinato.serve.http.exchange import Service
from ostinato.serve.http.protocol import Sampled
from ostinato.structured_outputs import StructuredOutputs

_GUIDED: Final = ("json", "regex", "choice", "grammar")
_FIELDS: Final = frozenset({"json_", "regex", "choice", "grammar", "json_object"})
_OURS: Final = re.compile(r"^structured_outputs: ")


async def structured(service: Service, body: Sampled) -> StructuredOutputs | None:
    """The form that ``body`` asks for, compiled on the tokenizer's thread so that others need not wait for it."""
    given = list(_given(body))
    if len(given) > 1:
        raise bad_request(f"{given[1][0]}: {given[0][0]} says already which form the output has", given[1][0])
    if not given:
        return None
    name, fields = given[0]
    try:
        wanted = StructuredOutputs(**fields)
        await service.prompts.run(lambda: service.llm.llm.built.grammars.check(wanted))
    except SamplingError as error:
        raise refused(name, error) from None
    return wanted


def refused(name: str, error: SamplingError) -> ApiError:
    """``error`` under the name of the field that was used."""
    return bad_request(_OURS.sub(f"{name}: ", str(error)), name, "invalid_value")


def _given(body: Sampled) -> Iterator[tuple[str, dict[str, Any]]]:
    form = body.response_format
    if form is not None and form.type != "text":
        yield "response_format", _response_format(form.type, form.json_schema)
    if body.structured_outputs is not None:
        yield (
            "structured_outputs",
            body.structured_outputs.model_dump(by_alias=True, include=set(_FIELDS), exclude_none=True),
        )
    for name in _GUIDED:
        value = getattr(body, f"guided_{name}", None)
        if value not in (None, False):
            yield f"guided_{name}", {name: value}


def _response_format(kind: str, schema: Any) -> dict[str, Any]:
    match kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            if schema is None or schema.schema_ is None:
                raise bad_request("response_format: json_schema has a schema", "response_format", "invalid_value")
            return {"json": schema.schema_}
    message = f"response_format: type is text, json_object or json_schema, not {kind!r}"
    raise bad_request(message, "response_format", "unsupported")
