"""A prompt's prefix from files, in a process that has never seen it.

Owns: the other process (``python -m ostinato.serve.demo.restart``: a question on stdin, its answer on stdout, both
JSON), and having it read from the disk rather than from the operating system's memory.  Does not own: the row.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ostinato.connectors.disk.options import parse_options
from ostinato.connectors.registry import parse_spec
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import OstinatoError
from ostinato.serve.demo.stage import SAMPLING, STEP_TOKENS, warm_up

SAMPLES: Final = 256
"""Places of a file at which is looked whether they are in memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """``prompt`` to ``model`` over ``tier``.  ``threads``: of the arithmetic; results are the same with any number."""

    model: str
    dtype: str
    tier: str
    pages: int
    threads: int
    salt: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``warm``: the part of the tier's files that was in memory when the question was asked; None = cannot be told."""

    output: RequestOutput
    warm: float | None


def ask_anew(question: Question) -> Answer:
    """Answer in a new process.  Raises OstinatoError with the last thing that it said."""
    words = [sys.executable, "-m", "ostinato.serve.demo.restart"]
    done = subprocess.run(words, input=msgspec.json.encode(question), capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise OstinatoError(f"the process that was to read the disk tier ended with {done.returncode}: {said[-1]}")
    return msgspec.json.decode(done.stdout, type=Answer)


def warmth(answer: Answer) -> str:
    """What the row says of where its bytes came from."""
    if answer.warm is None:
        return "a new process; whether its files came from memory cannot be told here"
    if answer.warm > 0.01:
        return f"a new process, but warm: {answer.warm:.0%} of its files were still in the system's memory"
    return "a new process; its files came from the disk"


def drop_from_memory(folder: Path) -> float | None:
    """Have the system forget the files of ``folder``; the part of them that it kept, None where it cannot say."""
    held, looked = 0, 0
    for path in sorted(folder.glob("slab-*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # only what is written can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(descriptor).st_size
            for place in range(0, size, max(1, size // SAMPLES)):
                held += _is_in_memory(descriptor, place)
                looked += 1
        except OSError:
            return None
        finally:
            os.close(descriptor)
    return held / looked if looked else None


def _is_in_memory(descriptor: int, place: int) -> bool:
    """Raises OSError on file systems that read whether they must wait or not."""
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def answer(question: Question) -> Answer:
    """In this process, whose kernels are warm when the question is asked."""
    import torch

    from ostinato.runtime.load import load_runtime

    torch.set_num_threads(question.threads)
    runtime = load_runtime(question.model, question.dtype)
    with LLM(
        runtime,
        kv=[question.tier],
        num_gpu_blocks_override=question.pages,
        max_num_batched_tokens=STEP_TOKENS,
    ) as llm:
        warm_up(llm)
        llm.built.engine.drain()
        warm = drop_from_memory(Path(parse_options(parse_spec(question.tier)).path))
        output = llm.generate(question.prompt, SAMPLING, cache_salt=question.salt)[0]
        return Answer(output, warm)


def main() -> int:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    try:
        found = answer(question)
    except OstinatoError as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
