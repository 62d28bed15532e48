"""The HTTP server where it says no: wrong requests, keys, addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.load import Runtime
from ostinato.serve.http.auth import ApiKeys, check_address, is_loopback, tenant_salt
from ostinato.serve.http.prompts import read_template
from serve.served import MODEL, Running, serving

KEYS = ("key-of-one", "key-of-two")


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


# What is refused


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [[1], [10**9]]}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 7}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"n": 0}, "n", "invalid_type"),
        ({"n": 129}, "n", "invalid_type"),
        ({"logprobs": 21}, "logprobs", "invalid_type"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"best_of": 3}, "best_of", None),
        ({"suffix": "end"}, "suffix", "unsupported"),
        ({"cache_salt": "mine"}, "cache_salt", "unsupported"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "unsupported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"prompt": "a" * 5000}, "prompt", "context_length_exceeded"),
    ],
    ids=str,
)
def test_a_wrong_completion_is_told_what_is_wrong(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "ab", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_a_wrong_chat_is_told_what_is_wrong(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_fields_and_nulls_are_no_matter(http: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "user": "me", "store": False, "metadata": {}, "new": [1], "stop": None}
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"temperature": 1e300},
        {"temperature": 1e-4, "top_p": 1e-300},
        {"temperature": 2, "min_p": 1, "top_k": 2**62},
        {"seed": -(2**63), "n": 2, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {str(token): -100 for token in range(512)}},
        {"allowed_token_ids": [5], "logit_bias": {"5": -100}, "bad_words": ["aa"]},
        {"max_tokens": 10**30, "stop": list("abcdefghijklmnopqrstuvwxyz "), "priority": -(10**30)},
        {"bad_words": ["\ud800"]},
        {"prompt": "\ud800"},
        {"prompt": "\x00\uffff\U0001f600"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        {"messages": [{"role": "\ud800", "content": None}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": [7]}], "tools": [{}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    ],
    ids=lambda fields: ascii(fields)[:60],
)
def test_odd_values_are_served_or_refused_and_hurt_nobody(http: httpx.Client, fields: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"prompt": "ab", "max_tokens": 4, "seed": 1, **fields}
    answer = http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text
    assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_what_is_no_json_and_what_is_not_there(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for content in ("{", "[]", "", "null", "[" * 20_000):
        answer = http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert http.get("/v1/completions").status_code == 405


def test_without_a_template_there_is_no_chat(runtime: Runtime) -> None:
    with serving(runtime) as one, pytest.raises(openai.BadRequestError, match="--chat-template") as error:
        one.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert error.value.code == "no_chat_template"


def test_templates_are_shipped_or_files(tmp_path: Path) -> None:
    assert "<start_of_turn>" in read_template("gemma")
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == "{{ messages }}"
    with pytest.raises(ConfigError, match="gemma, plain"):
        read_template("nonsense")


def test_a_large_body_is_refused_stated_or_not(runtime: Runtime) -> None:
    with serving(runtime, max_body=2000) as one, httpx.Client(base_url=one.url, timeout=60) as http:
        body = json.dumps({"prompt": "a" * 3000}).encode()
        headers = {"content-type": "application/json"}
        stated = http.post("/v1/completions", content=body, headers=headers)
        in_parts = http.post("/v1/completions", content=iter([body[:1500], body[1500:]]), headers=headers)
        assert (stated.status_code, in_parts.status_code) == (413, 413)
        assert "2,000 bytes" in in_parts.json()["error"]["message"]


# Keys


def test_keys_open_the_door_and_divide_the_cache(runtime: Runtime) -> None:
    with serving(runtime, keys=KEYS, template="plain") as one:

        def cached(key: str) -> int:
            prompt = "The same words for everyone, long enough for several blocks of the cache. "
            usage = one.client(key).completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
            count: int = usage.prompt_tokens_details.cached_tokens  # type: ignore[attr-defined]
            return count

        assert cached(KEYS[0]) == 0
        assert cached(KEYS[0]) > 0
        assert cached(KEYS[1]) == 0, "one tenant could see what another has cached"
        for key in ("key-of-on", "key-of-one2", "schlüssel"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                one.client(key).models.list()
        with httpx.Client(base_url=one.url) as http:
            for path in ("/v1/models", "/metrics", "/version", "/docs"):
                answer = http.get(path)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers={"authorization": f"Basic {KEYS[0]}"}).status_code == 401
            assert http.get("/health").status_code == 200


def test_salts_do_not_tell_the_key() -> None:
    assert len({tenant_salt(key) for key in KEYS}) == 2
    assert all(key not in tenant_salt(key) for key in KEYS)
    with pytest.raises(ConfigError, match="empty"):
        ApiKeys(["good", " "])


def test_other_machines_need_a_key() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="OSTINATO_API_KEY"):
            check_address(host, ApiKeys([]), False)
        check_address(host, ApiKeys(["k"]), False)
        check_address(host, ApiKeys([]), True)
