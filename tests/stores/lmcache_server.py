"""A real LMCache server on free loopback ports, in memory only, with chunks of one hash unit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

UNIT = 16
START_S = 90


class LMCacheServer:
    """``url``: a tier specification.  What it holds is lost when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.port, self._http, self._metrics = (_free_port() for _ in range(3))
        self._log = folder / "lmcache.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"lmcache://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [
            str(Path(sys.executable).parent / "lmcache"),
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        words += ["--http-host", "127.0.0.1", "--http-port", str(self._http), "--prometheus-port", str(self._metrics)]
        words += ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        words += ["--chunk-size", str(UNIT), "--separate-object-groups", "--disable-metrics"]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | quiet)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with suppress(OSError):
                self.status()
                return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.1)
        raise AssertionError("the server does not start:\n" + self._log.read_text())

    def kill(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def clear(self) -> None:
        self._ask("/cache/clear", {"tier": "l1"})

    def status(self) -> Any:
        return self._ask("/status")

    def memory(self) -> Any:
        """What the server says of the objects in its memory."""
        return self.status()["storage_manager"]["l1_manager"]

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._http}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
