"""``/v1/completions``, ``/tokenize`` and ``/detokenize``.

Owns: the shape of these answers.  Does not own: the way through the engine (``exchange``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from ostinato.engine.live import Prompt
from ostinato.engine.outputs import CompletionOutput, RequestOutput
from ostinato.sampling_params import SamplingParams
from ostinato.serve.http.errors import bad_request
from ostinato.serve.http.exchange import Exchange, Service, answer, service_of, usage
from ostinato.serve.http.logprobs import LegacyLogprobs
from ostinato.serve.http.protocol import CompletionRequest, Conversation, DetokenizeRequest, TokenizeRequest
from ostinato.serve.http.structured import structured
from ostinato.structured_outputs import StructuredOutputs

router: Final = APIRouter()
_DEFAULT_TOKENS: Final = 16


@router.post("/v1/completions", response_model=None)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    model = service.name(body.model)
    body.check()
    prompts = await _prompts(service, body)
    sampling = _sampling(body, await structured(service, body))
    echoes = [await _echo(service, prompt) for prompt in prompts] if body.echo else [""] * len(prompts)
    calls = [(prompt, sampling) for prompt in prompts]
    exchange = await Exchange.begin(request, "text_completion", model, calls, body.priority or 0)
    if body.stream:
        return exchange.stream(_chunks(exchange, body, echoes), body.wants_usage)
    outputs = await exchange.outputs()
    first = [await service.prompts.text(one.prompt_token_ids[:1]) if _scored(body) else "" for one in outputs]
    choices = [
        _choice(index * len(output.outputs) + one.index, output, one, body, (echoes[index], first[index]))
        for index, output in enumerate(outputs)
        for one in output.outputs
    ]
    return answer({**exchange.head(), "choices": choices, "usage": _usage(body, outputs)})


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The ids of a text or of a chat."""
    service = service_of(request)
    service.name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        prompt = await service.prompts.of_text(body.prompt, body.add_special_tokens is not False)
    else:
        chat = Conversation.model_validate(body.model_dump(exclude_unset=True, exclude={"model", "prompt"}))
        prompt = await service.prompts.of_chat(chat)
    found: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": service.llm.longest,
        "tokens": prompt.token_ids,
    }
    if body.return_token_strs:
        found["token_strs"] = await service.prompts.spelled(prompt.token_ids)
    return answer(found)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Ids back to text."""
    service = service_of(request)
    service.name(body.model)
    ids = service.prompts.of_ids(body.tokens, "tokens").token_ids
    return answer({"prompt": await service.prompts.text(ids)})


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    special = body.add_special_tokens is not False
    given: Any = body.prompt
    items: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not items:
        raise bad_request("prompt: give at least one", "prompt")
    return [
        await service.prompts.of_text(item, special) if isinstance(item, str) else service.prompts.of_ids(item)
        for item in items
    ]


def _sampling(body: CompletionRequest, form: StructuredOutputs | None) -> SamplingParams:
    limit = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    # A prompt can be scored alone: a token is generated for it, and left out.
    limit = 1 if limit == 0 and body.echo else limit
    scored = body.logprobs if body.echo else None
    return body.sampling(limit, body.logprobs, prompt_logprobs=scored, structured_outputs=form)


def _scored(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.logprobs is not None


def _silent(body: CompletionRequest) -> bool:
    """Whether the prompt alone is wanted."""
    return body.max_tokens == 0


async def _echo(service: Service, prompt: Prompt) -> str:
    return await service.prompts.text(prompt.token_ids) if prompt.text is None else prompt.text


def _choice(
    index: int, output: RequestOutput, one: CompletionOutput, body: CompletionRequest, echo: tuple[str, str]
) -> dict[str, Any]:
    """``echo``: the prompt's text, and that of its first token."""
    logprobs = None
    if body.logprobs is not None and one.logprobs is not None:
        generated = () if _silent(body) else one.logprobs
        logprobs = LegacyLogprobs(body.logprobs).of((*(output.prompt_logprobs or ()), *generated), echo[1])
    return {
        "index": index,
        "text": echo[0] + ("" if _silent(body) else one.text),
        "logprobs": logprobs,
        "finish_reason": "length" if _silent(body) else one.finish_reason,
        "stop_reason": None if _silent(body) else one.stop_reason,
    }


def _usage(body: CompletionRequest, outputs: list[RequestOutput]) -> dict[str, Any]:
    found = usage(outputs)
    if _silent(body):
        found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
    return found


async def _chunks(exchange: Exchange, body: CompletionRequest, echoes: list[str]) -> AsyncIterator[dict[str, Any]]:
    n = body.n or 1
    scores = [LegacyLogprobs(body.logprobs or 0) for _ in range(n * len(echoes))]

    def chunk(index: int, text: str, logprobs: Any = None, finish: Any = None, reason: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": reason}
        return {"choices": [choice]}

    for index in range(len(scores)):
        if body.echo:
            yield chunk(index, echoes[index // n])
    async for call, delta in exchange.batch:
        index = call * n + delta.index
        logprobs = scores[index].of(delta.logprobs) if delta.logprobs is not None else None
        text = "" if _silent(body) else delta.text
        if text or logprobs or delta.finish_reason:
            yield chunk(index, text, logprobs, delta.finish_reason, delta.stop_reason)
