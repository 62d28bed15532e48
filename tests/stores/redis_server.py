"""A real Redis server for one test, on a free loopback port, without persistence."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ostinato.connectors.redis_wire import command

BINARIES = ("redis-server", "valkey-server")


class RedisServer:
    """``url``: a tier specification.  Commands go over a connection of their own each."""

    def __init__(self, folder: Path, *options: str) -> None:
        found = [path for name in BINARIES if (path := shutil.which(name)) is not None]
        if not found:
            pytest.skip("no redis-server or valkey-server in PATH (apt-get install redis-server)")
        self._binary, self._folder, self._options = found[0], folder, options
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"redis+unix://{self.socket}"

    def start(self) -> None:
        """Empty; also after :meth:`kill`, on the same port."""
        words = [self._binary, "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.socket)]
        words += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.01)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It takes connections (the kernel does), and says nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def ask(self, *words: str | bytes) -> bytes:
        """The raw answer to one command."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(command(*(word if isinstance(word, bytes) else word.encode() for word in words)))
            link.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while part := link.recv(1 << 20):
                answer += part
            return bytes(answer)

    def names(self) -> list[bytes]:
        """Keys of all records."""
        return [line for line in self.ask("KEYS", "*").split(b"\r\n") if b"ostinato1-" in line]

    def value(self, key: bytes) -> bytes:
        return self.ask("GET", key).partition(b"\r\n")[2][:-2]

    def calls(self, name: str) -> int:
        """How often a command was executed."""
        for line in self.ask("INFO", "commandstats").split(b"\r\n"):
            if line.startswith(b"cmdstat_" + name.lower().encode() + b":calls="):
                return int(line.partition(b"calls=")[2].partition(b",")[0])
        return 0


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
