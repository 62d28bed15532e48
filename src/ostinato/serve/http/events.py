"""``GET /v1/cache/events``: what a router must know to follow this server's KV events.

Owns: the description.  Does not own: the events, which go over ZeroMQ (``events.publisher``).
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ostinato.engine.build import namespace_seed
from ostinato.events.index import describe_groups
from ostinato.serve.http.errors import ApiError
from ostinato.serve.http.exchange import service_of

router: Final = APIRouter()


@router.get("/v1/cache/events", response_model=None)
async def events(request: Request) -> Response:
    """Where events are published, the groups, and the seed of the caller's key chain (``cache.keys``), in hex."""
    llm = service_of(request).llm.llm
    publisher = llm.built.events
    if publisher is None:
        raise ApiError(404, "KV events are off: start the server with --kv-events-config", None, "events_off")
    return JSONResponse(
        {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
            "groups": describe_groups(llm.runtime.layout),
            "space": namespace_seed(llm.runtime, request.scope["state"]["salt"]).hex(),
        }
    )
