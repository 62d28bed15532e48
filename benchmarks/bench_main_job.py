"""The main job, timed: cold prefill against transformers, and what a device hit and a host reload cost.

All numbers are medians of several runs in one warm process; peers and physical limits are measured in the same run:

* cold prefill, tokens/s, against transformers' own forward pass in chunks of the same size (SDPA, DynamicCache);
* time to first token of a device hit and of a host reload, as fractions of cold;
* what the reload adds, against the time that a plain memcpy of the same bytes takes.

``python benchmarks/bench_main_job.py [--runs 5] [--json FILE]`` exits 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from ostinato import LLM, SamplingParams
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.runtime.models import load_model, resolve
from ostinato.serve.demo.prompts import greetings

STEP_TOKENS = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runtime = load_runtime("gemma3-270m", arguments.dtype)
    scenario = greetings(2000, 1000)
    tokens = runtime.tokenizer(scenario.asked).input_ids
    cold, peer = time_cold(runtime, tokens, arguments.runs, arguments.dtype)
    device, host, loaded = time_hits(runtime, scenario.stored, scenario.asked, arguments.runs)
    bandwidth = measure_memcpy(loaded)
    limit = 3 * loaded / bandwidth + 0.010
    result = {
        "prompt_tokens": len(tokens),
        "threads": torch.get_num_threads(),
        "cold_ttft_s": cold,
        "device_ttft_s": device,
        "host_ttft_s": host,
        "bytes_loaded": loaded,
        "memcpy_bytes_per_s": bandwidth,
        "cold_vs_transformers": peer / cold,
        "device_fraction_of_cold": device / cold,
        "host_fraction_of_cold": host / cold,
        "reload_s": host - device,
        "reload_limit_s": limit,
    }
    checks = {
        "cold prefill >= 0.8x transformers": peer / cold >= 0.8,
        "device hit <= 1/60 of cold": device <= cold / 60,
        "host reload <= 1/50 of cold": host <= cold / 50,
        "host - device <= 3x memcpy + 10 ms": host - device <= limit,
    }
    report(result, checks, len(tokens) / cold, len(tokens) / peer)
    if arguments.json:
        arguments.json.write_text(json.dumps(result | {"checks": checks}, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


def time_cold(runtime: Runtime, tokens: list[int], runs: int, dtype: str) -> tuple[float, float]:
    """Seconds to the first token: Ostinato with the cache off, and transformers; taken in turns."""
    plain = load_model(resolve("gemma3-270m"), getattr(torch, dtype))
    plain.set_attn_implementation("sdpa")
    ours, peers = [], []
    with LLM(runtime, enable_prefix_caching=False, max_num_batched_tokens=STEP_TOKENS) as llm:
        for run in range(runs + 1):
            first = llm.generate(tokens, GREEDY)[0].metrics.ttft_s
            second = timed(lambda: transformers_prefill(plain, tokens))
            if run:  # the first run of each pays for memory and caches
                ours.append(first)
                peers.append(second)
    return statistics.median(ours), statistics.median(peers)


def transformers_prefill(model: torch.nn.Module, tokens: list[int]) -> int:
    """The prompt in chunks through transformers' own forward pass; the first new token."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        for start in range(0, len(tokens), STEP_TOKENS):
            chunk = ids[:, start : start + STEP_TOKENS]
            positions = torch.arange(start, start + chunk.shape[1])[None]
            output = model(
                input_ids=chunk, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
    return int(output.logits[0, -1].argmax())


def time_hits(runtime: Runtime, stored: str, asked: str, runs: int) -> tuple[float, float, int]:
    """Seconds to the first token from the device and from the host tier, and the bytes that a reload moves."""
    pages = runtime.layout.peak_pages(len(runtime.tokenizer(stored).input_ids) + 16, STEP_TOKENS) * 5 // 4
    device, host, loaded = [], [], 0
    with LLM(runtime, kv=["host:2GiB"], num_gpu_blocks_override=pages, max_num_batched_tokens=STEP_TOKENS) as llm:
        llm.generate(stored, GREEDY)
        for run in range(runs + 1):
            llm.reset_prefix_cache(device_only=True)
            from_host = llm.generate(asked, GREEDY)[0]
            from_device = llm.generate(asked, GREEDY)[0]
            assert set(from_host.cached_by_tier) == {"host"}, from_host.cached_by_tier
            assert set(from_device.cached_by_tier) == {"device"}, from_device.cached_by_tier
            loaded = from_host.bytes_loaded
            if run:
                host.append(from_host.metrics.ttft_s)
                device.append(from_device.metrics.ttft_s)
    return statistics.median(device), statistics.median(host), loaded


def measure_memcpy(size: int, runs: int = 9) -> float:
    """Bytes per second of one plain copy of ``size`` bytes."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return size / statistics.median(timed(lambda: target.copy_(source)) for _ in range(runs))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(result: dict[str, float], checks: dict[str, bool], ours: float, peer: float) -> None:
    cold, device, host = result["cold_ttft_s"], result["device_ttft_s"], result["host_ttft_s"]
    print(f"{result['prompt_tokens']} prompt tokens, {result['threads']} threads")
    print(f"cold      {cold * 1e3:8.1f} ms  {ours:.0f} tokens/s; transformers {peer:.0f}, ratio {ours / peer:.2f}")
    print(f"device    {device * 1e3:8.1f} ms  1/{cold / device:.0f} of cold")
    print(
        f"host      {host * 1e3:8.1f} ms  1/{cold / host:.0f} of cold, {result['bytes_loaded'] / 2**20:.1f} MiB loaded"
    )
    print(f"reload    {result['reload_s'] * 1e3:8.1f} ms  limit {result['reload_limit_s'] * 1e3:.1f} ms", end="")
    print(f" (memcpy {result['memcpy_bytes_per_s'] / 1e9:.1f} GB/s)")
    for name, passed in checks.items():
        print(f"{'pass' if passed else 'MISS'}  {name}")


if __name__ == "__main__":
    sys.exit(main())
