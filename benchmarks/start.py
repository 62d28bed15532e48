"""How long from the command line to the first token over HTTP, cold process, warm disk cache.

    python benchmarks/start.py [MODEL] [--runs 3]

Each run starts ``ostinato serve`` as a process of its own, waits for the line that says where it listens, asks for one
streamed completion, and stops it.  The first run is shown and not counted: it may convert the model, try it, and
compile kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
READY = "listening on "


def measure(model: str, more: Sequence[str]) -> tuple[float, float]:
    """Seconds from the start of the process to the server's address, and to the first token."""
    command = [
        sys.executable,
        "-c",
        "from ostinato.serve.cli import main; main()",
        "serve",
        model,
        "--port",
        "0",
        *more,
    ]
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        try:
            address = next((line for line in process.stderr if line.startswith(READY)), "").removeprefix(READY).strip()
            if not address:
                raise SystemExit("the server did not start")
            listening = time.perf_counter() - began
            _first_token(address, model)
            return listening, time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


def _first_token(address: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 4, "stream": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        if not answer.readline().startswith(b"data: {"):
            raise SystemExit("the server did not stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--runs", type=int, default=3)
    options, more = parser.parse_known_args()
    print(f"{options.model}; seconds from the command to the address, and to the first token")
    print("first    {:6.2f} {:6.2f}".format(*measure(options.model, more)))
    runs = [measure(options.model, more) for _ in range(options.runs)]
    for listening, token in runs:
        print(f"run      {listening:6.2f} {token:6.2f}")
    print("median   {:6.2f} {:6.2f}".format(*(statistics.median(one) for one in zip(*runs, strict=True))))


if __name__ == "__main__":
    main()
