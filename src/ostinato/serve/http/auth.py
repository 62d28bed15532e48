"""Who may come in: API keys, tenants, how large a body may be, where the server may listen.

Owns: these checks, before anything of the body is parsed.  Thread: the event loop's.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.errors import ConfigError
from ostinato.serve.http.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health"})
"""Need no key: whoever supervises the server asks."""
_SALT_PREFIX: Final = b"ostinato tenant\0"


class ApiKeys:
    """The keys that are let in; without any, everyone is."""

    def __init__(self, keys: Sequence[str]) -> None:
        if any(not key or key != key.strip() for key in keys):
            raise ConfigError("an API key is empty, or has blanks around it")
        self._salts = [(key.encode(), tenant_salt(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._salts)

    def salt(self, authorization: str | None) -> str | None:
        """The tenant's cache salt; None when the key is none of ours.  Takes equally long for any wrong key."""
        if not self._salts:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        found: str | None = None
        for key, salt in self._salts:
            if hmac.compare_digest(key, given.strip().encode("utf-8", "replace")) and scheme.lower() == "bearer":
                found = salt
        return found


def tenant_salt(key: str) -> str:
    """What divides the cache between keys.  One key's cached prefixes say nothing to another, not even by timing."""
    return hashlib.sha256(_SALT_PREFIX + key.encode()).hexdigest()


class Door:
    """ASGI: lets a request in, with ``scope["state"]["salt"]``, or answers it."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        salt = self._keys.salt(headers.get("authorization"))
        state = scope.setdefault("state", {})
        refused: ApiError | None = None
        length = headers.get("content-length", "0")
        if salt is None and scope["path"] not in OPEN_PATHS:
            hint = "give one of this server's API keys as 'Authorization: Bearer KEY'"
            refused = ApiError(401, hint, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        elif not length.isdigit() or int(length) > self._max_body:
            refused = self._too_large()
        if refused is not None:
            state["code"] = refused.code
            await refused.response()(scope, receive, send)
            return
        state["salt"] = salt or ""
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        """``receive``, which raises when a body without a stated length grows too large."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have {self._max_body:,} bytes at most", None, "body_too_large")


def check_address(host: str, keys: ApiKeys, allow_public: bool) -> None:
    """Raise ConfigError when others than this machine could come in without a key."""
    if keys or allow_public or is_loopback(host):
        return
    raise ConfigError(
        f"--host {host} lets other machines in, and there is no API key: set OSTINATO_API_KEY (or --api-key), listen "
        "on 127.0.0.1, or say --allow-public"
    )


def is_loopback(host: str) -> bool:
    """Whether every address that ``host`` stands for is this machine's own."""
    if not host:
        return False
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"--host {host}: {error}") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
