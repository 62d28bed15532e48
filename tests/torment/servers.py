"""Servers in this process: Redis as bytes on a socket, Mooncake's library, an LMCache server.

Owns: what they hold; that what they are given is what was computed; losing and spoiling it.  They outlive an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.fake_mooncake import FakeStore
from connectors.memory_lmcache import MemoryLMCache
from ostinato.cache.keys import BlockKey
from ostinato.connectors.mooncake_client import TROUBLE
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.redis_wire import Buffer
from ostinato.ids import GroupId
from torment.content import Truth
from torment.mood import Mood

SOME_TROUBLE = min(TROUBLE)


def key_of(name: str) -> BlockKey:
    _, group, digest = name.split("-")
    return BlockKey(GroupId(int(group, 16)), bytes.fromhex(digest))


class Shelf(dict[Any, Any]):
    """Records by name or key.  ``take(value)``: the payload of a value."""

    def __init__(self, truth: Truth, what: str, payload: Callable[[Any], bytes]) -> None:
        super().__init__()
        self._truth = truth
        self._what = what
        self._payload = payload

    def put(self, name: str | BlockKey, value: Any) -> None:
        key = name if isinstance(name, BlockKey) else key_of(name)
        self._truth.check(key, self._payload(value), f"a record for {self._what}")
        self[name] = value

    def setdefault(self, name: Any, value: Any = None) -> Any:
        if name not in self:
            self.put(name, value)
        return self[name]

    def lose(self, mood: Mood) -> None:
        """Half of it, or all."""
        everything = mood.kernel.rng.random() < 0.3
        for name in list(self):
            if everything or mood.kernel.rng.random() < 0.5:
                del self[name]


def spoilt(value: bytes, mood: Mood) -> bytes:
    """With one wrong bit, or cut short."""
    rng = mood.kernel.rng
    place = rng.randrange(len(value))
    if rng.random() < 0.2:
        return value[:place]
    return value[:place] + bytes((value[place] ^ 1 << rng.randrange(8),)) + value[place + 1 :]


def _without_trailer(value: bytes) -> bytes:
    return value[:-TRAILER_BYTES]


class RedisServer:
    """As many connections as one likes."""

    def __init__(self, truth: Truth, mood: Mood) -> None:
        self.content = Shelf(truth, "redis", _without_trailer)
        self.mood = mood

    def connect(self, _address: Any, _timeout: float) -> Connection:
        self.mood.enter()
        return Connection(self)

    def answer(self, words: Sequence[bytes]) -> bytes:
        match words:
            case [b"EXISTS", name]:
                return b":%d\r\n" % (name.decode() in self.content)
            case [b"GET", name]:
                value = self.content.get(name.decode())
                if value is None:
                    return b"$-1\r\n"
                value = spoilt(value, self.mood) if self.mood.spoils() else value
                return b"$%d\r\n%s\r\n" % (len(value), value)
            case [b"SET", name, value, *_]:
                if self.mood.broken and self.mood.kernel.rng.random() < 0.3:
                    return b"-OOM command not allowed\r\n"
                self.content.put(name.decode(), bytes(value))
                return b"+OK\r\n"
        raise AssertionError(words)


class Connection:
    """A socket: what is sent is answered, in pieces of any size; it may end in the middle."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._timeout = 0.0
        self._received = bytearray()
        self._answers = bytearray()

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        mood, sent = self._server.mood, 0
        mood.enter()
        for piece in pieces:
            self._received += piece
            sent += len(piece)
            if mood.kernel.rng.random() < 0.02:
                break
        while (command := self._command()) is not None:
            self._answers += self._server.answer(command)
        return sent

    def recv_into(self, place: memoryview) -> int:
        mood = self._server.mood
        before = mood.kernel.now
        mood.enter()
        if mood.kernel.now - before > self._timeout:
            raise TimeoutError("no answer")
        count = min(len(place), len(self._answers))
        if count > 1 and mood.kernel.rng.random() < 0.1:
            count = mood.kernel.rng.randrange(1, count)
        place[:count] = self._answers[:count]
        del self._answers[:count]
        return count

    def close(self) -> None:
        self._answers.clear()

    def _command(self) -> list[bytes] | None:
        """The next whole command of what was received."""
        data, begin, words = self._received, 0, []

        def line() -> int | None:
            nonlocal begin
            end = data.find(b"\r\n", begin)
            if end < 0:
                return None
            number = int(data[begin + 1 : end])
            begin = end + 2
            return number

        count = line()
        for _ in range(count or 0):
            size = line()
            if size is None or len(data) < begin + size + 2:
                return None
            words.append(bytes(data[begin : begin + size]))
            begin += size + 2
        del data[:begin]
        return words or None


class MooncakeStore(FakeStore):
    """The library and the store behind it."""

    def __init__(self, truth: Truth, mood: Mood) -> None:
        super().__init__()
        self.objects = Shelf(truth, "mooncake", _without_trailer)
        self.mood = mood

    def setup(self, *arguments: Any) -> int:
        self.registered.clear()
        return SOME_TROUBLE if self._fails() else 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [SOME_TROUBLE] * len(keys) if self._fails() else super().batch_is_exist(keys)

    def batch_put_from(self, keys: Sequence[str], *arguments: Any) -> list[int]:
        return [SOME_TROUBLE] * len(keys) if self._fails() else super().batch_put_from(keys, *arguments)

    def batch_get_into(self, keys: Sequence[str], *arguments: Any) -> list[int]:
        if self._fails():
            return [SOME_TROUBLE] * len(keys)
        for key in keys:
            if key in self.objects and self.mood.spoils():
                self.objects[key] = spoilt(self.objects[key], self.mood)
        return super().batch_get_into(keys, *arguments)

    def remove(self, key: str, force: bool) -> int:
        return SOME_TROUBLE if self._fails() else super().remove(key, force)

    def _fails(self) -> bool:
        try:
            self.mood.enter()
        except ConnectionError:
            return True
        return False

    def _answer(self, method: str, keys: Sequence[str]) -> list[int]:
        return []

    def _rehearse(self, options: Any) -> None:
        self.mood.enter()


class LMCacheServer(MemoryLMCache):
    """In place of the module that speaks to a real one."""

    def __init__(self, truth: Truth, mood: Mood) -> None:
        super().__init__()
        self.content = Shelf(truth, "lmcache", lambda value: value[0])
        self.mood = mood

    def check(self) -> None:
        self.asked.clear()
        self.stored.clear()
        self.mood.enter()
        if self.content and self.mood.spoils():
            key = self.mood.kernel.rng.choice(list(self.content))
            payload, trailer = self.content[key]
            whole = spoilt(payload + trailer, self.mood).ljust(len(payload) + len(trailer), b"\0")
            self.content[key] = whole[: len(payload)], whole[len(payload) :]


def modules(server: LMCacheServer) -> Mapping[str, Any]:
    return {"ostinato.connectors.lmcache_mover": server.module()}
