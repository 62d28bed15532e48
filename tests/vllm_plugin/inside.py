"""Runs inside of vLLM's own virtual environment: one engine, some prompts, what came out.

    python inside.py JOB.json RESULT.json

A job: ``model``, ``llm`` (arguments of ``LLM``), ``transfer`` (kv-transfer-config or null), ``steps``: each a prompt
(``{"tokens": [...], "max_tokens": n}``), ``{"evict": true}`` (vLLM's own cache forgets, ours keeps) or ``{"wait": s}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class Recorder:
    """Digests of vLLM's own KV bytes, by key: when a block was saved, and after it was loaded."""

    def __init__(self) -> None:
        self.saved: dict[str, list[str]] = {}
        self.loaded: dict[str, list[str]] = {}
        self.tensors: dict[str, Any] = {}
        self.broken_group: int | None = None

    def install(self) -> None:
        from ostinato.integrations.vllm import worker
        from ostinato.transfer.job import JobKind

        plain_register, plain_copy, recorder = worker.WorkerHalf.register, worker.WorkerHalf._copy, self

        def register(half: Any, caches: Any) -> None:
            recorder.tensors = dict(caches)
            plain_register(half, caches)

        def copy(half: Any, kind: Any, move: Any) -> None:
            if kind is JobKind.LOAD and move.key.group == recorder.broken_group:
                raise OSError("injected")
            plain_copy(half, kind, move)
            names = half._layout.layers[move.key.group]
            found = [_digest(recorder.tensors[name][move.device_slot]) for name in names]
            key = f"{move.key.group}:{move.key.digest.hex()}"
            (recorder.loaded if kind is JobKind.LOAD else recorder.saved)[key] = found

        worker.WorkerHalf.register, worker.WorkerHalf._copy = register, copy


def _digest(block: Any) -> str:
    import torch

    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def run(job: dict[str, Any]) -> dict[str, Any]:
    recorder = Recorder()
    if job.get("record", True) and "Ostinato" in json.dumps(job.get("transfer")):
        recorder.install()
        recorder.broken_group = job.get("broken_group")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    more = {"kv_transfer_config": KVTransferConfig(**job["transfer"])} if job.get("transfer") else {}
    began = time.perf_counter()
    llm = LLM(job["model"], enforce_eager=True, skip_tokenizer_init=True, **job["llm"], **more)
    started = time.perf_counter() - began
    outputs = [result for step in job["steps"] if (result := _step(llm, step)) is not None]
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    result = {
        "started_s": started,
        "outputs": outputs,
        "groups": [type(group.kv_cache_spec).__name__ for group in groups],
        "saved": recorder.saved,
        "loaded": recorder.loaded,
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def _step(llm: Any, step: dict[str, Any]) -> dict[str, Any] | None:
    from vllm import SamplingParams

    if step.get("evict"):
        assert llm.reset_prefix_cache() is not False, "vLLM did not forget its prefix cache"
        return None
    if step.get("wait"):
        time.sleep(step["wait"])
        return None
    if step.get("shell"):
        import subprocess

        subprocess.run(step["shell"], shell=True, check=True)
        return None
    params = SamplingParams(max_tokens=step["max_tokens"], temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    began = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": step["tokens"]}], params, use_tqdm=False)
    first = output.outputs[0]
    return {
        "seconds": time.perf_counter() - began,
        "cached": output.num_cached_tokens,
        "tokens": list(first.token_ids),
        "logprobs": [entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)],
    }


if __name__ == "__main__":
    outcome = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(outcome))
