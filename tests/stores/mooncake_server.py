"""A real Mooncake master, and a ``mooncake_client`` that owns storage, in a network of their own.

Mooncake's clients listen on all interfaces, so the tests' thread moves to a network namespace that has a loopback
interface only; threads and processes that it starts are in there too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NEW_NETWORK = 0x40000000
LEASE_MS = 300


@contextmanager
def private_network() -> Iterator[None]:
    """A namespace with nothing but loopback, for this thread and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(NEW_NETWORK):
            pytest.skip(f"no network namespace to be had ({os.strerror(ctypes.get_errno())}); Mooncake needs one here")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            yield
        finally:
            assert libc.setns(before, NEW_NETWORK) == 0
    finally:
        os.close(before)


class Program:
    """One of the package's programs, on a loopback port."""

    def __init__(self, name: str, port: int, words: list[str]) -> None:
        beside = Path(sys.executable).with_name(name)
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is None:
            pytest.skip(f"no {name} (pip install ostinato[mooncake])")
        self._command = [found, *words]
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Empty; also after :meth:`kill`, on the same port."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert self._process.poll() is None, f"{self._command[0]} ended: is libibverbs1 installed?"
            time.sleep(0.02)
        raise AssertionError(f"{self._command[0]} does not start")

    def kill(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


@contextmanager
def master(port: int = 50051) -> Iterator[Program]:
    """Ports are free: the network has nobody else."""
    words = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--rpc_thread_num=2", "--metrics_host=127.0.0.1"]
    words += [f"--metrics_port={port + 1000}", f"--default_kv_lease_ttl={LEASE_MS}", "--client_ttl=4"]
    program = Program("mooncake_master", port, words)
    try:
        yield program
    finally:
        program.kill()


@contextmanager
def storage_owner(of: Program, size: str = "64 MB", port: int = 50252) -> Iterator[Program]:
    """Keeps records while engines come and go; engines on this host reach it through shared memory."""
    words = ["--host=127.0.0.1", f"--port={port}", f"--master_server_address={of.address}"]
    words += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--global_segment_size={size}", "--threads=2"]
    program = Program("mooncake_client", port, words)
    try:
        yield program
    finally:
        program.kill()
