"""A process that asks tiny models over a disk tier; run by tests.  ``chatter.py FOLDER END`` with questions on stdin.

A question is ``[family, prompt, count]``, in JSON; of each answer a line of JSON goes to stdout.  END: ``close`` ends
in good order, ``hang`` waits to be killed with the engine open, ``signal`` asks all questions of the first family at
once, as the command line does, until SIGTERM comes.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from e2e.support import greedy
from families.configs import build
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import build_runtime
from ostinato.serve.stopping import stoppable


def open_llm(name: str, folder: str, **options: Any) -> LLM:
    runtime = build_runtime(build(name), name=name, weights=bytes([5]) * 32, max_model_len=512)
    spec = f"disk:{folder}/{name}:64MiB"
    return LLM(runtime, kv=[spec], num_gpu_blocks_override=200, max_num_batched_tokens=64, **options)


def report(output: RequestOutput) -> None:
    answer = {
        "prompt": list(output.prompt_token_ids),
        "cached": output.cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
        "logits": output.logits_sha256,
    }
    print(json.dumps(answer), flush=True)


def main(folder: str, end: str) -> None:
    torch.set_num_threads(1)
    questions = json.load(sys.stdin)
    if end == "signal":
        with stoppable() as stopper, open_llm(questions[0][0], folder, max_num_seqs=2) as llm:
            stopper.watch(llm)
            params = [greedy(count) for _, _, count in questions]
            llm.generate([prompt for _, prompt, _ in questions], params, on_finished=report)
        return
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name, prompt, count in questions:
            if name not in engines:
                engines[name] = stack.enter_context(open_llm(name, folder))
            report(engines[name].generate(prompt, greedy(count))[0])
        if end == "hang":
            print("hanging", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
