"""``/v1/chat/completions``.

Owns: the shape of its answers.  Does not own: chat templates (``prompts``), the way through the engine (``exchange``).
Tools are shown to the model by its template; what it answers comes as text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.serve.http.exchange import Exchange, answer, service_of, usage
from ostinato.serve.http.logprobs import chat_logprobs
from ostinato.serve.http.protocol import ChatRequest
from ostinato.serve.http.structured import structured

router: Final = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer the last message."""
    service = service_of(request)
    model = service.name(body.model)
    body.check()
    prompt = await service.prompts.of_chat(body, use_tools=body.tool_choice != "none")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = await structured(service, body)
    sampling = body.sampling(service.room(prompt) if limit is None else limit, logprobs, structured_outputs=form)
    exchange = await Exchange.begin(request, "chat.completion", model, [(prompt, sampling)], body.priority or 0)
    if body.stream:
        return exchange.stream(_chunks(exchange, body), body.wants_usage)
    outputs = await exchange.outputs()
    choices = [_choice(one, body) for one in outputs[0].outputs]
    return answer({**exchange.head(), "choices": choices, "usage": usage(outputs)})


def _choice(one: CompletionOutput, body: ChatRequest) -> dict[str, Any]:
    scores = chat_logprobs(one.logprobs, body.top_logprobs or 0) if one.logprobs is not None else None
    return {
        "index": one.index,
        "message": {"role": "assistant", "content": one.text, "refusal": None},
        "logprobs": scores,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }


async def _chunks(exchange: Exchange, body: ChatRequest) -> AsyncIterator[dict[str, Any]]:
    def chunk(index: int, delta: dict[str, str], scores: Any = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None, **more}
        return {"choices": [choice]}

    for index in range(body.n or 1):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for _, part in exchange.batch:
        scores = chat_logprobs(part.logprobs, body.top_logprobs or 0) if part.logprobs is not None else None
        if part.text or scores:
            yield chunk(part.index, {"content": part.text}, scores)
        if part.finish_reason:
            yield chunk(part.index, {}, finish_reason=part.finish_reason, stop_reason=part.stop_reason)
