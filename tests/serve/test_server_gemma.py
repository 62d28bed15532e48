"""The HTTP server with Gemma 3 270M, as anyone would use it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.conftest import REAL_MODEL, need_real_model
from ostinato.engine.llm import LLM
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.sampling_params import SamplingParams
from serve.served import Running, serving

pytestmark = pytest.mark.slow

RULES = "You are the clerk of a small library by the sea. You answer in one short sentence, and you never guess. " * 4


@pytest.fixture(scope="module")
def gemma() -> Runtime:
    need_real_model()
    return load_runtime(REAL_MODEL, "bfloat16")


@pytest.fixture(scope="module")
def library(gemma: Runtime) -> Iterator[Running]:
    engine = {"num_gpu_blocks_override": 2000, "max_model_len": 2048, "check_invariants": False}
    with serving(gemma, engine, names=(REAL_MODEL,), template="gemma") as one:
        yield one


@pytest.fixture(scope="module")
def alone(gemma: Runtime) -> LLM:
    return LLM(gemma, num_gpu_blocks_override=800, enable_prefix_caching=False)


def test_a_completion(library: Running, alone: LLM) -> None:
    prompt = "The capital of France is"
    answer = library.client().completions.create(model=REAL_MODEL, prompt=prompt, max_tokens=8, temperature=0)
    wanted = alone.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert answer.choices[0].text == wanted.outputs[0].text


def test_chats_at_once_share_their_rules_and_are_what_each_is_alone(library: Running, alone: LLM) -> None:
    questions = ["When do you open?", "Have you a book on tides?", "¿Habla español?", "Wo finde ich Goethe?"]

    async def ask(client: Any, question: str) -> tuple[str, int]:
        stream = await client.chat.completions.create(
            model=REAL_MODEL,
            messages=[{"role": "system", "content": RULES}, {"role": "user", "content": question}],
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, cached = "", 0
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            cached = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage else 0
        return text, cached

    async def everyone() -> list[tuple[str, int]]:
        async with library.async_client() as client:
            first = await ask(client, questions[0])
            return [first, *await asyncio.gather(*(ask(client, question) for question in questions[1:]))]

    heard = asyncio.run(everyone())
    for question, (text, cached) in zip(questions, heard, strict=True):
        template = "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
        ids = alone.runtime.tokenizer(template.format(f"{RULES}\n\n{question}"), add_special_tokens=False).input_ids
        wanted = alone.generate(ids, SamplingParams(temperature=0.0, max_tokens=16))[0]
        assert text == wanted.outputs[0].text, question
        assert (cached > 0) == (question != questions[0]), "the rules are computed once"
