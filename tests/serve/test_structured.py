"""``response_format`` and vLLM's fields for structured outputs, through OpenAI's own client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from serve.served import MODEL, Running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "place", "description": "a place", "schema": SCHEMA, "strict": True},
}
MESSAGES: Any = [{"role": "user", "content": "Name a place."}]
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "seed": 3, "temperature": 0.7}


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def assert_is_place(text: str | None) -> None:
    found = json.loads(text or "")
    assert list(found) == ["city", "size"]
    assert len(found["city"]) <= 6
    assert found["size"] in (1, 2, 3)


def test_a_chat_answers_by_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, response_format=FORMAT, n=2, logprobs=True, **OPTIONS)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert_is_place(choice.message.content)
        assert choice.logprobs is not None
        assert choice.logprobs.content
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, response_format=FORMAT, **OPTIONS)
    stream: Any = client.chat.completions.create(messages=MESSAGES, response_format=FORMAT, stream=True, **OPTIONS)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content


def test_any_json_object(client: openai.OpenAI) -> None:
    """It may be long; as far as it goes, it is the beginning of an object."""
    answer = client.chat.completions.create(
        messages=MESSAGES, response_format={"type": "json_object"}, **{**OPTIONS, "temperature": 0}
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_response_format_of_type_text_is_no_form(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(messages=MESSAGES, **{**OPTIONS, "max_tokens": 5})
    text = client.chat.completions.create(
        messages=MESSAGES, response_format={"type": "text"}, **{**OPTIONS, "max_tokens": 5}
    )
    assert text.choices[0].message.content == free.choices[0].message.content


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{2,5}"}}, "[a-c]{2,5}"),
        ({"guided_regex": "[a-c]{2,5}"}, "[a-c]{2,5}"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/ "b"'}}, "a[0-9]b"),
        ({"guided_json": {"enum": ["x", "y"]}}, '"[xy]"'),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}}, "5"),
    ],
    ids=str,
)
def test_every_way_to_say_a_form(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(prompt="Say: ", extra_body=extra, **OPTIONS)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text.strip())


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format",
            "invalid_value",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "invalid_type"),
        ({"guided_regex": "(a"}, "guided_regex", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar", "invalid_value"),
        ({"guided_grammar": "a" * 200_000}, "guided_grammar", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", None),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "b"}}, "structured_outputs", "unsupported"),
        ({"guided_regex": "a", "ignore_eos": True}, "structured_outputs", "invalid_value"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_form_that_cannot_be_is_a_400(running: Running, fields: dict[str, Any], param: str, code: str | None) -> None:
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "ab", **fields}, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == (param, code)
    assert 0 < len(error["message"]) < 400


def test_large_and_deep_schemas_take_bounded_time(running: Running) -> None:
    """The others are heard meanwhile; whatever is too large is refused."""
    names = [f"p{i}" for i in range(1500)]
    wide = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    deep: dict[str, Any] = {}
    for _ in range(90):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}}}
    for schema in (wide, deep, loop, {"enum": list(range(9000))}, {"type": "string", "pattern": "(a{1,900}){1,900}"}):
        body = {"prompt": "ab", "guided_json": schema, "max_tokens": 3}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code in (200, 400), answer.text
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
