"""Tiny models of several families, in this process or in one of its own, for tests over a disk tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from e2e.support import Oracle
from families.configs import VOCABULARY, build
from ostinato.runtime.load import Runtime, build_runtime

CHATTER = Path(__file__).with_name("chatter.py")


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()


@cache
def model(name: str) -> tuple[Runtime, Oracle]:
    runtime = build_runtime(build(name), name=name, weights=bytes([5]) * 32, max_model_len=512)
    return runtime, Oracle(runtime)


def whole(count: int) -> int:
    return count // 16 * 16


def start(folder: Path, end: str, questions: Sequence[Any], seed: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHATTER), str(folder), end]
    seeded = {**os.environ, "PYTHONHASHSEED": str(seed)}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=seeded)
    assert child.stdin is not None
    child.stdin.write(json.dumps(questions))
    child.stdin.close()
    child.stdin = None
    return child


def ask(folder: Path, questions: Sequence[Any]) -> list[dict[str, Any]]:
    """In a process of its own."""
    output, _ = start(folder, "close", questions).communicate(timeout=240)
    return [json.loads(line) for line in output.splitlines()]


def check(name: str, answer: dict[str, Any]) -> None:
    cold = model(name)[1](answer["prompt"], len(answer["tokens"]))
    assert answer["tokens"] == list(cold.outputs[0].token_ids)
    assert answer["logits"] == cold.logits_sha256
