"""What a model's trial said, remembered between starts.

Owns: the name under which a verdict is kept, and its file in the user's cache folder.  Does not own: the trial
(``selfcheck``).

A trial's outcome follows from the weights, the config, the code and the machine; :func:`trial_name` is a digest of all
of them, so that a change of any one means another trial.  Only models that passed are remembered.  A file that cannot
be read, or has anything unexpected in it, is as good as none.  To have every model tried again, delete
``$XDG_CACHE_HOME/ostinato/verdicts``.

Runs once per model, at load.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import tokenizers
import torch
import transformers

from ostinato.runtime import native
from ostinato.runtime.linear import Choice
from ostinato.runtime.models import cache_folder
from ostinato.runtime.models.files import write_whole

_CODE: Final = ("runtime", "cache", "scheduler")
"""Packages that take part in a trial."""
_SWITCHES: Final = ("OSTINATO_", "ONEDNN_", "DNNL_", "MKL_", "OMP_", "ATEN_", "TORCH_", "LD_PRELOAD")
"""Environment variables that may choose other kernels begin like this."""
_CPU_FACTS: Final = ("model name", "flags", "features", "cpu part")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``strict``: the row rule had to be the strictest.  ``bitwise`` and ``difference`` are the promise's
    (``selfcheck.Promise``), ``choices`` the linear layers' (``linear.LinearPlan``)."""

    strict: bool
    bitwise: bool
    difference: float
    choices: dict[str, Choice]


def trial_name(weights: bytes, config: bytes, layout: bytes, dtype: str) -> str:
    """Names the trial of a model on this machine.  ``weights``, ``config`` and ``layout`` are digests."""
    library, missing = native.load()
    state = hashlib.sha256()
    parts = (
        *(weights, config, layout, dtype.encode(), _code_digest(), _processor()),
        *(module.__version__.encode() for module in (torch, transformers, tokenizers)),
        platform.python_version().encode(),
        str(library.path if library else missing).encode(),
        f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}".encode(),
        repr(sorted((k, v) for k, v in os.environ.items() if k.startswith(_SWITCHES))).encode(),
    )
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()[:32]


def recall(name: str) -> Verdict | None:
    """What the trial of this name said, if it was ever held."""
    try:
        return msgspec.json.decode((cache_folder("verdicts") / f"{name}.json").read_bytes(), type=Verdict)
    except (OSError, msgspec.MsgspecError):
        return None


def remember(name: str, verdict: Verdict) -> None:
    """Keep it.  A folder that cannot be written to costs a trial at the next start, and nothing else."""
    with contextlib.suppress(OSError):
        write_whole(cache_folder("verdicts") / f"{name}.json", msgspec.json.encode(verdict))


def _code_digest() -> bytes:
    root = Path(__file__).parents[1]
    state = hashlib.sha256()
    for package in _CODE:
        for source in sorted((root / package).rglob("*.py")):
            content = source.read_bytes()
            state.update(str(source.relative_to(root)).encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    return state.digest()


def _processor() -> bytes:
    """What there is to know of the processor: a folder of the user may lie on several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if line.lower().startswith(_CPU_FACTS)})).encode()
