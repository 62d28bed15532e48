"""A prompt's prefix from files, in a process that has never seen it.

Owns: the other process (``python -m ostinato.serve.demo.restart``: a question on stdin, its answer on stdout, both
JSON), and having it read from the disk rather than from the operating system's memory.  Does not own: the row.
"""

from __future__ import annotations

import ctypes
import mmap
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

MOSTLY: Final = 0.01
"""Part of the files that may be in memory where the row says that they came from the disk."""


@dataclass(frozen=True, slots=True)
class Question:
    """``prompt`` to ``model`` over ``tier``, with ``pages`` of device pool."""

    model: str
    dtype: str
    tier: str
    pages: int
    salt: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``warm``: the part of the tier's files that was in memory when the question was asked; None = cannot be told."""

    output: RequestOutput
    warm: float | None


def ask_anew(question: Question) -> Answer:
    """Answer in a new process, in this one's environment.  Raises OstinatoError with the last thing that it said."""
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
    if answer.warm > MOSTLY:
        return f"a new process, but warm: {answer.warm:.0%} of its files were still in the system's memory"
    return "a new process; its files came from the disk"


def drop_from_memory(folder: Path) -> float | None:
    """Have the system forget the files of ``folder``; the part of them that it kept, None where it cannot say."""
    kept = total = 0
    for path in sorted(folder.glob("slab-*")):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only what is written can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            pages = _pages_in_memory(file.fileno())
        if pages is None:
            return None
        kept, total = kept + pages.count(1), total + len(pages)
    return kept / total if total else None


def _pages_in_memory(descriptor: int) -> bytes | None:
    """For each page of a file, 1 = it is in memory.  Looking does not bring it there."""
    size = os.fstat(descriptor).st_size
    if not size:
        return b""
    answer = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        refused = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), answer)
        del start  # the mapping cannot be closed before
    return None if refused else bytes(state & 1 for state in answer)


def answer(question: Question) -> Answer:
    """In this process, whose kernels are warm when the question is asked."""
    from ostinato.runtime.load import load_runtime

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
