"""What a reload adds to the first token, for each tier, against what the tier itself takes for the same bytes.

Gemma 3 270M in bfloat16; medians of several runs in one warm process; questions to the store and checks of every byte
included.  Limit: 3 times the bytes at the tier's own bandwidth, measured in the same run with a plain loop (host: one
memcpy; disk: reads of the same files; Redis: one pipeline of GETs on a socket; Mooncake: its client), and 10 ms.
LMCache has no plain loop: there it is what its client takes, inside our mover.

    python benchmarks/reload.py [--runs 5] [--tiers host,disk,...] [--folder DIR] [--json FILE] [--check]

Tiers whose server or package is not installed are left out.  ``--check`` exits 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ostinato import LLM, SamplingParams
from ostinato.connectors.record import TRAILER_BYTES
from ostinato.connectors.redis_wire import command
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.serve.demo.prompts import greetings
from stores.lmcache_server import LMCacheServer
from stores.redis_server import BINARIES, RedisServer, redis_server

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
STEP_TOKENS = 512
REPEATS = 1000
SPARE_S, TIMES = 0.010, 3
FORGET_S = 3.2
"""After so many seconds no tier's answer is remembered: each run asks anew."""
Plain = Callable[[LLM, int], float]
"""Seconds that the tier takes for so many bytes, by itself."""


@dataclass(frozen=True)
class Result:
    tier: str
    bytes_loaded: int
    device_ttft_s: float
    tier_ttft_s: float
    bandwidth: float
    memcpy: float

    @property
    def added_s(self) -> float:
        return self.tier_ttft_s - self.device_ttft_s

    @property
    def limit_s(self) -> float:
        return TIMES * self.bytes_loaded / self.bandwidth + SPARE_S

    @property
    def line(self) -> str:
        copy = self.bytes_loaded / self.memcpy
        return (
            f"{self.tier:9s} {self.bytes_loaded / 2**20:.1f} MiB  first token {self.tier_ttft_s * 1e3:.1f} ms, "
            f"device {self.device_ttft_s * 1e3:.1f}; adds {self.added_s * 1e3:.1f} ms, limit {self.limit_s * 1e3:.1f} "
            f"({self.bandwidth / 1e9:.2f} GB/s by itself); {self.added_s / copy:.1f} times a memcpy"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    runtime = load_runtime("gemma3-270m", "bfloat16")
    results = []
    for name in arguments.tiers.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, TIERS[name](Path(folder)) as tier:
            if tier is None:
                print(f"{name:9s} not installed")
                continue
            results.append(measure(runtime, name, *tier, arguments.runs))
            print(("pass " if results[-1].added_s <= results[-1].limit_s else "MISS ") + results[-1].line, flush=True)
    if arguments.json:
        rows = [asdict(result) | {"added_s": result.added_s, "limit_s": result.limit_s} for result in results]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if arguments.check and any(result.added_s > result.limit_s for result in results) else 0


def measure(runtime: Runtime, name: str, spec: str, plain: Plain, runs: int) -> Result:
    scenario = greetings(REPEATS + 50, REPEATS)
    pages = runtime.layout.peak_pages(len(runtime.tokenizer(scenario.stored).input_ids) + 16, STEP_TOKENS) * 2
    device, below, bare, loaded = [], [], [], 0
    with LLM(runtime, kv=[spec], num_gpu_blocks_override=pages, max_num_batched_tokens=STEP_TOKENS) as llm:
        llm.generate(scenario.stored, GREEDY)
        for run in range(runs + 1):
            llm.reset_prefix_cache(device_only=True)
            time.sleep(FORGET_S)
            from_tier, from_device = (llm.generate(scenario.asked, GREEDY)[0] for _ in range(2))
            assert set(from_tier.cached_by_tier) == {name}, from_tier.cached_by_tier
            assert set(from_device.cached_by_tier) == {"device"}, from_device.cached_by_tier
            loaded = from_tier.bytes_loaded
            if run:  # the first one pays for connections and memory
                below.append(from_tier.metrics.ttft_s)
                device.append(from_device.metrics.ttft_s)
                bare.append(plain(llm, loaded))
        copy = statistics.median(memcpy(llm, loaded) for _ in range(9))
    hit, reload, alone = (statistics.median(times) for times in (device, below, bare))
    return Result(name, loaded, hit, reload, loaded / alone, loaded / copy)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memcpy(_llm: LLM, size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return timed(lambda: target.copy_(source))


@contextmanager
def host(_folder: Path) -> Iterator[tuple[str, Plain] | None]:
    yield "host:2GiB", memcpy


@contextmanager
def disk(folder: Path) -> Iterator[tuple[str, Plain] | None]:
    """Through the page cache, as the tier reads: what was just written is there in both."""
    path = folder / "kv"

    def plain(_llm: LLM, size: int) -> float:
        target = memoryview(bytearray(size))
        target[:] = bytes(size)

        def read() -> None:
            done = 0
            for slab in sorted(path.glob("slab-*")):
                with slab.open("rb", buffering=0) as file:
                    while done < size and (count := file.readinto(target[done : done + (4 << 20)])):
                        done += count

        return timed(read)

    yield f"disk:{path}:1GiB", plain


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, Plain] | None]:
    if not any(map(shutil.which, BINARIES)):
        yield None
        return
    with redis_server(folder) as server:
        yield server.url, lambda llm, size: get_all(server, llm, size)


