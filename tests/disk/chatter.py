"""A process that asks tiny models over a disk tier; run by tests.  ``chatter.py FOLDER END`` with questions on stdin.

A question is ``[family, prompt, count]``, in JSON; of each answer a line of JSON goes to stdout.  END: ``close`` ends
in good order, ``hang`` waits to be killed with the engine open, ``signal`` asks all questions of the first family at
once, as the command line does, until SIGTERM comes; ``doomed:N`` is killed before the N-th call of the operating system
that changes the folder, or at the end, and says of each answer whether what it stored was durable by then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from disk.writer import Countdown, DoomedFolder
from e2e.support import greedy, settle
from families.configs import build
from ostinato.connectors.disk import connector
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import build_runtime
from ostinato.serve.stopping import stoppable


def open_llm(name: str, folder: str, **options: Any) -> LLM:
    runtime = build_runtime(build(name), name=name, weights=bytes([5]) * 32, max_model_len=512)
    spec = f"disk:{folder}/{name}:64MiB"
    return LLM(runtime, kv=[spec], num_gpu_blocks_override=200, max_num_batched_tokens=64, **options)


def report(output: RequestOutput, **more: Any) -> None:
    answer = {
        "prompt": list(output.prompt_token_ids),
        "cached": output.cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
        "logits": output.logits_sha256,
        **more,
    }
    print(json.dumps(answer), flush=True)


def run_doomed(folder: str, questions: list[Any], calls: int) -> None:
    """One engine; every second answer's blocks are synced before it is told."""
    connector.OsFolder = lambda path: DoomedFolder(path, Countdown(calls))  # type: ignore[assignment,misc]
    llm = open_llm(questions[0][0], folder)
    for number, (_, prompt, count) in enumerate(questions):
        output = llm.generate(prompt, greedy(count))[0]
        if number % 2:
            settle(llm)
            llm.built.connectors[0].store.flush()  # type: ignore[attr-defined]
        report(output, durable=bool(number % 2))
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, end: str) -> None:
    torch.set_num_threads(1)
    questions = json.load(sys.stdin)
    if end == "signal":
        with stoppable() as stopper, open_llm(questions[0][0], folder, max_num_seqs=2) as llm:
            stopper.watch(llm)
            params = [greedy(count) for _, _, count in questions]
            llm.generate([prompt for _, prompt, _ in questions], params, on_finished=report)
        return
    if end.startswith("doomed:"):
        run_doomed(folder, questions, int(end.partition(":")[2]))
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
