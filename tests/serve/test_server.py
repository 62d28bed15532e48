"""The HTTP server through OpenAI's own client: answers, streams, log-probabilities, usage."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from ostinato.engine.llm import LLM
from ostinato.runtime.load import Runtime
from ostinato.sampling_params import SamplingParams
from serve.served import MODEL, Running, serving

GO_ON = {"ignore_eos": True}
PROMPT = "Once upon a time there was a river that ran up the hill, and nobody asked it why. "


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


@pytest.fixture(scope="module")
def offline(runtime: Runtime) -> LLM:
    return LLM(runtime, num_gpu_blocks_override=600, enable_prefix_caching=False)


def said(offline: LLM, prompt: Any, **options: Any) -> list[str]:
    output = offline.generate(prompt, SamplingParams(ignore_eos=True, **options))[0]
    return [one.text for one in output.outputs]


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    extra = GO_ON | options.pop("extra", {})
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"max_tokens": 12, "temperature": 0.0, **options}, extra_body=extra
    )


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    extra = GO_ON | options.pop("extra", {})
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 12, "temperature": 0.0, **options}, extra_body=extra
    )


# Completions


def test_a_completion_is_what_the_engine_says(client: openai.OpenAI, offline: LLM) -> None:
    answer = complete(client, PROMPT)
    assert [choice.text for choice in answer.choices] == said(offline, PROMPT, temperature=0.0, max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_without_max_tokens_a_completion_has_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="ab", extra_body=GO_ON)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_prompts_are_text_ids_or_lists_of_either(client: openai.OpenAI, offline: LLM) -> None:
    ids = [[70, 71, 72], [80, 81, 82, 83]]
    wanted = [said(offline, one, temperature=0.0, max_tokens=6)[0] for one in ids]
    assert [c.text for c in complete(client, ids, max_tokens=6).choices] == wanted
    assert complete(client, ids[0], max_tokens=6).choices[0].text == wanted[0]
    both = complete(client, ["ab", "cd"], max_tokens=6)
    assert [c.index for c in both.choices] == [0, 1]
    assert [c.text for c in both.choices] == [complete(client, t, max_tokens=6).choices[0].text for t in ("ab", "cd")]


def test_n_completions_of_each_prompt_have_seeds_of_their_own(client: openai.OpenAI, offline: LLM) -> None:
    answer = complete(client, ["ab", "cd"], n=3, seed=5, temperature=1.0)
    assert [choice.index for choice in answer.choices] == list(range(6))
    wanted = [text for prompt in ("ab", "cd") for text in said(offline, prompt, n=3, seed=5, max_tokens=12)]
    assert [choice.text for choice in answer.choices] == wanted
    assert len(set(wanted)) == 6


def test_a_stream_adds_up_to_the_completion(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPT, n=2, seed=3, temperature=1.0)
    parts = ["", ""]
    ends: list[Any] = [None, None]
    for chunk in complete(client, PROMPT, n=2, seed=3, temperature=1.0, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
            ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert parts == [choice.text for choice in whole.choices]
    assert ends == ["length", "length"]


def test_stop_strings_and_stop_tokens(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPT).choices[0].text
    stop = whole[4:7]
    answer = complete(client, PROMPT, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    kept = complete(client, PROMPT, stop=stop, extra={"include_stop_str_in_output": True})
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_sampling_beyond_openai(client: openai.OpenAI) -> None:
    only = complete(client, "ab", extra={"allowed_token_ids": [70]}, max_tokens=3)
    biased = complete(client, "ab", logit_bias={"70": 100}, max_tokens=3)
    assert only.choices[0].text == biased.choices[0].text
    greedy = complete(client, PROMPT).choices[0].text
    assert complete(client, PROMPT, temperature=1.0, extra={"top_k": 1}).choices[0].text == greedy
    assert complete(client, PROMPT, temperature=1.0, extra={"min_p": 1.0}).choices[0].text == greedy
    assert complete(client, PROMPT, extra={"repetition_penalty": 50.0}, max_tokens=40).choices[0].text != greedy


def test_legacy_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, PROMPT, logprobs=2, max_tokens=4).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(4)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPT, logprobs=1, max_tokens=5).choices[0].logprobs
    tokens, offsets = [], []
    for chunk in complete(client, PROMPT, logprobs=1, max_tokens=5, stream=True):
        tokens += chunk.choices[0].logprobs.tokens
        offsets += chunk.choices[0].logprobs.text_offset
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_a_prompt_is_scored_by_echo(client: openai.OpenAI) -> None:
    choice = complete(client, "abcd", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    more = complete(client, "abcd", echo=True, logprobs=1, max_tokens=3)
    assert more.choices[0].logprobs.token_logprobs[:4] == choice.logprobs.token_logprobs
    assert more.choices[0].text == "abcd" + complete(client, "abcd", max_tokens=3).choices[0].text
    assert len(more.choices[0].logprobs.tokens) == 7
    streamed = "".join(
        chunk.choices[0].text for chunk in complete(client, "abcd", echo=True, max_tokens=3, stream=True)
    )
    assert streamed == more.choices[0].text


# Chat


def test_a_chat_is_its_template_completed(client: openai.OpenAI, offline: LLM) -> None:
    answer = chat(client, "Who are you?")
    text = "<bos>Be brief.\n\nUser: Who are you?\nAssistant:"
    assert [choice.message.content for choice in answer.choices] == said(offline, text, temperature=0.0, max_tokens=12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_begins_with_the_role_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(chat(client, "Hi", n=2, seed=1, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    parts = ["", ""]
    for chunk in chunks[:-1]:
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == [choice.message.content for choice in chat(client, "Hi", n=2, seed=1).choices]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, "Hi", logprobs=True, top_logprobs=3, max_tokens=4).choices[0]
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    for one in choice.logprobs.content:
        assert bytes(one.bytes).decode() == one.token
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token  # greedy
    streamed = [
        one
        for chunk in chat(client, "Hi", logprobs=True, top_logprobs=3, max_tokens=4, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert streamed == choice.logprobs.content


def test_content_may_come_in_parts_and_the_limit_by_its_new_name(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=12, extra_body=GO_ON
    )
    assert answer.choices[0].message.content == chat(client, "Who are you?").choices[0].message.content


def test_without_max_tokens_a_chat_may_fill_the_context(runtime: Runtime) -> None:
    with serving(runtime, {"max_model_len": 64}, template="plain") as one:
        answer = one.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body=GO_ON
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens == 64
        assert answer.choices[0].finish_reason == "length"


# Usage, and the small routes


def test_usage_shows_what_was_cached(client: openai.OpenAI) -> None:
    prompt = "A prompt that nobody else has sent to this server. " * 3
    cold, warm = complete(client, prompt).usage, complete(client, prompt).usage
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert warm.prompt_tokens == cold.prompt_tokens == len(prompt)
    cached = warm.prompt_tokens_details.cached_tokens
    assert 0 < cached < warm.prompt_tokens
    assert warm.prompt_tokens_details.cached_by_tier == {"device": cached}


def test_models_and_their_names(runtime: Runtime) -> None:
    with serving(runtime, names=("one", "another/name")) as one:
        client = one.client()
        assert [model.id for model in client.models.list()] == ["one", "another/name"]
        assert client.models.retrieve("another/name").id == "another/name"
        answer = client.completions.create(model="another/name", prompt="ab", max_tokens=1)
        assert answer.model == "another/name"
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model=MODEL, prompt="ab")
        assert error.value.code == "model_not_found"
        assert error.value.param == "model"


def test_tokens_and_back(running: Running) -> None:
    with httpx.Client(base_url=running.url, timeout=60) as http:
        found = http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
        assert found["count"] == 3
        assert found["token_strs"] == ["a", "b", "c"]
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "abc"}
        turn = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert http.post("/detokenize", json={"tokens": turn["tokens"]}).json()["prompt"] == "<bos>User: Hi\nAssistant:"


def test_health_version_and_metrics(running: Running, client: openai.OpenAI) -> None:
    complete(client, PROMPT)
    complete(client, PROMPT)
    with httpx.Client(base_url=running.url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json()["version"]
        page = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values['ostinato_requests_total{outcome="finished"}']) >= 2
    assert float(values['ostinato_cached_tokens_total{tier="device"}']) > 0
    assert float(values["ostinato_time_to_first_token_seconds_count"]) >= 2
    assert float(values["ostinato_inter_token_seconds_count"]) >= 22
    assert float(values["ostinato_requests_running"]) == 0
    assert float(values['ostinato_pool_blocks{state="idle",tier="device"}']) > 0
    assert float(values['ostinato_transfer_failures{kind="failed"}']) == 0


# Many at once


def test_sixteen_clients_at_once_hear_what_each_would_alone(running: Running, offline: LLM) -> None:
    prompts = [PROMPT * (1 + i % 3) + f"And so said client {i}" for i in range(16)]

    async def hear(client: openai.AsyncOpenAI, i: int) -> str:
        stream: Any = await client.completions.create(
            model=MODEL, prompt=prompts[i], max_tokens=20 + i, seed=i, temperature=i % 2, stream=True, extra_body=GO_ON
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with running.async_client() as client:
            return await asyncio.gather(*(hear(client, i) for i in range(16)))

    heard = asyncio.run(all_of_them())
    for i, text in enumerate(heard):
        assert [text] == said(offline, prompts[i], max_tokens=20 + i, seed=i, temperature=i % 2), i