def get_all(server: RedisServer, llm: LLM, size: int) -> float:
    """One pipeline of GETs, received into one buffer, looked at no further."""
    groups = llm.runtime.layout.groups
    questions, answer, payload = [], 0, 0
    for name in server.names():
        unit = groups[int(name.split(b"-")[1], 16)].unit_bytes
        if payload + unit > size:
            break
        payload += unit
        answer += len(b"$%d\r\n" % (unit + TRAILER_BYTES)) + unit + TRAILER_BYTES + 2
        questions.append(command(b"GET", name))
    buffer = memoryview(bytearray(answer))
    buffer[:] = bytes(answer)
    with socket.create_connection(("127.0.0.1", server.port), 10) as link:

        def ask() -> None:
            link.sendall(b"".join(questions))
            done = 0
            while done < answer:
                count = link.recv_into(buffer[done:])
                assert count, "the server hung up"
                done += count

        return timed(ask) * size / payload


@contextmanager
def mooncake(_folder: Path) -> Iterator[tuple[str, Plain] | None]:
    if importlib.util.find_spec("mooncake") is None:
        yield None
        return
    from stores.mooncake_server import master, private_network

    with private_network(), master() as program:
        yield f"mooncake://{program.address}?segment=512MiB", get_spans


def get_spans(llm: LLM, size: int) -> float:
    """The client's batches into its registered memory."""
    from ostinato.connectors.mooncake_client import Span

    client: Any = llm.built.connectors[0]._opened()  # type: ignore[attr-defined]
    staging, groups = client.take_staging(), llm.runtime.layout.groups
    batches: list[list[Span]] = [[]]
    payload = offset = 0
    for name in sorted(client.known.names()):
        unit = groups[int(name.split("-")[1], 16)].unit_bytes
        if payload + unit > size:
            break
        if offset + unit + TRAILER_BYTES > staging.size:
            batches.append([])
            offset = 0
        batches[-1].append(Span(name, staging.address + offset, unit + TRAILER_BYTES, name.split("-")[2]))
        payload, offset = payload + unit, offset + unit + TRAILER_BYTES
    took = timed(lambda: [client.get(batch) for batch in batches])
    client.give_staging(staging)
    return took * size / payload


@contextmanager
def lmcache(folder: Path) -> Iterator[tuple[str, Plain] | None]:
    if importlib.util.find_spec("lmcache") is None:
        yield None
        return
    server = LMCacheServer(folder)
    spent: list[float] = []

    def plain(_llm: LLM, _size: int) -> float:
        """Of the load that was just measured."""
        return spent[-1]

    from ostinato.connectors.lmcache_mover import LMCacheClient

    retrieve = LMCacheClient.retrieve

    def watched(self: Any, *arguments: Any) -> bool:
        start = time.perf_counter()
        done = retrieve(self, *arguments)
        spent.append(time.perf_counter() - start)
        return done

    LMCacheClient.retrieve = watched  # type: ignore[method-assign]
    try:
        yield server.url + "?buffer=256MiB", plain
    finally:
        LMCacheClient.retrieve = retrieve  # type: ignore[method-assign]
        server.kill()


TIERS: dict[str, Callable[[Path], Any]] = {
    "host": host,
    "disk": disk,
    "redis": redis,
    "mooncake": mooncake,
    "lmcache": lmcache,
}


if __name__ == "__main__":
    sys.exit(main())
